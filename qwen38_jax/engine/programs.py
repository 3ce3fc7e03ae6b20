"""The two ways of decoding, and their compiled programs for a batch."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax import decode, speculative
from qwen38_jax.block_length import always_long
from qwen38_jax.config import ModelConfig
from qwen38_jax.decode import StepOutput
from qwen38_jax.drafters.interface import Drafter
from qwen38_jax.params import Params
from qwen38_jax.sampling import SamplerState
from qwen38_jax.spec_config import SpecConfig
from qwen38_jax.state import State, StateConfig

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Plain:
    """One token a step. `weights` is what its programs take first: the parameters."""

    cfg: ModelConfig
    rows = 0  # of verify blocks
    drafters = ()
    lengths = (0,)  # drafts to verify, one program each, ascending

    def weights(self, params: Params) -> Any:
        return params

    def start(self, sizes: StateConfig, weights: Any, model: State, sampler: SamplerState, active: Array, limit: Array):
        return decode.start(self.cfg, model, sampler, active)

    def prefill(self, weights: Any, tokens: Array, valid: Array, state):
        return decode.prefill(weights, self.cfg, tokens, valid, state)

    def emit(self, top: int, weights: Any, state):
        return decode.emit(weights, state, top)

    def step(self, length: int, top: int, weights: Any, state):
        return decode.decode_step(weights, self.cfg, state, top)

    def length(self, output: StepOutput, active: np.ndarray) -> int:
        """Drafts that the step after `output` verifies."""
        return 0


class Speculative:
    """Drafts in every step. `weights` are the parameters and the drafter, which has some of its own."""

    def __init__(self, cfg: ModelConfig, drafter: Drafter, spec: SpecConfig):
        self.cfg, self.drafter, self.spec = cfg, drafter, spec
        self.rows = spec.verify_tokens + 1
        short = () if always_long(spec, drafter.draft_tokens) else (drafter.draft_tokens,)
        self.lengths = (*short, spec.verify_tokens)

    @property
    def drafters(self) -> tuple[str, ...]:
        """As `plan.Settings` names them."""
        return tuple(name for name in (self.drafter.name, "lookup" if self.spec.lookup else "") if name)

    @property
    def draft_tokens(self) -> int:
        """Of the drafter itself in every step."""
        return self.drafter.draft_tokens if self.spec.tree is None else len(self.spec.tree.paths)

    def weights(self, params: Params) -> Any:
        return params, self.drafter

    def start(self, sizes: StateConfig, weights: Any, model: State, sampler: SamplerState, active: Array, limit: Array):
        return speculative.start(self.cfg, weights[1], self.spec, sizes, model, sampler, active, limit)

    def prefill(self, weights: Any, tokens: Array, valid: Array, state):
        params, drafter = weights
        return speculative.prefill(params, self.cfg, drafter, tokens, valid, state)

    def emit(self, top: int, weights: Any, state):
        return speculative.emit(weights[0], state, top)

    def step(self, length: int, top: int, weights: Any, state):
        params, drafter = weights
        return speculative.decode_step(params, self.cfg, drafter, self.spec, state, verify_tokens=length, top=top)

    def length(self, output: StepOutput, active: np.ndarray) -> int:
        """Drafts that the step after `output` verifies: what any of the `active [B]` sequences wants."""
        return self.lengths[-1] if (output.long & active).any() else self.lengths[0]


@dataclasses.dataclass
class Programs:
    """Compiled programs for one batch size and capacity; every one takes `(weights, ..., state)`.

    prefill: by chunk length. step: by the number of drafts that it verifies.
    """

    prefill: dict[int, jax.stages.Compiled]
    emit: jax.stages.Compiled
    step: dict[int, jax.stages.Compiled]

    @classmethod
    def compile(cls, decoding: Plain | Speculative, weights: Any, state: Any, top: int) -> "Programs":
        """Everything but prefill, which `add_prefill` compiles. Arguments may be abstract."""
        return cls(
            prefill={},
            emit=_compile(functools.partial(decoding.emit, top), weights, state),
            step={n: _compile(functools.partial(decoding.step, n, top), weights, state) for n in decoding.lengths},
        )

    def add_prefill(self, decoding: Plain | Speculative, weights: Any, state: Any, slots: int, chunks: Iterable[int]):
        for n in chunks:
            if n not in self.prefill:
                tokens = jax.ShapeDtypeStruct((slots, n), jnp.int32)
                valid = jax.ShapeDtypeStruct((slots, n), jnp.bool_)
                self.prefill[n] = _compile(decoding.prefill, weights, tokens, valid, state)

    @property
    def all(self) -> list[jax.stages.Compiled]:
        return [*self.prefill.values(), self.emit, *self.step.values()]

    @property
    def workspace(self) -> int:
        """Bytes that the hungriest of them needs beside its arguments and results."""
        analyses = [p.memory_analysis() for p in self.all]
        return max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)


def _compile(function: Callable, *args) -> jax.stages.Compiled:
    """Compiles; the last argument, the state, gives its memory to the result."""
    return jax.jit(function, donate_argnums=len(args) - 1).lower(*args).compile()
