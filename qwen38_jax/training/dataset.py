"""Packed training rows: plain text and tasks, as memory-mapped token and loss-weight files with a JSON manifest.

A row holds whole conversations, packed first-fit, and plain text in what is left. Every conversation and every document
ends with <|endoftext|>; plain text alone may run over the end of a row. Blocks of rows are drawn independently, each
from its own seed, so the files do not depend on the number of workers.
"""

import hashlib
import json
import multiprocessing
import os
import platform
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from qwen38_jax.training.bpe import END_OF_TEXT
from qwen38_jax.training.corpus import Corpus, Document, Kind, load_corpus
from qwen38_jax.training.excerpts import Library, log_uniform, make_library
from qwen38_jax.training.tasks import Conversation, available_tasks, make_conversation, render_pieces

# Shares of all tokens. Tasks get 55 %, those that copy 60 % of that; a task without material leaves its to plain text.
MIXTURE = {
    "plain/prose": 0.13,
    "plain/code": 0.32,
    "reproduce": 0.10,
    "copy_string": 0.07,
    "quote": 0.04,
    "rename": 0.07,
    "edit": 0.05,
    "json": 0.04,
    "continue": 0.05,
    "summarise": 0.025,
    "list_functions": 0.025,
    "needle": 0.03,
    "fact": 0.01,
    "write_function": 0.025,
    "small_talk": 0.015,
}
SHORTEST = 128  # tokens of a conversation; the longest fill a row
BLOCK_TOKENS = 1 << 18
MOST_HELD_OUT_TOKENS = 4 * BLOCK_TOKENS
FORMAT = 1
TOKEN_DTYPE, WEIGHT_DTYPE = np.dtype("<u2"), np.dtype("u1")


class DatasetError(ValueError):
    """Data files that are absent, truncated, or made for something else."""


def build(
    out_dir: Path,
    tokenizer_dir: Path,
    *,
    tokens: int,
    sequence_length: int,
    seed: int,
    workers: int,
    corpus: Corpus | None = None,
) -> dict:
    """Writes `tokens` training tokens and a 16th of that, a million at most, from held-out documents, in whole rows.

    Files: {train,held_out}.{tokens,weights}.bin, flat uint16 and uint8 arrays [rows, sequence_length], and
    manifest.json, which is also returned. `weights[r, i]` is the loss weight of predicting `tokens[r, i]`: 1 on plain
    text and on what the assistant says up to and with <|im_end|>, 0 on prompts.
    `corpus` defaults to all of `load_corpus()`.
    """
    if sequence_length < 2 * SHORTEST:
        raise ValueError(f"sequence_length is {sequence_length}, need at least {2 * SHORTEST}")
    if tokens < sequence_length:
        raise ValueError(f"{tokens} tokens do not fill one row of {sequence_length}")
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(tokenizer_dir)
    corpus = corpus or load_corpus()
    manifest = {
        "format": FORMAT,
        "seed": seed,
        "sequence_length": sequence_length,
        "tokenizer_sha256": tokenizer_sha256(tokenizer_dir),
        "python": platform.python_version(),
        "mixture": MIXTURE,
        "documents": corpus.counts,
        "splits": {},
    }
    held_out_tokens = min(tokens // 16, MOST_HELD_OUT_TOKENS)
    rows = {"train": tokens // sequence_length, "held_out": max(1, held_out_tokens // sequence_length)}
    with tempfile.TemporaryDirectory(dir=out_dir) as work:
        for split, n_rows in rows.items():
            source = make_source(getattr(corpus, split), tokenizer, f"{seed}/{split}", sequence_length)
            counts = _write_rows(Path(work) / split, source, n_rows, workers)
            manifest["splits"][split] = {"rows": n_rows, **counts}
        # Without a manifest nothing loads, so that old and new files cannot mix.
        (out_dir / "manifest.json").unlink(missing_ok=True)
        for path in sorted(Path(work).iterdir()):
            os.replace(path, out_dir / path.name)
        temporary = Path(work) / "manifest.json"
        temporary.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, out_dir / "manifest.json")
    return manifest


def load(
    directory: Path, split: str = "train", tokenizer_dir: Path | None = None
) -> tuple[np.ndarray, np.ndarray, dict]:
    """Memory maps of one split: tokens [rows, length] uint16, weights [rows, length] uint8, and the manifest.

    Raises DatasetError when a file is missing or of the wrong size, or, with `tokenizer_dir`, when the data were made
    with another tokenizer.
    """
    path = directory / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        shape = (manifest["splits"][split]["rows"], manifest["sequence_length"])
    except FileNotFoundError:
        raise DatasetError(f"{path} is missing: the data set is absent or was not finished; build it") from None
    except (json.JSONDecodeError, KeyError) as error:
        raise DatasetError(
            f"{path} does not describe a split {split!r} ({error!r}): build the data set again"
        ) from error
    if manifest["format"] != FORMAT:
        raise DatasetError(
            f"{path} has format {manifest['format']}, this code reads {FORMAT}: build the data set again"
        )
    if tokenizer_dir is not None and manifest["tokenizer_sha256"] != tokenizer_sha256(tokenizer_dir):
        raise DatasetError(f"{directory} was not made with the tokenizer in {tokenizer_dir}: build the data set again")
    tokens = _map(directory / f"{split}.tokens.bin", TOKEN_DTYPE, shape)
    weights = _map(directory / f"{split}.weights.bin", WEIGHT_DTYPE, shape)
    return tokens, weights, manifest


def _map(path: Path, dtype: np.dtype, shape: tuple[int, int]) -> np.ndarray:
    expected = shape[0] * shape[1] * dtype.itemsize
    size = path.stat().st_size if path.exists() else None
    if size != expected:
        found = "is missing" if size is None else f"has {size} bytes"
        raise DatasetError(f"{path} {found}, the manifest says {expected} ({shape} {dtype}): build it again")
    return np.memmap(path, dtype, "r", shape=shape)


@dataclass(frozen=True)
class HeldOutTask:
    """A question of one turn about a held-out document: render `messages` with `enable_thinking=thinking`."""

    task: str
    messages: tuple[dict[str, str], ...]
    thinking: bool
    expected: str


def held_out_tasks(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    tasks: tuple[str, ...] | None = None,
    per_task: int = 20,
    total_tokens: tuple[int, int] = (SHORTEST, 2048),
    seed: int = 0,
) -> list[HeldOutTask]:
    """Fresh questions from the held-out documents only, with log-uniform lengths of prompt and answer together.

    `tasks` defaults to all that the held-out documents have material for; `total_tokens` is the range of lengths.
    """
    library = make_library(corpus.held_out, tokenizer)
    drawn = []
    for task in tasks or available_tasks(library):
        rng = random.Random(f"{seed}/evaluation/{task}")
        for _ in range(per_task):
            talk = make_conversation(rng, library, task, log_uniform(rng, *total_tokens), single_turn=True)
            drawn.append(HeldOutTask(task, talk.messages[:-1], talk.thinking, talk.messages[-1]["content"]))
    return drawn


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer.json of a directory. Raises ValueError if it is absent or its ids do not fit 16 bits."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{path} is missing: train the tokenizer first")
    tokenizer = Tokenizer.from_file(str(path))
    if tokenizer.get_vocab_size() > 1 << 16:
        raise ValueError(f"{path} has {tokenizer.get_vocab_size()} ids; the data files hold ids below {1 << 16}")
    return tokenizer


def tokenizer_sha256(directory: Path) -> str:
    return hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()


# ---- tokenising ----


class LineEncoder:
    """Encodes text line by line and remembers lines, which recur all the time; equal to encoding the text at once.

    The split regex never lets a token run past the line break (or run of them) that ends a line.
    """

    LINE_START = re.compile(r"(?<=\n)(?=[^\S\r\n]*\S)")
    MOST_LINES = 400_000

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.known: dict[str, bytes] = {}

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, [n] uint16."""
        if len(self.known) > self.MOST_LINES:
            self.known.clear()
        lines = [self.LINE_START.split(text) for text in texts]
        new = list(dict.fromkeys(line for text in lines for line in text if line not in self.known))
        encodings = self.tokenizer.encode_batch_fast(new, add_special_tokens=False)
        self.known.update((s, np.array(e.ids, TOKEN_DTYPE).tobytes()) for s, e in zip(new, encodings, strict=True))
        return [np.frombuffer(b"".join(map(self.known.__getitem__, text)), TOKEN_DTYPE) for text in lines]


@dataclass(frozen=True)
class Example:
    """Part of a row: a conversation (`task` names it) or plain text. Tokens [n] uint16, loss weights [n] uint8."""

    task: str
    tokens: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


def encode_conversations(encode: LineEncoder, conversations: list[Conversation]) -> list[Example]:
    """Tokens and loss weights of whole conversations."""
    pieces = [render_pieces(c) for c in conversations]
    ids = iter(encode([text for p in pieces for text, _ in p]))
    examples = []
    for conversation, p in zip(conversations, pieces, strict=True):
        parts = [next(ids) for _ in p]
        weights = np.repeat(np.array([written for _, written in p], WEIGHT_DTYPE), [len(part) for part in parts])
        examples.append(Example(conversation.task, np.concatenate(parts), weights))
    return examples


# ---- drawing and packing ----


@dataclass(frozen=True)
class Source:
    """All that blocks of one split are drawn from."""

    library: Library
    tokenizer: Tokenizer
    plain: dict[Kind, tuple[np.ndarray, ...]]  # token ids of each document, end of text included
    seed: str
    sequence_length: int


def make_source(documents: tuple[Document, ...], tokenizer: Tokenizer, seed: str, sequence_length: int) -> Source:
    """Indexes and tokenises the documents of one split."""
    library = make_library(documents, tokenizer)
    encode = LineEncoder(tokenizer)
    plain = {kind: tuple(encode([d.text + END_OF_TEXT for d in ds])) for kind, ds in library.documents.items()}
    return Source(library, tokenizer, plain, seed, sequence_length)


def draw_block(source: Source, encode: LineEncoder, index: int, rows: int) -> tuple[np.ndarray, np.ndarray, Counter]:
    """Block number `index`: tokens and weights [rows, sequence_length], and counts of tokens, examples and drops."""
    rng = random.Random(f"{source.seed}/{index}")
    counts = Counter()
    packed = _first_fit(_draw_examples(rng, source, encode, rows, counts), rows, source.sequence_length)
    for row, text in zip(packed, _plain_fillings(source, index, packed), strict=True):
        row += text
        rng.shuffle(row)
    rng.shuffle(packed)
    for example in (e for row in packed for e in row):
        counts["tokens", example.task] += len(example)
        counts["examples", example.task] += not example.task.startswith("plain/")
        counts["tokens", "weighted"] += int(example.weights.sum())
    tokens = np.stack([np.concatenate([e.tokens for e in row]) for row in packed])
    weights = np.stack([np.concatenate([e.weights for e in row]) for row in packed])
    return tokens, weights, counts


def _draw_examples(rng: random.Random, source: Source, encode: LineEncoder, rows: int, counts: Counter):
    """Conversations that give every task its share of the tokens, drawn in batches of the tasks furthest behind."""
    tasks = available_tasks(source.library)
    goal = rows * source.sequence_length * sum(MIXTURE[task] for task in tasks)
    asked, got = dict.fromkeys(tasks, 1.0), dict.fromkeys(tasks, 1.0)  # tokens asked for and drawn so far
    drawn: list[Example] = []
    while (have := sum(got.values())) < goal:
        scale = {task: got[task] / asked[task] for task in tasks}
        batch, planned = [], dict(got)
        while sum(planned.values()) < min(goal, have + 1 + goal / 8):
            task = min(tasks, key=lambda t: planned[t] / MIXTURE[t])
            tokens = log_uniform(rng, SHORTEST, 0.95 * source.sequence_length)
            batch.append(make_conversation(rng, source.library, task, tokens))
            planned[task] += tokens * scale[task]
            asked[task] += tokens
        for example in encode_conversations(encode, batch):
            got[example.task] += len(example)
            if len(example) <= source.sequence_length and sum(got.values()) <= goal:
                drawn.append(example)
            else:
                counts["dropped", example.task] += 1
    return drawn


def _first_fit(examples: list[Example], rows: int, length: int) -> list[list[Example]]:
    """Puts each example, longest first, into the first row that has room; one that fits nowhere is left out."""
    packed: list[list[Example]] = [[] for _ in range(rows)]
    room = np.full(rows, length)
    for example in sorted(examples, key=len, reverse=True):
        row = int(np.argmax(room >= len(example)))
        if room[row] >= len(example):
            packed[row].append(example)
            room[row] -= len(example)
    return packed


def _plain_fillings(source: Source, index: int, packed: list[list[Example]]) -> list[list[Example]]:
    """Plain text for what is left of each row: one kind a row, the text running on from row to row."""
    free = [source.sequence_length - sum(map(len, row)) for row in packed]
    totals = dict.fromkeys(source.plain, 0)
    starts = []
    for count in free:
        kind = min(totals, key=lambda k: totals[k] / MIXTURE[f"plain/{k}"])
        starts.append((kind, totals[kind]))
        totals[kind] += count
    # Each block continues the epochs of plain text about where its predecessor ended.
    text = {
        kind: _plain_text(source, kind, int(index * BLOCK_TOKENS * MIXTURE[f"plain/{kind}"]), total)
        for kind, total in totals.items()
    }
    return [
        [Example(f"plain/{kind}", text[kind][start : start + n], np.ones(n, WEIGHT_DTYPE))] if n else []
        for n, (kind, start) in zip(free, starts, strict=True)
    ]


def _plain_text(source: Source, kind: Kind, offset: int, count: int) -> np.ndarray:
    """`count` tokens of documents of a kind, from `offset` in endless epochs that each have their own order."""
    documents = source.plain[kind]
    epoch, skip = divmod(offset, sum(map(len, documents)))
    parts, need = [], count
    while need > 0:
        order = list(range(len(documents)))
        random.Random(f"{source.seed}/{kind}/{epoch}").shuffle(order)
        for i in order:
            part = documents[i][skip : skip + need]
            skip = max(0, skip - len(documents[i]))
            need -= len(part)
            parts.append(part)
        epoch += 1
    return np.concatenate(parts) if parts else np.empty(0, TOKEN_DTYPE)


# ---- writing ----


def _write_rows(path: Path, source: Source, rows: int, workers: int) -> dict:
    """Writes PATH.tokens.bin and PATH.weights.bin; returns the counts for the manifest."""
    per_block = max(1, BLOCK_TOKENS // source.sequence_length)
    jobs = [(i, min(per_block, rows - i * per_block)) for i in range(-(-rows // per_block))]
    total = Counter()
    with open(f"{path}.tokens.bin", "wb") as token_file, open(f"{path}.weights.bin", "wb") as weight_file:
        with _blocks(source, jobs, min(workers, len(jobs))) as blocks:
            for tokens, weights, counts in blocks:
                tokens.tofile(token_file)
                weights.tofile(weight_file)
                total += counts
    by_name: dict[str, dict[str, int]] = {"tokens": {}, "examples": {}, "dropped": {}}
    for (what, task), n in sorted(total.items()):
        by_name[what][task] = n
    return by_name


@contextmanager
def _blocks(source: Source, jobs: list[tuple[int, int]], workers: int) -> Iterator[Iterator]:
    """The drawn blocks in the order of the jobs, in this process or in several."""
    if workers <= 1:
        encode = LineEncoder(source.tokenizer)
        yield (draw_block(source, encode, *job) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (source,)) as pool:
        yield pool.map(_worker_block, jobs)


_worker: tuple[Source, LineEncoder]  # set once in every worker process


def _start_worker(source: Source) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process a core is parallel enough
    _worker = source, LineEncoder(source.tokenizer)


def _worker_block(job: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, Counter]:
    return draw_block(*_worker, *job)
