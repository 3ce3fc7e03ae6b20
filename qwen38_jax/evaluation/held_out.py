"""What a small checkpoint is asked about held-out documents, and what the right answers are.

All draws come from a `random.Random`; the same documents, tokenizer and seed give the same questions.
"""

import ast
import dataclasses
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, islice
from typing import TypeVar

from tokenizers import Tokenizer

from qwen38_jax.training.corpus import Document
from qwen38_jax.training.dataset import LineEncoder
from qwen38_jax.training.excerpts import Library, new_name, random_token_text

REPRODUCE = "Repeat the text below exactly."
COPY = "Copy the string below."
RENAME = "Rename `{old}` to `{new}` in the file below and return the whole result."

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Question:
    """A user's message and the answer expected, about text of that kind: prose, code or string."""

    message: str
    expected: str
    kind: str
    whole: bool = True  # whether the text is a whole document
    old: str = ""  # the name to be replaced, in a renaming
    new: str = ""


@dataclasses.dataclass(frozen=True)
class Excerpt:
    """Whole lines of a held-out document."""

    document: Document
    text: str

    @property
    def whole(self) -> bool:
        return self.text == self.document.text


@dataclasses.dataclass(frozen=True)
class FunctionStart:
    """A module up to a function's body: `prompt` is all of that, `header` its lines from `def` on."""

    prompt: str
    header: str


def documents_hash(documents: Iterable[Document]) -> str:
    """Tells sets of documents apart, by name and text: 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps([document.name, document.text]).encode())
    return digest.hexdigest()[:12]


def documents_of(documents: Iterable[Document], groups: Collection[str] | None) -> list[Document]:
    """The documents whose group a training run held out too; all of them where it did not say which these are (None).

    Which files exist, and under which names, depends on the Python version, and the split goes by names: what one
    installation holds out another may have under the name of a training document.

    Raises ValueError when there is none.
    """
    kept = [d for d in documents if groups is None or d.group in groups]
    if not kept:
        raise ValueError("the training run held out none of these documents: take the library of its Python version")
    return kept


# ---- excerpts ----


def excerpts(document: Document, sizes: Sequence[int], low: int, high: int) -> list[Excerpt]:
    """Cuts a document into excerpts that do not overlap and measure `low` to `high`; what does not fit is left out.

    sizes: of each line of the document, e.g. in tokens, or 1 to count lines. A document that fits is taken whole; else
    an excerpt starts at the document's or at a paragraph's first line, if that is not indented, and is as long as
    it may be.
    """
    lines, found, at = document.text.split("\n"), [], 0
    while at < len(lines):
        end, size = at, 0
        while end < len(lines) and size + sizes[end] <= high:
            size, end = size + sizes[end], end + 1
        while end > at and not lines[end - 1]:
            end, size = end - 1, size - sizes[end - 1]
        if size >= low:
            found.append(Excerpt(document, "\n".join(lines[at:end])))
        else:
            end = at + 1
        at = next((i for i in range(end, len(lines)) if _starts_paragraph(lines, i)), len(lines))
    return found


def _starts_paragraph(lines: list[str], i: int) -> bool:
    return bool(lines[i]) and not lines[i][0].isspace() and not lines[i - 1]


def token_sizes(document: Document, encode: LineEncoder) -> list[int]:
    """Tokens of each line, its break included; that of blank lines below it too, which one token may run over."""
    lines = re.findall(r".+\n+", document.text + "\n")
    lengths = [len(ids) for ids in encode(lines)]
    return [n for line, length in zip(lines, lengths, strict=True) for n in [length, *[0] * (line.count("\n") - 1)]]


def line_sizes(document: Document) -> list[int]:
    return [1] * (document.text.count("\n") + 1)


def spread(found: Sequence[list[T]], count: int, rng: random.Random) -> list[T]:
    """Up to `count` out of lists, one a document: the first of each in a drawn order, then the second of each, ..."""
    found = list(found)
    rng.shuffle(found)
    rounds = (of[i] for i in range(max(map(len, found), default=0)) for of in found if i < len(of))
    return list(islice(rounds, count))


def draw_documents(
    documents: Iterable[Document], encode: LineEncoder, count: int, low: int, high: int, rng: random.Random
) -> list[Excerpt]:
    """Up to `count` held-out documents of `low` to `high` tokens, or excerpts of longer ones; a third of them prose."""
    found = {"prose": [], "code": []}
    for document in documents:
        found[document.kind].append(excerpts(document, token_sizes(document, encode), low, high))
    prose = spread(found["prose"], count // 3, rng)
    return prose + spread(found["code"], count - len(prose), rng)


# ---- questions ----


def reproductions(chosen: Iterable[Excerpt]) -> list[Question]:
    """Asks for each text as it is."""
    return [Question(f"{REPRODUCE}\n\n{e.text}", e.text, e.document.kind, e.whole) for e in chosen]


def renamings(documents: Iterable[Document], library: Library, count: int, rng: random.Random) -> list[Question]:
    """Asks to rename an identifier that occurs at least twice in 90 to 110 lines of a source file, to a new name."""
    found = [excerpts(d, line_sizes(d), 90, 110) for d in documents if d.kind == "code"]
    chosen = spread(found, sum(map(len, found)), rng)
    questions = (question for e in chosen if (question := _renaming(e, library, rng)))
    return list(islice(questions, count))


def _renaming(excerpt: Excerpt, library: Library, rng: random.Random) -> Question | None:
    words = Counter(re.findall(r"\w+", excerpt.text))
    names = [name for name in excerpt.document.identifiers if words[name] >= 2]
    if not names:
        return None
    old, new = rng.choice(names), new_name(rng, library)
    while new in words:
        new = new_name(rng, library)
    renamed = re.sub(rf"\b{old}\b", new, excerpt.text)
    message = f"{RENAME.format(old=old, new=new)}\n\n{excerpt.text}"
    return Question(message, renamed, "code", excerpt.whole, old, new)


def string_copies(
    library: Library, tokenizer: Tokenizer, count: int, length: int, rng: random.Random
) -> list[Question]:
    """Asks to copy strings of `length` random tokens."""
    texts = [random_token_text(rng, library, tokenizer, length) for _ in range(count)]
    return [Question(f"{COPY}\n\n{text}", text, "string") for text in texts]


# ---- beginnings ----


def function_starts(
    documents: Iterable[Document], encode: LineEncoder, count: int, longest: int, rng: random.Random
) -> list[FunctionStart]:
    """Up to `count` modules cut below a function's header (and docstring), none longer than `longest` tokens."""
    found = []
    for document in documents:
        if document.kind == "code":
            lengths = list(accumulate(token_sizes(document, encode), initial=0))
            starts = [start for lines, start in _function_starts(document) if lengths[lines] <= longest]
            rng.shuffle(starts)
            found.append(starts)
    return spread(found, count, rng)


def _function_starts(document: Document) -> list[tuple[int, FunctionStart]]:
    """Of every function whose body begins on a line of its own right below header and docstring, with prompt lines."""
    lines, starts = document.text.split("\n"), []
    for node in ast.walk(ast.parse(document.text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        documented = ast.get_docstring(node, clean=False) is not None
        if documented and len(node.body) == 1:
            continue
        first = node.body[documented]
        line = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", ()))]) - 1
        above = next(text for text in reversed(lines[:line]) if text).strip()
        if not lines[line][: first.col_offset].strip() and not above.startswith("#"):
            prompt, header = lines[:line], lines[node.lineno - 1 : line]
            starts.append((line, FunctionStart("\n".join(prompt) + "\n", "\n".join(header) + "\n")))
    return starts


def plain_starts(documents: Iterable[Document], encode: LineEncoder, kind: str, length: int) -> list[str]:
    """Whole lines of up to `length` tokens from the beginning of each longer document of a kind."""
    texts = []
    for document in documents:
        sizes = token_sizes(document, encode)
        if document.kind == kind and sum(sizes) > length:
            end = next(i for i in range(len(sizes)) if sum(sizes[: i + 1]) > length)
            texts.append("\n".join(document.text.split("\n")[: max(1, end)]) + "\n")
    return texts
