"""One request while it is answered: its tokens, its text, and the rules that end it."""

import time
from collections.abc import Callable

from qwen38_jax.engine.request import Completion, TokenLogprob
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.stopping import StopStrings
from qwen38_jax.tokenizer import Detokenizer, Tokenizer


class Stream:
    """Host side of a sequence; knows nothing of the model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: list[int],
        sampling: SamplingParams,
        eos_ids: tuple[int, ...],
        on_text: Callable[[str], None] | None = None,
    ):
        self.prompt, self.sampling = prompt, sampling
        self.finish_reason: str | None = None
        self._stop_ids = frozenset(sampling.stop_ids(eos_ids))
        self._on_text = on_text
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(sampling.stop)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text: list[str] = []
        self._seconds = {"prefill_seconds": 0.0, "decode_seconds": 0.0, "compile_seconds": 0.0}
        self._decoding_since = 0.0
        self._steps = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def begin_decoding(self, prefill_seconds: float, compile_seconds: float) -> None:
        """Marks the moment after the first token, from which decoding is timed."""
        self._seconds.update(prefill_seconds=prefill_seconds, compile_seconds=compile_seconds)
        self._decoding_since = time.perf_counter()

    def push_step(
        self,
        tokens: list[int],
        logprobs: list[float],
        top_ids: list[list[int]],
        top_logprobs: list[list[float]],
        *,
        context: int,
    ) -> None:
        """Takes the tokens of one step; those behind the end of the request are dropped. For `context` see `push`."""
        self._steps += bool(tokens and self._decoding_since)
        for token, logprob, ids, values in zip(tokens, logprobs, top_ids, top_logprobs, strict=True):
            if not self.finished:
                self.push(token, logprob, tuple(zip(ids, values, strict=True)), context)

    def push(self, token: int, logprob: float, top: tuple[tuple[int, float], ...], context: int) -> None:
        """Takes the next token. `context` is how many tokens prompt and answer may have together."""
        self._tokens.append(token)
        if self.sampling.logprobs is not None:
            self._logprobs.append(TokenLogprob(token, logprob, top[: self.sampling.logprobs]))
        if token in self._stop_ids:
            self._finish("stop")
            return
        text, stopped = self._stops.push(self._detokenizer.push(token))
        self._show(text)
        if stopped:
            self._finish("stop", flush=False)
        elif len(self._tokens) >= self.sampling.max_new_tokens or len(self.prompt) + len(self._tokens) >= context:
            self._finish("length")

    def _finish(self, reason: str, flush: bool = True) -> None:
        if flush:
            text, stopped = self._stops.push(self._detokenizer.flush())
            self._show(text if stopped else text + self._stops.flush())
            reason = "stop" if stopped else reason
        self.finish_reason = reason
        if self._decoding_since:
            self._seconds["decode_seconds"] = time.perf_counter() - self._decoding_since

    def _show(self, text: str) -> None:
        if text:
            self._text.append(text)
            if self._on_text:
                self._on_text(text)

    def completion(self) -> Completion:
        """The finished answer."""
        return Completion(
            token_ids=tuple(self._tokens),
            text="".join(self._text),
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.prompt),
            steps=self._steps,
            logprobs=None if self.sampling.logprobs is None else tuple(self._logprobs),
            **self._seconds,
        )
