"""Batched generation over a static batch: every prompt is read, then all sequences are decoded together."""

import dataclasses
import functools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax.checkpoint import load_checkpoint
from qwen38_jax.checkpoint.load import read_config, sound_account
from qwen38_jax.config import ModelConfig
from qwen38_jax.decode import DecodeState, StepOutput, decode_step, emit, prefill, start
from qwen38_jax.engine.memory import device_budget
from qwen38_jax.engine.plan import Settings, Weights, chunk_lengths, require_fit
from qwen38_jax.engine.request import Completion, Request
from qwen38_jax.engine.stream import Stream
from qwen38_jax.evaluation.hidden import CHUNK
from qwen38_jax.evaluation.perplexity import Score, score
from qwen38_jax.params import Params
from qwen38_jax.sampling import sampler_state
from qwen38_jax.sampling_params import MAX_LOGPROBS, SamplingParams
from qwen38_jax.state import abstract_state, init_state
from qwen38_jax.tokenizer import Tokenizer

SHIPPED_CHECKPOINT = Path(__file__).resolve().parents[1] / "checkpoints" / "tiny"

OnText = Callable[[int, str], None]


class Programs(NamedTuple):
    """Compiled programs for one batch size and capacity; every one takes `(params, ..., state)`."""

    prefill: dict[int, jax.stages.Compiled]  # by chunk length
    emit: jax.stages.Compiled
    step: jax.stages.Compiled

    @property
    def workspace(self) -> int:
        """Bytes that the hungriest of them needs beside its arguments and results."""
        analyses = [p.memory_analysis() for p in (*self.prefill.values(), self.emit, self.step)]
        return max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)


class Engine:
    """A checkpoint ready to generate.

    engine = Engine.from_checkpoint()
    [completion] = engine.generate([Request(prompt="def fibonacci(n):")])
    print(completion.text)
    """

    def __init__(
        self,
        params: Params,
        cfg: ModelConfig,
        tokenizer: Tokenizer,
        *,
        generation_config: dict | None = None,
        state_dtype: str = "float32",
        max_batch: int = 8,
        memory_gib: float | None = None,
    ):
        """`max_batch` requests are decoded together; `state_dtype` is that of the recurrent state.

        What would need more than the device has free, or more than `memory_gib` in all, is refused. (To have XLA keep
        to `memory_gib` as well, call `memory.cap_device_memory` before JAX looks at its devices.)
        """
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        if tokenizer.vocab_size > cfg.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} ids but the model only {cfg.vocab_size}: "
                "they are not of the same checkpoint"
            )
        self.params, self.cfg, self.tokenizer = params, cfg, tokenizer
        self._generation_config = generation_config
        self._state_dtype, self._max_batch, self._memory_gib = state_dtype, max_batch, memory_gib
        self._weights = Weights.of_params(params, cfg)
        self._programs: dict[tuple, Programs] = {}

    @classmethod
    def from_checkpoint(
        cls,
        directory: str | Path | None = None,
        *,
        dtype: str | None = None,
        memory_gib: float | None = None,
        **options,
    ) -> "Engine":
        """Loads a Hugging Face directory, by default the small trained checkpoint that ships with the package.

        Args:
          dtype: of the parameters; None takes the checkpoint's own, or float32 on a CPU, which has no fast bfloat16.
          memory_gib, options: as the constructor's.

        Raises:
          CheckpointError, TokenizerError: the directory is not a whole checkpoint.
          NotEnoughMemory: the parameters and the least that a run needs beside them do not fit; nothing is loaded.
        """
        directory = SHIPPED_CHECKPOINT if directory is None else Path(directory)
        # All that can be wrong with a small file is told before the long part.
        tokenizer = Tokenizer.from_directory(directory)
        _, generation_config, _ = read_config(directory)
        try:
            SamplingParams.from_generation_config(generation_config)
        except ValueError as error:
            raise ValueError(f"{directory / 'generation_config.json'}: {error}") from None
        if dtype is None and jax.default_backend() == "cpu":
            dtype = "float32"
        account, _, _ = sound_account(directory, dtype=dtype)
        least = Settings(context=1, prompt=1)
        require_fit(Weights.of_accounts(account), least, device_budget(memory_gib), str(directory))
        checkpoint = load_checkpoint(directory, dtype=dtype)
        return cls(
            checkpoint.params,
            checkpoint.cfg,
            tokenizer,
            generation_config=checkpoint.generation_config,
            memory_gib=memory_gib,
            **options,
        )

    def sampling(self, **fields) -> SamplingParams:
        """The checkpoint's default sampling parameters with some fields changed."""
        return SamplingParams.from_generation_config(self._generation_config, **fields)

    def score(self, token_ids: Sequence[int]) -> Score:
        """Log-probabilities of given tokens; see `evaluation.perplexity.score`."""
        n = len(token_ids)
        self._require_fit(Settings(context=max(n, 1), prompt=CHUNK, logit_rows=CHUNK), f"a score of {n} tokens")
        return score(self.params, self.cfg, token_ids, real_vocab_size=self.tokenizer.vocab_size)

    def encode(self, request: Request) -> list[int]:
        """The prompt's token ids.

        Raises:
          ValueError: the prompt is empty, holds an id outside the vocabulary, or leaves no room for an answer.
        """
        if request.prompt_ids is not None:
            ids = list(request.prompt_ids)
        elif request.prompt is not None:
            ids = self.tokenizer.encode(request.prompt, parse_special=True)
        else:
            ids = self.tokenizer.encode_chat(request.messages, enable_thinking=request.thinking)
        if not ids:
            raise ValueError("the prompt is empty: there is nothing to continue")
        for i in ids:
            if not isinstance(i, (int, np.integer)) or isinstance(i, bool) or not 0 <= i < self.cfg.vocab_size:
                raise ValueError(f"prompt id {i!r} is not a token id in [0, {self.cfg.vocab_size - 1}]")
        if len(ids) >= self.cfg.max_position_embeddings:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; the model's context is {self.cfg.max_position_embeddings}"
            )
        return ids

    def generate(self, requests: Sequence[Request], on_text: OnText | None = None) -> list[Completion]:
        """Answers every request, `max_batch` at a time, and returns the completions in order.

        A request's tokens depend neither on the others nor on its place among them, up to rounding: in bf16 the order
        of a sum differs with the batch, and a near-tie may then go the other way. Generation ends at a stop id, at
        a stop string, after `max_new_tokens`, or where the model's context is full.

        Args:
          on_text: called with the request's index and each new piece of its text, as soon as it is certain.

        Raises:
          ValueError: a request is malformed; nothing has been generated then.
          NotEnoughMemory: the sequences do not fit.
        """
        jobs = [(i, self.encode(r), self._seeded(r)) for i, r in enumerate(requests)]
        completions: list[Completion] = []
        for first in range(0, len(jobs), self._max_batch):
            batch = jobs[first : first + self._max_batch]
            completions += self._run([self._stream(*job, on_text) for job in batch])
        return completions

    def _stream(self, index: int, prompt: list[int], sampling: SamplingParams, on_text: OnText | None) -> Stream:
        show = functools.partial(on_text, index) if on_text else None
        return Stream(self.tokenizer, prompt, sampling, self.cfg.eos_token_ids, show)

    def _seeded(self, request: Request) -> SamplingParams:
        sampling = request.sampling or self.sampling()
        sampling.validate_ids(self.cfg.vocab_size)
        return sampling if sampling.seed is not None else dataclasses.replace(sampling, seed=secrets.randbits(63))

    def _run(self, streams: list[Stream]) -> list[Completion]:
        top = MAX_LOGPROBS if any(s.sampling.logprobs for s in streams) else 0  # two programs, not twenty
        state, programs, compile_seconds = self._prepare(streams, top)
        began = time.perf_counter()
        for tokens, valid in _prompt_chunks([s.prompt for s in streams], state.active.shape[0]):
            state = programs.prefill[tokens.shape[1]](self.params, tokens, valid, state)
        state, output = programs.emit(self.params, state)
        limit = self.cfg.max_position_embeddings
        self._collect(streams, output, limit)
        decoding = time.perf_counter()
        for stream in streams:
            stream.begin_decoding(decoding - began, compile_seconds)
        while not all(s.finished for s in streams):
            active = np.zeros(state.active.shape, bool)
            active[: len(streams)] = [not s.finished for s in streams]
            state, output = programs.step(self.params, state.replace(active=jnp.asarray(active)))
            self._collect(streams, output, limit)
        return [s.completion() for s in streams]

    @staticmethod
    def _collect(streams: list[Stream], output: StepOutput, limit: int) -> None:
        output = jax.device_get(output)
        for row, stream in enumerate(streams):
            if not stream.finished:
                if not np.isfinite(output.logprob[row]):
                    raise ValueError("the model's output is not finite: the checkpoint or its dtype is broken")
                top = zip(output.top_ids[row].tolist(), output.top_logprobs[row].tolist(), strict=True)
                stream.push(int(output.token[row]), float(output.logprob[row]), tuple(top), limit)

    def _prepare(self, streams: list[Stream], top: int) -> tuple[DecodeState, Programs, float]:
        """An empty state of the right size and the programs for it, after a check that it fits."""
        longest = max(len(s.prompt) for s in streams)
        settings = Settings(
            slots=len(streams),
            context=max(len(s.prompt) + s.sampling.max_new_tokens for s in streams),
            prompt=longest,
            state_dtype=self._state_dtype,
        )
        sizes = settings.sizes(self.cfg)
        slots, capacity = sizes.batch, sizes.capacity
        what = f"a batch of {slots} x {capacity:,} tokens"
        self._require_fit(settings, what)
        idle = SamplingParams(temperature=0.0, seed=0)
        sampler = sampler_state(
            [s.sampling for s in streams] + [idle] * (slots - len(streams)),
            [s.prompt for s in streams] + [()] * (slots - len(streams)),
            vocab_size=self.cfg.vocab_size,
            real_vocab_size=self.tokenizer.vocab_size,
            eos_ids=self.cfg.eos_token_ids,
        )
        active = jnp.arange(slots) < len(streams)
        model = abstract_state(self.cfg, sizes)
        began = time.perf_counter()
        abstract = jax.eval_shape(functools.partial(start, self.cfg), model, sampler, active)
        programs = self._compile(abstract, set(chunk_lengths(longest, slots)), (slots, capacity, top))
        seconds = time.perf_counter() - began
        self._require_fit(settings, what, programs.workspace)
        return start(self.cfg, init_state(self.cfg, sizes), sampler, active), programs, seconds

    def _require_fit(self, settings: Settings, what: str, workspace: int | None = None) -> None:
        budget = device_budget(self._memory_gib, held=self._weights.nbytes)
        require_fit(self._weights, settings, budget, what, workspace=workspace)

    def _compile(self, state: DecodeState, chunks: Iterable[int], key: tuple) -> Programs:
        cached = self._programs.get(key)
        slots, _, top = key
        params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), self.params)
        if cached is None:
            cached = Programs(
                prefill={},
                emit=_lower(lambda p, s: emit(p, s, top), params, state),
                step=_lower(lambda p, s: decode_step(p, self.cfg, s, top), params, state),
            )
            self._programs[key] = cached
        for n in chunks:
            if n not in cached.prefill:
                tokens = jax.ShapeDtypeStruct((slots, n), jnp.int32)
                valid = jax.ShapeDtypeStruct((slots, n), jnp.bool_)
                cached.prefill[n] = _lower(
                    lambda p, t, v, s: prefill(p, self.cfg, t, v, s), params, tokens, valid, state
                )
        return cached


def _lower(function: Callable, *args) -> jax.stages.Compiled:
    """Compiles; the last argument, the state, gives its memory to the result."""
    return jax.jit(function, donate_argnums=len(args) - 1).lower(*args).compile()


def _prompt_chunks(prompts: list[list[int]], slots: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and valid rows, each `[slots, chunk]`, that cover prompts of different lengths from the left."""
    done = 0
    for n in chunk_lengths(max(map(len, prompts)), slots):
        tokens, valid = np.zeros((slots, n), np.int32), np.zeros((slots, n), bool)
        for row, prompt in enumerate(prompts):
            piece = prompt[done : done + n]
            tokens[row, : len(piece)] = piece
            valid[row, : len(piece)] = True
        yield tokens, valid
        done += n
