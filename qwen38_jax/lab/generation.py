"""From a file of prompts to a file of outputs, restartable at any point."""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qwen38_jax.engine import Engine, Request
from qwen38_jax.lab.outputs import Output, open_outputs, read_outputs
from qwen38_jax.sampling_params import SamplingParams

_REQUEST = ("prompt", "messages", "prompt_ids", "thinking")
_OWN = ("source", "max_new_tokens")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A line of a file of prompts: what is asked, a tag, and the most tokens of its answer (None: as the run says)."""

    request: Request
    source: str = ""
    max_new_tokens: int | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of JSON lines: exactly one of prompt, messages, prompt_ids; thinking, source, max_new_tokens if wanted.

    Raises ValueError that names the line; or when there is none.
    """
    prompts = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    prompts.append(_prompt(json.loads(line)))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{path}:{number}: {error}") from None
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts


def _prompt(record: Any) -> Prompt:
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    unknown = sorted(record.keys() - {*_REQUEST, *_OWN})
    if unknown:
        raise ValueError(f"unknown fields {', '.join(unknown)}; expected some of {', '.join((*_REQUEST, *_OWN))}")
    request = Request(**{name: record[name] for name in _REQUEST if name in record})
    return Prompt(request, **{name: record[name] for name in _OWN if name in record})


def generate_outputs(
    engine: Engine,
    prompts: Sequence[Prompt],
    path: Path,
    *,
    sampling: SamplingParams,
    checkpoint: str,
    batch: int,
    advance: Callable[[int], object] = lambda n: None,
) -> dict[str, Any]:
    """Answers every prompt that `path` has no output for yet; appends batch by batch.

    Prompts of about the same length run together. Every output has a seed of its own, `sampling.seed` plus its index:
    it does not depend on when and beside which others it was made, but for rounding.

    Args:
      checkpoint: what identifies the model in the file's header.
      advance: called with the number of prompts done.

    Returns:
      Figures of the whole file: outputs, tokens, how they ended, tokens by source.

    Raises:
      ValueError: a prompt is empty, too long or outside the vocabulary; or what `open_outputs` raises.
    """
    if sampling.seed is None:
        raise ValueError("sampling.seed must be given: outputs are recorded so that they can be made again")
    encoded = []
    for index, prompt in enumerate(prompts):
        try:
            encoded.append(tuple(engine.encode(prompt.request)))
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
    asked = [[list(ids), p.source, p.max_new_tokens] for ids, p in zip(encoded, prompts, strict=True)]
    header = {
        "checkpoint": checkpoint,
        "dtype": engine.cfg.dtype,
        "vocab_size": engine.cfg.vocab_size,
        "prompts_sha256": hashlib.sha256(json.dumps(asked).encode()).hexdigest(),
        "prompts": len(prompts),
        "sampling": dataclasses.asdict(sampling),
    }

    def limit(index: int) -> int:
        own = prompts[index].max_new_tokens
        return sampling.max_new_tokens if own is None else own

    with open_outputs(path, header) as file:
        left = sorted(set(range(len(prompts))) - file.done, key=lambda i: -len(encoded[i]) - limit(i))
        advance(len(file.done))
        for first in range(0, len(left), batch):
            rows = left[first : first + batch]
            own = [dataclasses.replace(sampling, seed=sampling.seed + i, max_new_tokens=limit(i)) for i in rows]
            requests = [Request(prompt_ids=encoded[i], sampling=s) for i, s in zip(rows, own, strict=True)]
            completions = engine.generate(requests)
            file.append(
                [
                    Output(i, prompts[i].source, encoded[i], c.token_ids, c.finish_reason, s.seed)
                    for i, s, c in zip(rows, own, completions, strict=True)
                ]
            )
            advance(len(rows))
    return summary(path)


def summary(path: Path) -> dict[str, Any]:
    """Figures of a file of outputs."""
    counts, ends, by_source = Counter(), Counter(), Counter()
    for output in read_outputs(path):
        counts.update(outputs=1, prompt_tokens=len(output.prompt_ids), output_tokens=len(output.output_ids))
        ends[output.finish_reason] += 1
        by_source[output.source] += len(output.output_ids)
    return {**counts, "finish_reasons": dict(ends), "output_tokens_by_source": dict(sorted(by_source.items()))}
