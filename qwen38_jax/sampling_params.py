"""What a request asks of the sampler: validated on the host, before anything reaches a compiled step.

Every check happens here because inside a compiled program there is none: JAX clamps an id that is too large,
wraps a negative one, and carries a NaN to the end without a word.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

GREEDY_BELOW = 1e-5  # a temperature under this is taken for 0: nothing but the argmax is left
MAX_LOGIT_BIASES = 300  # OpenAI's limit; it is also the static width of the compiled step's bias table
MAX_STOP_IDS = 64  # static width of the stop-id table, the model's own end-of-text ids apart
MAX_LOGPROBS = 20
INT32_MAX = 2**31 - 1

# field: (lowest, highest, whether the lowest is itself excluded). The outer bounds of temperature, penalty
# and bias are far beyond use; they keep fp32 from overflowing, which would turn a masked -inf into NaN.
_REAL_RANGES = {
    "temperature": (0.0, 1e6, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (1e-6, 1e6, False),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
}
_INTEGER_RANGES = {
    "top_k": (0, INT32_MAX),
    "min_new_tokens": (0, INT32_MAX),
    "max_new_tokens": (1, INT32_MAX),
    "seed": (0, 2**64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
}
_BIAS_LIMIT = 1e9
_GENERATION_CONFIG_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "min_new_tokens",
    "max_new_tokens",
)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops. Hashable. A bad value is a ValueError that names it.

    The penalties follow OpenAI and vLLM: `repetition_penalty` divides (multiplies, when negative) the logit of
    every id seen in prompt or output; `presence_penalty` and `frequency_penalty` look at the output only.
    """

    temperature: float = 1.0  # [0, 1e6]; 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1], relative to the most probable token, after temperature
    repetition_penalty: float = 1.0  # [1e-6, 1e6]
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    logit_bias: tuple[tuple[int, float], ...] = ()  # a mapping or pairs (id, bias); -inf bans the id
    min_new_tokens: int = 0  # no stop id is sampled before this many tokens
    max_new_tokens: int = 2048
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own
    stop: tuple[str, ...] = ()  # strings, matched on the detokenised text
    seed: int | None = None  # [0, 2**64); None lets the engine draw one
    logprobs: int | None = None  # also report the chosen token's log-probability and this many alternatives
    ignore_eos: bool = False  # the model's own end-of-text ids do not stop the request

    def __post_init__(self):
        normal: dict[str, Any] = {}
        for name, bounds in _REAL_RANGES.items():
            normal[name] = float(_number(name, getattr(self, name), Real, *bounds))
        for name, bounds in _INTEGER_RANGES.items():
            if getattr(self, name) is not None or name not in ("seed", "logprobs"):
                normal[name] = int(_number(name, getattr(self, name), Integral, *bounds))
        normal["logit_bias"] = _bias_pairs(self.logit_bias)
        normal["stop_token_ids"] = _stop_token_ids(self.stop_token_ids)
        normal["stop"] = _stop_strings(self.stop)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        for name, value in normal.items():
            object.__setattr__(self, name, value)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be at most max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}"
            )

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax."""
        return self.temperature < GREEDY_BELOW

    def stop_ids(self, eos_ids: Iterable[int]) -> tuple[int, ...]:
        """All ids that end the request, ascending: its own and, unless `ignore_eos`, the model's."""
        return tuple(sorted({*self.stop_token_ids, *(() if self.ignore_eos else eos_ids)}))

    def validate_ids(self, vocab_size: int) -> None:
        """Raises ValueError, naming the id, where a biased or stop id lies outside [0, vocab_size)."""
        for name, ids in (
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("stop_token_ids", self.stop_token_ids),
        ):
            for token in ids:
                _number(f"{name} id", token, Integral, 0, vocab_size - 1)

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any] | None, **overrides: Any) -> "SamplingParams":
        """Parameters with the model's own defaults.

        Args:
            config: the content of generation_config.json, or None where the checkpoint has none. An absent or
                null key leaves this class's default; `do_sample: false` means temperature 0.
            overrides: what the request sets; None means "not set".
        """
        config = config or {}
        defaults = {name: config[name] for name in _GENERATION_CONFIG_FIELDS if config.get(name) is not None}
        if config.get("do_sample") is False:
            defaults["temperature"] = 0.0
        return cls(**defaults | {name: value for name, value in overrides.items() if value is not None})


def _number(name: str, value: Any, kind: type, low: float, high: float, low_excluded: bool = False) -> Any:
    """`value`, if it is a `kind` of number (a bool is not) within the bounds; NaN fails both comparisons."""
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number or not (low < value if low_excluded else low <= value) or not value <= high:
        noun = "an integer" if kind is Integral else "a number"
        bracket = "(" if low_excluded else "["
        raise ValueError(f"{name} must be {noun} in {bracket}{low}, {high}], got {value!r}")
    return value


def _bias_pairs(bias: Mapping[int, float] | Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [(token, value) for token, value in (bias.items() if isinstance(bias, Mapping) else bias)]
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias must map ids to numbers (a mapping or pairs), got {bias!r}") from None
    for token, value in pairs:
        _number("logit_bias id", token, Integral, 0, INT32_MAX)
        if isinstance(value, bool) or value != float("-inf"):
            _number(f"logit_bias of id {token} (unless -inf)", value, Real, -_BIAS_LIMIT, _BIAS_LIMIT)
    if len({token for token, _ in pairs}) != len(pairs):
        raise ValueError(f"logit_bias must name each id once, got {bias!r}")
    if len(pairs) > MAX_LOGIT_BIASES:
        raise ValueError(f"logit_bias must have at most {MAX_LOGIT_BIASES} entries, got {len(pairs)}")
    return tuple(sorted((int(token), float(value)) for token, value in pairs))


def _stop_token_ids(ids: Iterable[int]) -> tuple[int, ...]:
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise ValueError(f"stop_token_ids must be a sequence of ids, got {ids!r}")
    checked = {int(_number("stop_token_ids id", token, Integral, 0, INT32_MAX)) for token in ids}
    if len(checked) > MAX_STOP_IDS:
        raise ValueError(f"stop_token_ids must have at most {MAX_STOP_IDS} ids, got {len(checked)}")
    return tuple(sorted(checked))


def _stop_strings(stop: Iterable[str]) -> tuple[str, ...]:
    # A bare string is an iterable of its letters, each of which would end the request.
    if isinstance(stop, str) or not isinstance(stop, Iterable):
        raise ValueError(f"stop must be a sequence of strings, got {stop!r}")
    stop = tuple(stop)
    for text in stop:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop must hold non-empty strings, got {text!r}")
    return stop
