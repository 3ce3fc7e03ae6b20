"""Which tokens a draft head should have: the ids that the model's own outputs consist of, counted.

What the model writes is not what a corpus holds, so counts are of outputs. They are arrays, which add up: shards are
counted apart, in memory that depends on the vocabulary alone.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qwen38_jax.lab.outputs import Output, read_outputs

SIZES = (8_192, 16_384, 32_768, 40_960, 49_152, 65_536)  # that coverage is reported at
_FLUSH = 1 << 20  # ids counted at a time


def count_ids(outputs: Iterable[Output], vocab_size: int, *, prompts: bool = False) -> np.ndarray:
    """How often each id occurs, int64 `[vocab_size]`: in the outputs and, if `prompts`, in their prompts.

    Raises ValueError for an id outside the vocabulary, or when there is no token at all.
    """
    counts = np.zeros(vocab_size, np.int64)
    pending: list[np.ndarray] = []

    def flush() -> None:
        ids = np.concatenate(pending) if pending else np.empty(0, np.int64)
        pending.clear()
        if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
            raise ValueError(f"ids must be in [0, {vocab_size - 1}], got {ids.min()} to {ids.max()}: another model's")
        counts[:] += np.bincount(ids, minlength=vocab_size)

    held = 0
    for output in outputs:
        pieces = (output.prompt_ids, output.output_ids) if prompts else (output.output_ids,)
        pending += [np.array(ids, np.int64) for ids in pieces]
        held += sum(map(len, pieces))
        if held >= _FLUSH:
            flush()
            held = 0
    flush()
    if not counts.any():
        raise ValueError("there are no tokens to count")
    return counts


def count_files(paths: Sequence[Path], vocab_size: int, *, prompts: bool = False) -> tuple[np.ndarray, dict[str, int]]:
    """The counts of all files together, and how many tokens each has."""
    total, tokens = np.zeros(vocab_size, np.int64), {}
    for path in paths:
        try:
            counts = count_ids(read_outputs(path), vocab_size, prompts=prompts)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        total += counts
        tokens[str(path)] = int(counts.sum())
    return total, tokens


def choose_ids(counts: np.ndarray, size: int, always: Iterable[int]) -> np.ndarray:
    """The `size` ids to draft from, ascending int64: those of `always`, then the most frequent; ties by id.

    Raises ValueError when there is no room for `always`, or the vocabulary has fewer ids.
    """
    always = np.unique(np.fromiter(always, np.int64))
    if not max(1, len(always)) <= size <= len(counts):
        raise ValueError(
            f"a draft vocabulary of {size} ids is impossible: {len(always)} ids are always in it (stop, think, tool "
            f"and chat ids), and the vocabulary has {len(counts)}"
        )
    if len(always) and (always[0] < 0 or always[-1] >= len(counts)):
        raise ValueError(f"ids that are always in must be in [0, {len(counts) - 1}], got {always[0]} to {always[-1]}")
    wanted = counts.astype(np.int64).copy()
    wanted[always] = np.iinfo(np.int64).max
    order = np.argsort(-wanted, kind="stable")  # equal counts stay in the order of their ids
    return np.sort(order[:size])


def coverage(ids: np.ndarray, outputs: Iterable[Output], vocab_size: int) -> dict[str, Any]:
    """The share of output tokens that are among `ids`, of all and by source; and how many tokens there are."""
    inside = np.zeros(vocab_size, bool)
    inside[ids] = True
    covered, total = {}, {}
    for output in outputs:
        tokens = np.array(output.output_ids, np.int64)
        if tokens.size and tokens.max() >= vocab_size:
            raise ValueError(f"output {output.index} has the id {tokens.max()}, of a vocabulary of {vocab_size}")
        covered[output.source] = covered.get(output.source, 0) + int(inside[tokens].sum())
        total[output.source] = total.get(output.source, 0) + len(tokens)
    count = sum(total.values())
    if not count:
        raise ValueError("there are no held-out tokens to cover")
    return {
        "tokens": count,
        "covered": sum(covered.values()) / count,
        "by_source": {s: covered[s] / total[s] for s in sorted(total) if total[s]},
    }


def coverage_by_size(
    counts: np.ndarray, always: Sequence[int], held_out: np.ndarray, sizes: Iterable[int] = SIZES
) -> dict[int, float]:
    """The share of held-out tokens (as counts `[V]`) that the best list of each size covers; sizes beyond V are V."""
    sizes = sorted({min(size, len(counts)) for size in sizes if size >= len(set(always))})
    return {size: float(held_out[choose_ids(counts, size, always)].sum() / held_out.sum()) for size in sizes}


def compare_lists(a: np.ndarray, b: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """Two lists on the same tokens (as counts `[V]`): how large, how alike, and what each covers."""
    common, total = np.intersect1d(a, b), counts.sum()
    shares = {"a": a, "b": b, "both": common, "either": np.union1d(a, b)}
    return {
        "sizes": {"a": len(a), "b": len(b), "both": len(common)},
        "covered": {name: float(counts[ids].sum() / total) for name, ids in shares.items()},
        "tokens": int(total),
    }
