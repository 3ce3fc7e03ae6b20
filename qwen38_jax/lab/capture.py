"""What a frozen model makes of given texts, kept on disk for drafters to be trained on.

Of every token: its hidden row after the final norm (what MTP reads), the outputs of some layers (what DFlash2 reads)
and the model's highest logits. In shards, each a safetensors file that is read through the page cache; `README.md`
beside this module describes the directory.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qwen38_jax.checkpoint.files import CheckpointError, map_tensor, read_header, read_json
from qwen38_jax.checkpoint.resumable import Shard, write_resumably
from qwen38_jax.checkpoint.write import NewTensor, write_json
from qwen38_jax.config import ModelConfig
from qwen38_jax.evaluation.hidden import CHUNK, text_chunks
from qwen38_jax.lab.outputs import Output
from qwen38_jax.model import logits
from qwen38_jax.params import Params
from qwen38_jax.sampling import mask_padding

FORMAT = "qwen38-hidden-states-1"
MANIFEST = "manifest.json"
_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}  # of a row, relative, when it is computed again


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is kept of every token.

    Attributes:
      tap_layers: whose outputs; may be empty.
      top: how many of the highest logits; 0 for none.
      shard_rows: rows of a shard, at least; a text is never split.
      batch: texts read at once.
    """

    tap_layers: tuple[int, ...]
    top: int = 8
    shard_rows: int = 1 << 16
    batch: int = 8

    def fields(self, cfg: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of a row of each field."""
        fields = {"tokens": ("int32", ()), "response": ("uint8", ()), "hidden": (cfg.dtype, (cfg.hidden_size,))}
        if self.tap_layers:
            fields["taps"] = (cfg.dtype, (len(self.tap_layers), cfg.hidden_size))
        if self.top:
            fields |= {"top_ids": ("int32", (self.top,)), "top_logits": ("float32", (self.top,))}
            fields["logsumexp"] = ("float32", ())
        return fields

    def row_bytes(self, cfg: ModelConfig) -> int:
        return sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in self.fields(cfg).values())


def default_taps(layers: int, count: int = 5) -> tuple[int, ...]:
    """`count` of so many layers, spread evenly from the second to the last; all of them where there are fewer."""
    return tuple(sorted({int(i) for i in np.linspace(min(1, layers - 1), layers - 1, count).round()}))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which outputs go into which shard, and which are left out and why. `nbytes` is what it takes on disk."""

    shards: tuple[tuple[Output, ...], ...]
    left_out: dict[int, str]
    nbytes: int


def plan_capture(outputs: Iterable[Output], cfg: ModelConfig, layout: Layout, most_tokens: int) -> Plan:
    """Fills shards with the outputs in the order of their indices.

    Raises ValueError when nothing is left, an output is there twice, or an id is outside the vocabulary.
    """
    shards: list[list[Output]] = [[]]
    left_out, rows, total = {}, 0, 0
    ordered = sorted(outputs, key=lambda o: o.index)
    for before, after in zip(ordered, ordered[1:], strict=False):
        if before.index == after.index:
            raise ValueError(f"output {after.index} is there twice: pass every file of outputs once")
    for output in ordered:
        n = len(output.prompt_ids) + len(output.output_ids)
        if max((*output.prompt_ids, *output.output_ids), default=0) >= cfg.vocab_size:
            raise ValueError(
                f"output {output.index} has ids beyond the vocabulary of {cfg.vocab_size}: another model's"
            )
        if n > most_tokens or not output.output_ids or not output.prompt_ids:
            left_out[output.index] = f"{n} tokens, more than {most_tokens}" if n > most_tokens else "empty"
            continue
        if rows >= layout.shard_rows:
            shards.append([])
            rows = 0
        shards[-1].append(output)
        rows, total = rows + n, total + n
    if not total:
        raise ValueError(f"no output is left to capture: {len(left_out)} are empty or longer than {most_tokens} tokens")
    return Plan(tuple(map(tuple, shards)), left_out, total * layout.row_bytes(cfg))


def capture(
    params: Params,
    cfg: ModelConfig,
    plan: Plan,
    directory: Path,
    layout: Layout,
    *,
    real_vocab_size: int,
    identity: dict[str, Any],
    verify: int = 4,
    advance: Callable[[int], object] = lambda n: None,
) -> dict[str, Any]:
    """Writes the shards of a plan; a run that was stopped goes on with the first that is not whole.

    A text with a row that is not finite is left out and listed. At the end `verify` texts are computed again, alone,
    and compared; so are the checksums of all shards.

    Args:
      identity: what, beside layout and outputs, determines the bytes: the checkpoint, the files of outputs.
      advance: called with bytes.

    Returns:
      The manifest.

    Raises:
      CheckpointError: as `write_resumably`; or rows differ from those computed again.
    """
    fields = layout.fields(cfg)
    about = {
        "format": FORMAT,
        **identity,
        "fields": {name: [dtype, list(shape)] for name, (dtype, shape) in fields.items()},
        "tap_layers": list(layout.tap_layers),
        "vocab_size": cfg.vocab_size,
        "real_vocab_size": real_vocab_size,
        "hidden_size": cfg.hidden_size,
    }
    digest = hashlib.sha256(repr(plan.shards).encode()).hexdigest()
    reader = functools.partial(_read_texts, params, cfg, layout, real_vocab_size)
    shards = [
        Shard(file, _rows(outputs) * layout.row_bytes(cfg), functools.partial(_make, file, outputs, fields, reader))
        for file, outputs in ((f"rows-{i:05d}.safetensors", outputs) for i, outputs in enumerate(plan.shards))
    ]
    manifest: dict[str, Any] = {}

    def finish(partial: Path, records: dict[str, Any]) -> None:
        dropped = {int(i): why for shard in records.values() for i, why in shard["dropped"].items()}
        manifest.update(about, shards=records, left_out={**plan.left_out, **dropped})
        if not any(shard["texts"] for shard in records.values()):
            raise CheckpointError("no text gave finite rows: the model that made them, or its dtype, is broken")
        write_json(partial / MANIFEST, manifest)
        captured = open_captured(partial)
        captured.check_sums()
        manifest["verified"] = _verify(params, cfg, layout, captured, verify)
        write_json(partial / MANIFEST, manifest)

    work = {**about, "layout": dataclasses.asdict(layout), "texts": digest}
    write_resumably(directory, shards, work, finish, advance)
    return manifest


def _rows(outputs: Sequence[Output]) -> int:
    return sum(len(o.prompt_ids) + len(o.output_ids) for o in outputs)


def _make(file: str, outputs, fields, reader) -> tuple[list[NewTensor], dict[str, Any]]:
    """The tensors of a shard, and its record: checksums, and where each text's rows are."""
    found = dict(reader([(o.index, (*o.prompt_ids, *o.output_ids)) for o in outputs]))
    texts, dropped, begin = [], {}, 0
    columns: dict[str, list[np.ndarray]] = {name: [] for name in fields}
    for output in outputs:
        rows = found[output.index]
        finite = np.isfinite(rows["hidden"].astype(np.float32)).all(axis=1)
        if "taps" in rows:
            finite &= np.isfinite(rows["taps"].astype(np.float32)).all(axis=(1, 2))
        if not finite.all():
            dropped[output.index] = f"row {int(np.argmin(finite))} of {len(finite)} is not finite"
            continue
        n, prompt = len(finite), len(output.prompt_ids)
        rows["tokens"] = np.array([*output.prompt_ids, *output.output_ids], np.int32)
        rows["response"] = (np.arange(n) >= prompt).astype(np.uint8)
        for name, (dtype, shape) in fields.items():
            if rows[name].shape != (n, *shape) or rows[name].dtype != np.dtype(dtype):
                raise ValueError(f"output {output.index}: {name} is {rows[name].dtype}{rows[name].shape}, of {n} rows")
            columns[name].append(rows[name])
        texts.append({"index": output.index, "source": output.source, "begin": begin, "rows": n, "prompt": prompt})
        begin += n
    arrays = {
        name: np.concatenate(columns[name]) if columns[name] else np.empty((0, *shape), dtype)
        for name, (dtype, shape) in fields.items()
    }
    sums = {name: hashlib.sha256(np.ascontiguousarray(a).view(np.uint8).data).hexdigest() for name, a in arrays.items()}
    tensors = [NewTensor(name, a.dtype.name, a.shape, lambda a=a: [a]) for name, a in arrays.items()]
    return tensors, {file: {"sha256": sums, "texts": texts, "dropped": dropped}}


def _read_texts(
    params: Params, cfg: ModelConfig, layout: Layout, real_vocab_size: int, texts: Sequence[tuple[int, tuple[int, ...]]]
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """For each text its index and its rows, field by field; texts of about the same length are read together."""
    by_length = sorted(texts, key=lambda text: len(text[1]))
    for first in range(0, len(by_length), layout.batch):
        batch = by_length[first : first + layout.batch]
        ids = [text for _, text in batch]
        padded = ids + [ids[0]] * (layout.batch - len(ids))  # one program for all batches
        pieces: list[dict[str, np.ndarray]] = []
        for rows in text_chunks(params, cfg, padded, layout.tap_layers):
            piece = {"hidden": rows.hidden}
            if layout.tap_layers:
                piece["taps"] = jnp.moveaxis(rows.taps, 0, 2)
            if layout.top:
                piece |= _top(params, rows.hidden, layout.top, real_vocab_size)
            pieces.append(jax.device_get(piece))
        for row, (index, text) in enumerate(batch):
            yield index, {name: np.concatenate([p[name][row] for p in pieces])[: len(text)] for name in pieces[0]}


@functools.partial(jax.jit, static_argnames=("top", "real_vocab_size"))
def _top(params: Params, hidden: jax.Array, top: int, real_vocab_size: int) -> dict[str, jax.Array]:
    """The highest logits of `hidden [B, L, H]`: ids and values `[B, L, top]`; the log of the sum of all, `[B, L]`."""
    scores = mask_padding(logits(params, hidden), real_vocab_size)
    values, ids = lax.top_k(scores, top)
    total = jax.nn.logsumexp(scores, axis=-1)
    return {"top_ids": ids.astype(jnp.int32), "top_logits": values, "logsumexp": total}


@dataclasses.dataclass(frozen=True)
class Text:
    """Where the rows of a text are: `rows` of them from `begin` in `file`; the first `prompt` are of the prompt."""

    file: str
    index: int
    source: str
    begin: int
    rows: int
    prompt: int


@dataclasses.dataclass(frozen=True)
class Captured:
    """A directory of captured rows; they are mapped, and read when they are touched."""

    directory: Path
    manifest: dict[str, Any]
    texts: tuple[Text, ...]
    _mapped: dict[str, dict[str, np.ndarray]] = dataclasses.field(repr=False)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return tuple(self.manifest["tap_layers"])

    def first(self, count: int) -> "Captured":
        """Only the first texts."""
        return dataclasses.replace(self, texts=self.texts[:count])

    def rows(self, text: Text, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows [begin, end) of a text's field `name`."""
        end = text.rows if end is None else min(end, text.rows)
        return self._mapped[text.file][name][text.begin + begin : text.begin + end]

    def check_sums(self) -> None:
        """Reads everything; CheckpointError names the first field of a shard that has changed since it was written."""
        for file, shard in self.manifest["shards"].items():
            for name, expected in shard["sha256"].items():
                data = np.ascontiguousarray(self._mapped[file][name]).view(np.uint8)
                if hashlib.sha256(data.data).hexdigest() != expected:
                    raise CheckpointError(f"{self.directory / file}: {name} has changed: capture the states again")


def open_captured(directory: Path) -> Captured:
    """Opens what `capture` wrote. Raises CheckpointError when it is another format or files are missing or cut."""
    manifest = read_json(directory / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{directory} holds no captured states: {MANIFEST} lacks the format {FORMAT!r}")
    texts, mapped = [], {}
    for file, shard in manifest["shards"].items():
        header = read_header(directory / file)
        if header.keys() != manifest["fields"].keys():
            raise CheckpointError(f"{directory / file} has the fields {sorted(header)}, not those of {MANIFEST}")
        mapped[file] = {name: map_tensor(tensor) for name, tensor in header.items()}
        texts += [Text(file, **text) for text in shard["texts"]]
    return Captured(directory, manifest, tuple(texts), mapped)


def _verify(params: Params, cfg: ModelConfig, layout: Layout, captured: Captured, count: int) -> dict[str, Any]:
    """Computes a few texts again, each by itself; CheckpointError where a row differs from what was captured."""
    rng = np.random.default_rng(0)
    worst, chosen = 0.0, rng.permutation(len(captured.texts))[:count]
    for text in (captured.texts[i] for i in chosen):
        ids = captured.rows(text, "tokens")
        copies = [ids] * layout.batch  # the program that there is
        for number, rows in enumerate(text_chunks(params, cfg, copies, layout.tap_layers)):
            begin = number * CHUNK
            n = min(CHUNK, text.rows - begin)
            pairs = {"hidden": rows.hidden[0, :n]}
            if layout.tap_layers:
                pairs["taps"] = jnp.moveaxis(rows.taps[:, 0], 0, 1)[:n]
            for name, again in jax.device_get(pairs).items():
                kept = captured.rows(text, name, begin, begin + n).astype(np.float32)
                error = np.linalg.norm(kept - again.astype(np.float32), axis=-1)
                error = float(np.max(error / np.maximum(np.linalg.norm(kept, axis=-1), 1e-6)))
                worst = max(worst, error)
                if not error <= _TOLERANCE[cfg.dtype]:
                    raise CheckpointError(
                        f"output {text.index}: {name} from row {begin} on differ by {error:.1e} from those computed "
                        "again: captured rows are not the model's"
                    )
    return {"texts": len(chosen), "largest_relative_error": worst}
