"""The architectures of a `qwen3_5` checkpoint and of its DFlash2 drafter as frozen, hashable dataclasses."""

import dataclasses
from collections.abc import Mapping
from typing import Any

_MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
_DTYPES = ("float32", "bfloat16", "float16")
KERNELS = ("auto", "off", "interpret")


class ConfigError(ValueError):
    """A config.json that lacks a key, contradicts itself, or asks for something this port does not compute."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of the text model.

    The layers repeat in groups: `linear_per_group` Gated DeltaNet layers, then one gated full-attention layer.
    Field names follow the checkpoint's `text_config` where it has one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    linear_per_group: int
    # Gated full attention.
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    mrope_section: tuple[int, int, int]
    # Gated DeltaNet.
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    mtp_num_hidden_layers: int
    max_position_embeddings: int
    initializer_range: float
    eos_token_ids: tuple[int, ...]
    dtype: str
    # How attention and recurrence are computed; not of the checkpoint. "auto": by Pallas kernels on a GPU in half
    # precision, in plain jnp otherwise; "off": in plain jnp; "interpret": by the kernels without a GPU, slowly.
    kernels: str = "auto"

    @property
    def num_groups(self) -> int:
        return self.num_hidden_layers // (self.linear_per_group + 1)

    @property
    def num_linear_layers(self) -> int:
        return self.num_groups * self.linear_per_group

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: queries, keys, then values."""
        keys = 2 * self.linear_num_key_heads * self.linear_key_head_dim
        return keys + self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def layer_types(self) -> tuple[str, ...]:
        group = ("linear_attention",) * self.linear_per_group + ("full_attention",)
        return group * self.num_groups

    def __post_init__(self):
        _check(self)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads a parsed config.json: the multimodal form (with `text_config`) or the text-only one.

        Raises:
          ConfigError: a key is missing, or its value is not supported. The message names the key.
        """
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise ConfigError(f"text_config must be an object, got {text!r}")
        _reject_unsupported(config, text)
        rope = _rope(text)
        head_dim = _positive(text, "head_dim")
        return cls(
            linear_per_group=_linear_per_group(text),
            rotary_dim=int(head_dim * rope["partial_rotary_factor"]),
            rope_theta=rope["rope_theta"],
            mrope_section=rope["mrope_section"],
            tie_word_embeddings=_tied(config, text),
            mtp_num_hidden_layers=text.get("mtp_num_hidden_layers", 0),
            max_position_embeddings=text.get("max_position_embeddings", 262144),
            initializer_range=_number(text.get("initializer_range", 0.02), "initializer_range"),
            rms_norm_eps=_number(text.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
            eos_token_ids=token_ids(_first(text, config, "eos_token_id"), "eos_token_id"),
            dtype=str(_first(text, config, "dtype", "torch_dtype") or "bfloat16").removeprefix("torch."),
            **{name: _positive(text, name) for name in _PLAIN_KEYS},
        )

    def to_hf(self) -> dict[str, Any]:
        """The text-only config.json that describes this model; `from_hf` of it gives the same config back."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **{name: getattr(self, name) for name in _PLAIN_KEYS},
            "layer_types": list(self.layer_types),
            "full_attention_interval": self.linear_per_group + 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_dim / self.head_dim,
                "mrope_interleaved": True,
                "mrope_section": list(self.mrope_section),
            },
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "output_gate_type": "swish",
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "mtp_num_hidden_layers": self.mtp_num_hidden_layers,
            "mtp_use_dedicated_embeddings": False,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "eos_token_id": list(self.eos_token_ids) or None,
            "dtype": self.dtype,
        }


# Keys whose value is taken as it is and whose absence is an error: no default of ours may guess a shape.
_PLAIN_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)

# key -> the values this port computes. `output_gate_type` is the activation of the Gated DeltaNet's norm;
# the gate of full attention is a sigmoid whatever it says.
_SUPPORTED = {
    "hidden_act": ("silu",),
    "output_gate_type": ("swish", "silu"),
    "attn_output_gate": (True,),
    "attention_bias": (False,),
    "mtp_num_hidden_layers": (0, 1),
    "mtp_use_dedicated_embeddings": (False,),
    "num_experts": (0,),
    "use_sliding_window": (False,),
}


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """A token id field of a JSON config, which may be an int, a list of ints, or absent."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool) or i < 0:
            raise ConfigError(f"{name} must be a token id or a list of them, got {value!r}")
    return ids


def _first(text: Mapping[str, Any], config: Mapping[str, Any], *keys: str) -> Any:
    """The first value that is there, in the text config, then at the top level; None if there is none."""
    return next((level[key] for level in (text, config) for key in keys if level.get(key) is not None), None)


def _get(text: Mapping[str, Any], key: str) -> Any:
    if text.get(key) is None:
        raise ConfigError(f"config.json lacks {key!r}")
    return text[key]


def _positive(text: Mapping[str, Any], key: str) -> int:
    value = _get(text, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} must be a positive integer, got {value!r}")
    return value


def _number(value: Any, key: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigError(f"{key} must be a positive number, got {value!r}")
    return float(value)


def _reject_unsupported(config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    for level in (config, text):
        if level.get("model_type", "qwen3_5") not in _MODEL_TYPES:
            raise ConfigError(f"model_type {level['model_type']!r} is not supported; expected one of {_MODEL_TYPES}")
    for key, allowed in _SUPPORTED.items():
        value = text.get(key, allowed[0])
        if value not in allowed or type(value) is not type(allowed[0]):
            raise ConfigError(f"{key} = {text[key]!r} is not supported; this port computes {allowed}")


def _tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Whether either level ties the output head to the embedding."""
    values = [level.get("tie_word_embeddings") or False for level in (config, text)]
    if not all(isinstance(value, bool) for value in values):
        raise ConfigError(f"tie_word_embeddings must be true or false, got {values}")
    return any(values)


def _linear_per_group(text: Mapping[str, Any]) -> int:
    """Length of the run of linear layers in front of every full-attention layer."""
    n = _positive(text, "num_hidden_layers")
    types = text.get("layer_types")
    if types is None:
        interval = _positive(text, "full_attention_interval")
        types = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(n)]
    if not isinstance(types, (list, tuple)):
        raise ConfigError(f"layer_types must be a list, got {types!r}")
    types = list(types)
    if "full_attention" not in types:
        raise ConfigError(f"layer_types has no full_attention layer: {types}")
    run = types.index("full_attention")
    group = ["linear_attention"] * run + ["full_attention"]
    if text.get("full_attention_interval") not in (None, run + 1):
        raise ConfigError(
            f"full_attention_interval = {text['full_attention_interval']} contradicts layer_types {types}"
        )
    if run == 0 or n % len(group) or types != group * (n // len(group)):
        raise ConfigError(
            f"layer_types must repeat one group (linear layers, then one full_attention) over {n} layers: {types}"
        )
    return run


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE constants, from `rope_parameters` or from the older flat keys."""
    found = [text.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    for rope in found:
        if not isinstance(rope, Mapping):
            raise ConfigError(f"rope_parameters must be an object, got {rope!r}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ConfigError(f"rope_type {kind!r} is not supported; expected 'default'")
    rope = found[0] or found[1]
    if not rope.get("mrope_interleaved", True):
        raise ConfigError("mrope_interleaved = false is not supported: this port interleaves the sections")
    theta, factor = (_number(_get({**text, **rope}, key), key) for key in ("rope_theta", "partial_rotary_factor"))
    half = int(_positive(text, "head_dim") * factor) // 2
    section = rope.get("mrope_section") or (half, 0, 0)
    if not isinstance(section, (list, tuple)):
        raise ConfigError(f"mrope_section must be a list, got {section!r}")
    return {"rope_theta": theta, "partial_rotary_factor": factor, "mrope_section": tuple(section)}


def _check(c: ModelConfig) -> None:
    for name in (*_PLAIN_KEYS, "linear_per_group", "rotary_dim", "max_position_embeddings"):
        _positive(dataclasses.asdict(c), name)
    pairs = [
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ]
    for many, few in pairs:
        if getattr(c, many) % getattr(c, few):
            raise ConfigError(f"{many} = {getattr(c, many)} is not a multiple of {few} = {getattr(c, few)}")
    if c.num_hidden_layers % (c.linear_per_group + 1):
        raise ConfigError(f"{c.num_hidden_layers} layers are not whole groups of {c.linear_per_group + 1}")
    if c.rotary_dim % 2 or c.rotary_dim > c.head_dim:
        raise ConfigError(f"rotary_dim = {c.rotary_dim} must be even and at most head_dim = {c.head_dim}")
    section = c.mrope_section
    if (
        len(section) != 3
        or not all(isinstance(n, int) and n >= 0 for n in section)
        or sum(section) != c.rotary_dim // 2
    ):
        raise ConfigError(
            f"mrope_section {list(c.mrope_section)} must have three parts that add up to {c.rotary_dim // 2}"
        )
    if c.linear_conv_kernel_dim < 2:
        raise ConfigError(f"linear_conv_kernel_dim must be at least 2, got {c.linear_conv_kernel_dim}")
    if c.dtype not in _DTYPES:
        raise ConfigError(f"dtype {c.dtype!r} is not supported; expected one of {_DTYPES}")
    if c.kernels not in KERNELS:
        raise ConfigError(f"kernels {c.kernels!r} is none of {KERNELS}")
    for i in c.eos_token_ids:
        if i >= c.vocab_size:
            raise ConfigError(f"eos_token_id {i} is outside the vocabulary of {c.vocab_size} ids")


@dataclasses.dataclass(frozen=True)
class DFlash2Config:
    """Sizes and constants of a DFlash2 block drafter, which shares embedding and output head with its target.

    Field names follow the drafter's config.json and its `dflash_config`. What only sibling models set (an embedding
    scale, an output multiplier, soft-capped logits, attention sinks) is refused. Convolutions and selector, which the
    first version, DFlash, did not have, can be left out one by one: `null` in `dflash_config`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]  # layers of the target whose output is read, 0 for the first
    block_size: int  # the anchor and the drafts behind it
    mask_token_id: int
    conv_kernel_size: int | None  # None: no convolutions
    conv_group_size: int
    selector_rank: int | None  # None: no selector, a candidate's score is its logit
    selector_top_k: int
    initializer_range: float
    dtype: str

    def __post_init__(self):
        _check_dflash2(self)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DFlash2Config":
        """Reads a parsed config.json.

        Raises:
          ConfigError: a key is missing, or its value is not supported. The message names the key.
        """
        if not is_dflash2(config):
            raise ConfigError(
                "config.json has no 'dflash_config' with 'selector_rank': it does not describe a DFlash2 drafter"
            )
        own = config["dflash_config"]
        _reject_unsupported_dflash2(config, own)
        rope = config.get("rope_parameters") or {}
        if not isinstance(rope, Mapping) or rope.get("rope_type", "default") != "default":
            raise ConfigError(f"rope_parameters {rope!r} are not supported; expected rope_type 'default'")
        taps = _get(own, "target_layer_ids")
        return cls(
            rope_theta=_number(_get({**config, **rope}, "rope_theta"), "rope_theta"),
            rms_norm_eps=_number(config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
            max_position_embeddings=config.get("max_position_embeddings", 262144),
            target_layer_ids=tuple(taps) if isinstance(taps, (list, tuple)) else (taps,),
            mask_token_id=_get(own, "mask_token_id"),
            initializer_range=_number(config.get("initializer_range", 0.02), "initializer_range"),
            dtype=str(_first(config, config, "dtype", "torch_dtype") or "bfloat16").removeprefix("torch."),
            **{name: _positive(config, name) for name in _DFLASH2_KEYS},
            **{name: _positive(own, name) for name in _DFLASH2_OWN_KEYS if not _left_out(own, name)},
            **{name: None for name in _DFLASH2_PARTS if _left_out(own, name)},
        )

    def check_target(self, cfg: ModelConfig) -> None:
        """Raises ValueError where the drafter is not one for the model of `cfg`."""
        for ours, theirs in (
            ("vocab_size", "vocab_size"),
            ("hidden_size", "hidden_size"),
            ("num_target_layers", "num_hidden_layers"),
        ):
            if getattr(self, ours) != getattr(cfg, theirs):
                raise ValueError(
                    f"the drafter has {ours} = {getattr(self, ours)}, but the model has {theirs} = "
                    f"{getattr(cfg, theirs)}; use a drafter that was trained for this model"
                )

    def to_hf(self) -> dict[str, Any]:
        """The config.json that describes this drafter; `from_hf` of it gives the same config back."""
        return {
            "architectures": ["DFlash2DraftModel"],
            "model_type": "qwen3",
            **{name: getattr(self, name) for name in _DFLASH2_KEYS},
            "layer_types": ["sliding_attention"] * self.num_hidden_layers,
            "use_sliding_window": True,
            "max_window_layers": self.num_hidden_layers,
            "is_causal": False,
            "attention_bias": False,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "tie_word_embeddings": False,
            "dtype": self.dtype,
            "dflash_config": {
                **{name: getattr(self, name) for name in _DFLASH2_OWN_KEYS},
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
        }


_DFLASH2_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "num_target_layers",
)
_DFLASH2_OWN_KEYS = ("block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# Keys whose `null` leaves a part out. One that is absent is an error: it may be another kind of drafter.
_DFLASH2_PARTS = ("conv_kernel_size", "selector_rank")

# key -> the value this port computes, and that an absent key stands for; at the top or in `dflash_config`.
_DFLASH2_SUPPORTED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": True,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "sample_from_anchor": False,
    "attention_sink_bias": False,
    "swa_window_size": None,
}


def _left_out(own: Mapping[str, Any], key: str) -> bool:
    return key in _DFLASH2_PARTS and key in own and own[key] is None


def is_dflash2(config: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json describes a DFlash2 drafter. (A first-version DFlash drafter has no selector.)"""
    own = config.get("dflash_config")
    return isinstance(own, Mapping) and "selector_rank" in own


def _reject_unsupported_dflash2(config: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for key, allowed in _DFLASH2_SUPPORTED.items():
        for level in (config, own):
            if level.get(key, allowed) != allowed:
                raise ConfigError(f"{key} = {level[key]!r} is not supported; this port computes {allowed!r}")
    # Readers take a sliding layer of which nothing is said for a causal one: then every draft would be another.
    causal = config.get("is_causal", own.get("causal"))
    if causal is not False:
        raise ConfigError(
            f"is_causal = {causal!r} is not supported: a block of drafts sees itself whole; set it to false"
        )
    types = config.get("layer_types", ["sliding_attention"])
    if not isinstance(types, (list, tuple)) or set(types) != {"sliding_attention"}:
        raise ConfigError(f"layer_types {types!r} is not supported; expected sliding_attention in every layer")


def _check_dflash2(c: DFlash2Config) -> None:
    fields = dataclasses.asdict(c)
    for name in (*_DFLASH2_KEYS, *_DFLASH2_OWN_KEYS, "max_position_embeddings"):
        if not _left_out(fields, name):
            _positive(fields, name)
    if c.num_attention_heads % c.num_key_value_heads or c.head_dim % 2:
        raise ConfigError(
            f"{c.num_attention_heads} heads of {c.head_dim} do not fit {c.num_key_value_heads} key-value heads: "
            "the first must be a multiple of the last, and the second even"
        )
    if c.hidden_size % c.conv_group_size:
        raise ConfigError(f"hidden_size = {c.hidden_size} is not a multiple of conv_group_size = {c.conv_group_size}")
    if c.block_size < 2:
        raise ConfigError(f"block_size must be at least 2, the anchor and a draft, got {c.block_size}")
    if c.selector_top_k > c.vocab_size:
        raise ConfigError(f"selector_top_k = {c.selector_top_k} candidates are more than vocab_size = {c.vocab_size}")
    taps = c.target_layer_ids
    if not taps or not all(type(i) is int and 0 <= i < c.num_target_layers for i in taps) or len(set(taps)) < len(taps):
        raise ConfigError(
            f"target_layer_ids must be different layers in [0, {c.num_target_layers - 1}], got {list(taps)}"
        )
    if type(c.mask_token_id) is not int or not 0 <= c.mask_token_id < c.vocab_size:
        raise ConfigError(f"mask_token_id {c.mask_token_id!r} is not a token id in [0, {c.vocab_size - 1}]")
    if c.dtype not in _DTYPES:
        raise ConfigError(f"dtype {c.dtype!r} is not supported; expected one of {_DTYPES}")
