"""Packed training rows: plain text and tasks, drawn while the model trains and never twice.

A row holds whole conversations, packed first-fit, and plain text in what is left. Every conversation and every document
ends with <|endoftext|>; plain text alone may run over the end of a row. Blocks of rows are drawn independently, each
from its own seed, so that a block depends neither on the number of workers nor on where a run was resumed.
"""

import multiprocessing
import os
import random
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from qwen38_jax.training.bpe import END_OF_TEXT, LINE_START
from qwen38_jax.training.corpus import Corpus, Document, Kind
from qwen38_jax.training.excerpts import Library, log_uniform, make_library
from qwen38_jax.training.tasks import Conversation, available_tasks, make_conversation, render_pieces

# Shares of all tokens; a task without material leaves its to plain text. Plain text is little, because there is little
# of it: more would be learned by heart. Copying is soon learned, changing what is copied is not.
MIXTURE = {
    "plain/prose": 0.02,
    "plain/code": 0.16,
    "reproduce": 0.06,
    "copy_string": 0.08,
    "quote": 0.05,
    "rename": 0.30,
    "edit": 0.12,
    "json": 0.04,
    "continue": 0.03,
    "summarise": 0.015,
    "list_functions": 0.04,
    "needle": 0.03,
    "fact": 0.01,
    "write_function": 0.03,
    "small_talk": 0.015,
}
SHORTEST = 64  # tokens of a conversation; the longest fill a row
SHORT_SHARE = (
    0.75  # of conversations whose length is drawn so that every octave gets as many tokens; else as many of them
)
BLOCK_TOKENS = 1 << 18
TOKEN_DTYPE, WEIGHT_DTYPE = np.dtype("<u2"), np.dtype("u1")


class Block(NamedTuple):
    """Rows of one length: tokens [rows, length] uint16; loss weights [rows, length] uint8; tokens by task.

    `weights[r, i]` is how much the prediction of `tokens[r, i]` counts: 0 on prompts; 1 on plain text and on what the
    assistant says, up to and with <|im_end|>; `tasks.EDITED_WEIGHT` on lines of a copy that differ from the original.
    """

    tokens: np.ndarray
    weights: np.ndarray
    counts: Counter


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


# ---- tokenising ----


class LineEncoder:
    """Encodes text line by line and remembers lines, which recur all the time; equal to encoding the text at once."""

    MOST_LINES = 400_000

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.known: dict[str, bytes] = {}

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, [n] uint16."""
        if len(self.known) > self.MOST_LINES:
            self.known.clear()
        lines = [LINE_START.split(text) for text in texts]
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
        weights = np.repeat(np.array([weight for _, weight in p], WEIGHT_DTYPE), [len(part) for part in parts])
        examples.append(Example(conversation.task, np.concatenate(parts), weights))
    return examples


# ---- drawing and packing ----


@dataclass(frozen=True)
class Source:
    """All that the rows of one split are drawn from."""

    library: Library
    tokenizer: Tokenizer
    plain: dict[Kind, tuple[np.ndarray, ...]]  # token ids of each document, end of text included
    seed: str


def make_source(documents: tuple[Document, ...], tokenizer: Tokenizer, seed: str) -> Source:
    """Indexes and tokenises the documents of one split."""
    library = make_library(documents, tokenizer)
    encode = LineEncoder(tokenizer)
    plain = {kind: tuple(encode([d.text + END_OF_TEXT for d in ds])) for kind, ds in library.documents.items()}
    return Source(library, tokenizer, plain, seed)


def rows_per_block(length: int) -> int:
    """Rows of `length` tokens in a block. Raises ValueError for rows too short to hold conversations, or too long."""
    if not 2 * SHORTEST <= length <= BLOCK_TOKENS:
        raise ValueError(f"rows have {length} tokens, need {2 * SHORTEST} to {BLOCK_TOKENS}")
    return BLOCK_TOKENS // length


def draw_block(source: Source, encode: LineEncoder, length: int, index: int) -> Block:
    """Block number `index` of rows of `length` tokens, a function of the source and of these numbers alone."""
    rows = rows_per_block(length)
    rng = random.Random(f"{source.seed}/{length}/{index}")
    counts = Counter()
    packed = _first_fit(_draw_examples(rng, source, encode, rows, length, counts), rows, length)
    for row, text in zip(packed, _plain_fillings(source, length, index, packed), strict=True):
        row += text
        rng.shuffle(row)
    rng.shuffle(packed)
    for example in (e for row in packed for e in row):
        counts[example.task] += len(example)
    tokens = np.stack([np.concatenate([e.tokens for e in row]) for row in packed])
    weights = np.stack([np.concatenate([e.weights for e in row]) for row in packed])
    return Block(tokens, weights, counts)


def _draw_examples(
    rng: random.Random, source: Source, encode: LineEncoder, rows: int, length: int, counts: Counter
) -> list[Example]:
    """Conversations that give every task its share of the tokens, drawn in batches of the tasks furthest behind."""
    tasks = available_tasks(source.library)
    goal = rows * length * sum(MIXTURE[task] for task in tasks)
    asked, got = dict.fromkeys(tasks, 1.0), dict.fromkeys(tasks, 1.0)  # tokens asked for and drawn so far
    drawn: list[Example] = []
    while (have := sum(got.values())) < goal:
        scale = {task: got[task] / asked[task] for task in tasks}
        batch, planned = [], dict(got)
        while sum(planned.values()) < min(goal, have + 1 + goal / 8):
            task = min(tasks, key=lambda t: planned[t] / MIXTURE[t])
            tokens = _draw_length(rng, 0.95 * length)
            batch.append(make_conversation(rng, source.library, task, tokens))
            planned[task] += tokens * scale[task]
            asked[task] += tokens
        for example in encode_conversations(encode, batch):
            got[example.task] += len(example)
            if len(example) <= length and sum(got.values()) <= goal:
                drawn.append(example)
            else:
                counts["dropped"] += 1
    return drawn


def _draw_length(rng: random.Random, longest: float) -> int:
    """Tokens of a conversation. Short ones hold more changes to learn from, long ones more ways to go astray."""
    if rng.random() < SHORT_SHARE:
        return round(1 / rng.uniform(1 / longest, 1 / SHORTEST))
    return log_uniform(rng, SHORTEST, longest)


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


def _plain_fillings(source: Source, length: int, index: int, packed: list[list[Example]]) -> list[list[Example]]:
    """Plain text for what is left of each row: one kind a row, the text running on from row to row."""
    free = [length - sum(map(len, row)) for row in packed]
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


# ---- drawing ahead ----


class BlockReader:
    """Blocks by row length and number, drawn by other processes ahead of being asked for."""

    def __init__(self, source: Source, workers: int):
        if workers < 1:
            raise ValueError(f"workers is {workers}, need at least 1")
        context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of JAX
        self._pool = ProcessPoolExecutor(workers, context, _start_worker, (source,))
        self._ahead = 2 * workers
        self._pending: dict[tuple[int, int], Future] = {}

    def __call__(self, length: int, index: int) -> Block:
        """Waits for one block; the ones that follow it are begun."""
        wanted = [(length, i) for i in range(index, index + self._ahead)]
        for job in wanted:
            if job not in self._pending:
                self._pending[job] = self._pool.submit(_worker_block, job)
        for job in set(self._pending).difference(wanted):
            self._pending.pop(job).cancel()
        return self._pending[wanted[0]].result()

    def __enter__(self) -> "BlockReader":
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown(cancel_futures=True)


_worker: tuple[Source, LineEncoder]  # set once in every worker process


def _start_worker(source: Source) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process a core is parallel enough
    _worker = source, LineEncoder(source.tokenizer)


def _worker_block(job: tuple[int, int]) -> Block:
    return draw_block(*_worker, *job)
