"""What goes into the engine and what comes out."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from qwen38_jax.engine.metrics import SpeculationMetrics
from qwen38_jax.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt: exactly one of `prompt`, `messages` and `prompt_ids`.

    Attributes:
      prompt: raw text; the strings of special tokens in it are parsed as such.
      messages: a conversation in OpenAI's form, rendered with the checkpoint's chat template; the strings of special
        tokens in its content are text like any other.
      prompt_ids: token ids as they are.
      sampling: None takes the checkpoint's own defaults.
      thinking: whether the chat template opens a think block; for `messages` only.
    """

    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt_ids: Sequence[int] | None = None
    sampling: SamplingParams | None = None
    thinking: bool = True

    def __post_init__(self):
        given = [name for name in ("prompt", "messages", "prompt_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a request needs exactly one of prompt, messages and prompt_ids, got {given or 'none'}")


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """The model's own log-probability of an emitted token, before temperature and filters, and of the likeliest."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Completion:
    """The answer to one request.

    Attributes:
      token_ids: every token emitted, the stop id included.
      text: without the stop id, cut before a stop string.
      finish_reason: "stop" (a stop id or stop string) or "length".
      prompt_tokens: length of the prompt.
      steps: decode steps it took; the first token comes out of the prefill.
      prefill_seconds: from the start until the first token, for the whole batch.
      decode_seconds: from there until this request's last token.
      compile_seconds: spent on compiling before that, which neither of the two contains.
      logprobs: one entry a token where the request asked for them.
      speculation: what the drafts did, where there were some.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    prompt_tokens: int
    steps: int
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    logprobs: tuple[TokenLogprob, ...] | None = None
    speculation: SpeculationMetrics | None = None
