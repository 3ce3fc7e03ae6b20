"""Batched generation over a static batch: every prompt is read, then all sequences are decoded together."""

import dataclasses
import functools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax.checkpoint import load_checkpoint, load_drafter
from qwen38_jax.checkpoint.draft_ids import read_vocabulary
from qwen38_jax.checkpoint.drafter import drafter_account
from qwen38_jax.checkpoint.load import read_config, sound_account
from qwen38_jax.config import ModelConfig
from qwen38_jax.decode import StepOutput
from qwen38_jax.drafters.interface import Drafter
from qwen38_jax.drafters.modes import cut_draft_head, make_drafter, plan
from qwen38_jax.engine.memory import device_budget
from qwen38_jax.engine.metrics import metrics
from qwen38_jax.engine.plan import Settings, Weights, chunk_lengths, require_fit
from qwen38_jax.engine.programs import Plain, Programs, Speculative
from qwen38_jax.engine.request import Completion, Request
from qwen38_jax.engine.stream import Stream
from qwen38_jax.evaluation.hidden import CHUNK
from qwen38_jax.evaluation.perplexity import Score, score
from qwen38_jax.params import Params
from qwen38_jax.sampling import sampler_state
from qwen38_jax.sampling_params import MAX_LOGPROBS, SamplingParams
from qwen38_jax.spec_config import SpecConfig
from qwen38_jax.state import abstract_state, init_state
from qwen38_jax.tokenizer import Tokenizer
from qwen38_jax.tree import read_tree

SHIPPED_CHECKPOINT = Path(__file__).resolve().parents[1] / "checkpoints" / "tiny"

OnText = Callable[[int, str], None]


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
        speculation: tuple[Drafter, SpecConfig] | None = None,
    ):
        """`max_batch` requests are decoded together; `state_dtype` is that of the recurrent state.

        What would need more than the device has free, or more than `memory_gib` in all, is refused. (To have XLA keep
        to `memory_gib` as well, call `memory.cap_device_memory` before JAX looks at its devices.)

        `speculation`: the drafter of every request and its settings, as `drafters.modes.make_drafter` gives them.
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
        self._decoding = Plain(cfg) if speculation is None else Speculative(cfg, *speculation)
        self._weights = self._decoding.weights(params)
        self._resident = Weights.of_params(params, cfg, None if speculation is None else speculation[0])
        self._programs: dict[tuple, Programs] = {}

    @classmethod
    def from_checkpoint(
        cls,
        directory: str | Path | None = None,
        *,
        dtype: str | None = None,
        memory_gib: float | None = None,
        speculate: str = "none",
        draft_tokens: int | None = None,
        verify_tokens: int | None = None,
        draft_vocab: str | Path | None = None,
        drafter: str | Path | None = None,
        draft_tree: str | Path | None = None,
        kernels: str = "auto",
        **options,
    ) -> "Engine":
        """Loads a Hugging Face directory, by default the small trained checkpoint that ships with the package.

        Args:
          dtype: of the parameters; None takes the checkpoint's own, or float32 on a CPU, which has no fast bfloat16.
          speculate, draft_tokens, verify_tokens: see `drafters.modes.make_drafter`.
          draft_vocab: file of the token ids that the MTP head may draft, as `draft_ids.read_vocabulary` reads it; None
            takes those of the checkpoint's draft head, or all where it has none.
          drafter: directory of a DFlash2 drafter, for the modes that draft with one.
          kernels: "off" computes attention and recurrence in plain jnp on a GPU, too; see `ModelConfig.kernels`.
          draft_tree: file with the shape of the drafts, as `tree.read_tree` reads it; None for a chain.
          memory_gib, options: as the constructor's.

        Raises:
          ValueError: the options contradict each other or the checkpoint.
          CheckpointError, ConfigError, TokenizerError: a directory is not a whole checkpoint or drafter.
          NotEnoughMemory: the parameters and the least that a run needs beside them do not fit; nothing is loaded.
        """
        directory = SHIPPED_CHECKPOINT if directory is None else Path(directory)
        # All that can be wrong with an option or a small file is told before the long part.
        if dtype is None and jax.default_backend() == "cpu":
            dtype = "float32"
        account, _, _ = sound_account(directory, dtype=dtype)
        dflash2 = None if drafter is None else drafter_account(drafter, dtype=account.cfg.dtype)
        tree = None if draft_tree is None else read_tree(Path(draft_tree))
        plan(speculate, draft_tokens, verify_tokens, None if dflash2 is None else dflash2.cfg, tree)
        if draft_vocab is not None and "mtp" not in speculate:
            raise ValueError(f"a draft vocabulary is for the MTP head, not for mode {speculate}")
        tokenizer = Tokenizer.from_directory(directory)
        draft_ids = None if draft_vocab is None else read_vocabulary(Path(draft_vocab), tokenizer.vocab_size)
        _, generation_config, _ = read_config(directory)
        try:
            SamplingParams.from_generation_config(generation_config)
        except ValueError as error:
            raise ValueError(f"{directory / 'generation_config.json'}: {error}") from None
        least = Settings(context=1, prompt=1)
        resident = Weights.of_accounts(account, dflash2, None if draft_ids is None else len(draft_ids))
        require_fit(resident, least, device_budget(memory_gib), str(directory))
        checkpoint = load_checkpoint(directory, dtype=dtype)
        head = checkpoint.draft_head
        if draft_ids is not None:
            head = cut_draft_head(checkpoint.params, draft_ids, vocab_size=tokenizer.vocab_size)
        speculation = make_drafter(
            speculate,
            checkpoint.params,
            draft_head=head,
            draft_tokens=draft_tokens,
            verify_tokens=verify_tokens,
            dflash2=None if drafter is None else load_drafter(drafter, dtype=account.cfg.dtype),
            tree=tree,
        )
        return cls(
            checkpoint.params,
            dataclasses.replace(checkpoint.cfg, kernels=kernels),
            tokenizer,
            generation_config=checkpoint.generation_config,
            memory_gib=memory_gib,
            speculation=speculation,
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
        slots = _slots(streams)
        began = time.perf_counter()
        for tokens, valid in _prompt_chunks([s.prompt for s in streams], slots):
            state = programs.prefill[tokens.shape[1]](self._weights, tokens, valid, state)
        state, output = programs.emit(self._weights, state)
        output = self._collect(streams, output)
        decoding = time.perf_counter()
        for stream in streams:
            stream.begin_decoding(decoding - began, compile_seconds)
        while not all(s.finished for s in streams):
            active = np.zeros(slots, bool)
            active[: len(streams)] = [not s.finished for s in streams]
            step = programs.step[self._decoding.length(output, active)]
            state, output = step(self._weights, state.with_active(jnp.asarray(active)))
            output = self._collect(streams, output)
        return self._completions(streams, state, programs)

    def _collect(self, streams: list[Stream], output: StepOutput) -> StepOutput:
        """Hands the emitted tokens to their streams; returns the output as NumPy arrays."""
        output = jax.device_get(output)
        for row, stream in enumerate(streams):
            n = 0 if stream.finished else int(output.emitted[row])
            if not np.isfinite(output.logprobs[row, :n]).all():
                raise ValueError("the model's output is not finite: the checkpoint or its dtype is broken")
            stream.push_step(
                *(t[row, :n].tolist() for t in (output.tokens, output.logprobs, output.top_ids, output.top_logprobs)),
                context=self.cfg.max_position_embeddings,
            )
        return output

    def _completions(self, streams: list[Stream], state, programs: Programs) -> list[Completion]:
        completions = [s.completion() for s in streams]
        if not isinstance(self._decoding, Speculative):
            return completions
        counts = jax.device_get(state.counts)
        return [
            dataclasses.replace(
                completion,
                speculation=metrics(
                    counts,
                    row,
                    draft_tokens=self._decoding.draft_tokens,
                    decode_seconds=completion.decode_seconds,
                    compiled_programs=len(programs.all),
                ),
            )
            for row, completion in enumerate(completions)
        ]

    def _prepare(self, streams: list[Stream], top: int) -> tuple[Any, Programs, float]:
        """An empty state of the right size and the programs for it, after a check that it fits."""
        context = self.cfg.max_position_embeddings
        limits = [min(s.sampling.max_new_tokens, context - len(s.prompt)) for s in streams]
        longest = max(len(s.prompt) for s in streams)
        settings = Settings(
            slots=len(streams),
            context=max(len(s.prompt) + limit for s, limit in zip(streams, limits, strict=True)),
            prompt=longest,
            state_dtype=self._state_dtype,
            drafters=self._decoding.drafters,
            verify_rows=self._decoding.rows,
        )
        sizes = settings.sizes(self.cfg)
        slots, capacity = sizes.batch, sizes.capacity
        what = f"a batch of {slots} x {capacity:,} tokens"
        self._require_fit(settings, what, workspace=0)  # no estimate refuses what the compiled programs may allow
        idle = SamplingParams(temperature=0.0, seed=0)
        sampler = sampler_state(
            [s.sampling for s in streams] + [idle] * (slots - len(streams)),
            [s.prompt for s in streams] + [()] * (slots - len(streams)),
            vocab_size=self.cfg.vocab_size,
            real_vocab_size=self.tokenizer.vocab_size,
            eos_ids=self.cfg.eos_token_ids,
        )
        active = jnp.arange(slots) < len(streams)
        limit = jnp.asarray(np.pad(np.array(limits, np.int32), (0, slots - len(streams))))
        start = functools.partial(self._decoding.start, sizes)
        model = abstract_state(self.cfg, sizes)
        abstract = jax.eval_shape(start, self._weights, model, sampler, active, limit)
        began = time.perf_counter()
        programs = self._compile(abstract, set(chunk_lengths(longest, slots)), (slots, capacity, top))
        seconds = time.perf_counter() - began
        self._require_fit(settings, what, workspace=programs.workspace)
        return start(self._weights, init_state(self.cfg, sizes), sampler, active, limit), programs, seconds

    def _require_fit(self, settings: Settings, what: str, *, workspace: int | None = None) -> None:
        budget = device_budget(self._memory_gib, held=self._resident.nbytes)
        require_fit(self._resident, settings, budget, what, workspace=workspace)

    def _compile(self, state: Any, chunks: Iterable[int], key: tuple[int, int, int]) -> Programs:
        slots, _, top = key
        weights = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), self._weights)
        if key not in self._programs:
            self._programs[key] = Programs.compile(self._decoding, weights, state, top)
        self._programs[key].add_prefill(self._decoding, weights, state, slots, chunks)
        return self._programs[key]


def _slots(streams: list[Stream]) -> int:
    """Rows of the batch: a power of two, so that few programs serve all batches."""
    return 1 << (len(streams) - 1).bit_length()


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
