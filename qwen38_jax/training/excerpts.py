"""Where tasks get their material: excerpts of documents, scrambled excerpts, random strings, random records.

Excerpts start at varied places and may have their identifiers replaced, so that reproducing one is copying, not recall.
All draws come from a `random.Random`, whose sequences are the same in every Python version.
"""

import bisect
import json
import keyword
import math
import random
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

from tokenizers import Tokenizer

from qwen38_jax.training.corpus import Document, Kind

CHARS_PER_TOKEN = {"prose": 2.9, "code": 3.4}
SCRAMBLED_CHARS_PER_TOKEN = 2.5
PROSE_SHARE = 0.35
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]+")
# Deeper lines would lose the structure of what follows when the excerpt is dedented.
SHALLOW_LINE, SHALLOW_PARAGRAPH = re.compile(r"\n(?= {0,4}\S)"), re.compile(r"\n\n(?= {0,4}\S)")
KEPT_WORDS = frozenset(keyword.kwlist) | {"self", "cls", "None", "True", "False"}
LINES_OF_NAMES = (
    "{0} = {1}({2}, {3})", "{0}.{1} = {2}", "return {0}[{1}]", "if {0} != {1}:", "for {0} in {1}:", "({0}, {1}) = {2}",
    "def {0}({1}, {2}=None):", "# {0} and {1}, not {2}", "self.{0}({1}={2})", "print({0}, -{1})", "while not {0}:",
    "from {0} import {1}", 'assert {0} == "{1}"', "{0}, {1} = {1}, {0}", "class {0}({1}):", 'raise {0}("no {1}")',
    "yield {0}*{1}", "del {0}[{1}:{2}]", "@{0}.{1}", "{0} += [{1}, {2}]", "'{0}': {1},", "{0} = self.{0}",
)  # fmt: skip
ALPHABETS = (
    "0123456789abcdef",
    "0123456789",
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghjkmn23456789",
)


@dataclass(frozen=True)
class Excerpt:
    """Text shown to the model. `functions` are the (name, docstring line) pairs of the definitions in it, in order."""

    text: str
    kind: Literal["prose", "code", "json", "string"]
    functions: tuple[tuple[str, str], ...] = ()
    identifiers: frozenset[str] = frozenset()

    @cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")


@dataclass(frozen=True)
class Library:
    """Documents of one side of the split, indexed for drawing."""

    documents: dict[Kind, tuple[Document, ...]]
    cumulative: dict[Kind, tuple[int, ...]]  # characters up to and including each document
    words: tuple[str, ...]
    tokens: tuple[str, ...]  # vocabulary entries that are text of their own, one line each
    topics: tuple[tuple[str, str], ...]  # (title, text below it) of the reference topics
    functions: tuple[tuple[str, str, str], ...]  # (name, docstring line, source) of short documented functions


def make_library(documents: Iterable[Document], tokenizer: Tokenizer) -> Library:
    """Indexes documents. Raises ValueError when there is no prose or no code among them."""
    documents = tuple(documents)
    by_kind = {kind: tuple(d for d in documents if d.kind == kind) for kind in ("prose", "code")}
    for kind, of_kind in by_kind.items():
        if not of_kind:
            raise ValueError(f"no {kind} among the {len(documents)} documents: take more of the corpus")
    words = {w for d in by_kind["prose"] for w in re.findall(r"\b[a-z]{3,10}\b", d.text)}
    decoded = (tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size(with_added_tokens=False)))
    return Library(
        documents=by_kind,
        cumulative={kind: tuple(accumulate(len(d.text) for d in of_kind)) for kind, of_kind in by_kind.items()},
        words=tuple(sorted(words)),
        tokens=tuple(t for t in decoded if t.strip() and "\ufffd" not in t and not re.search(r"[\r\n]", t)),
        topics=tuple(topic for d in by_kind["prose"] if d.name.startswith("topic:") if (topic := _topic(d.text))),
        functions=tuple(f for d in by_kind["code"] if "test" not in d.name for f in _documented_functions(d)),
    )


def _topic(text: str) -> tuple[str, str] | None:
    title, _, rest = text.partition("\n")
    underline, _, body = rest.partition("\n")
    return (title, body.strip()) if underline and not underline.strip("*=-") else None


def _documented_functions(document: Document) -> Iterable[tuple[str, str, str]]:
    for f in document.functions:
        source = dedent_like_first_line(document.text[f.start : f.end])
        if 20 <= len(f.summary) <= 120 and len(source) <= 1200 and not f.name.startswith("_"):
            yield f.name, f.summary, source


def log_uniform(rng: random.Random, low: float, high: float) -> int:
    """An integer from [low, high], every octave equally likely."""
    return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))


def dedent_like_first_line(text: str) -> str:
    """Takes the first line's indentation off its block, so that the text starts with a word.

    Lines from the first less indented one on stay as they are: after the methods of a class comes top-level code.
    """
    lines = text.strip("\n").rstrip().split("\n")
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    end = next((i for i, line in enumerate(lines) if line and not line.startswith(indent)), len(lines))
    return "\n".join([*(line.removeprefix(indent) for line in lines[:end]), *lines[end:]])


def draw_excerpt(rng: random.Random, library: Library, tokens: int, kind: Kind | None = None) -> Excerpt:
    """An excerpt of about `tokens` tokens (less where no document is so long), whole lines of one document."""
    kind = kind or ("prose" if rng.random() < PROSE_SHARE else "code")
    chars = max(80, int(tokens * CHARS_PER_TOKEN[kind]))
    draws = rng.choices(library.documents[kind], cum_weights=library.cumulative[kind], k=8)
    document = next((d for d in draws if len(d.text) >= chars), max(draws, key=lambda d: len(d.text)))
    text = document.text
    start = _excerpt_start(rng, document, chars)
    stop = len(text) if start + chars >= len(text) else max(text.rfind("\n", start, start + chars), start + chars // 2)
    inside = document.functions[_first_at(document, start) : _first_at(document, stop - 4)]
    return Excerpt(
        text=dedent_like_first_line(text[start:stop]),
        kind=kind,
        functions=tuple((f.name, f.summary if f.end <= stop else "") for f in inside),
        identifiers=frozenset(document.identifiers),
    )


def _first_at(document: Document, offset: int) -> int:
    return bisect.bisect_left(document.functions, offset, key=lambda f: f.start)


def _excerpt_start(rng: random.Random, document: Document, chars: int) -> int:
    """The beginning of the document, of a function, of a paragraph, or of a line that is not deep inside a block."""
    last = max(0, len(document.text) - chars)
    how = rng.random()
    if how < 0.2 or not last:
        return 0
    functions = _first_at(document, last)
    if how < 0.6 and functions:
        return document.text.rfind("\n", 0, document.functions[rng.randrange(functions)].start) + 1
    match = rng.choice((SHALLOW_LINE, SHALLOW_PARAGRAPH)).search(document.text, rng.randrange(last))
    return match.end() if match else 0


class _Renaming(dict):
    """Word -> replacement, made up the first time that a word is met; three in ten words stay as they are."""

    def __init__(self, rng: random.Random, library: Library):
        self._draw = rng, library

    def __missing__(self, word: str) -> str:
        rng, library = self._draw
        new = word if word in KEPT_WORDS or rng.random() < 0.3 else new_name(rng, library)
        self[word] = new
        return new


def scramble(rng: random.Random, library: Library, excerpt: Excerpt) -> Excerpt:
    """The same structure with most words replaced, each always by the same new one."""
    renaming = _Renaming(rng, library)
    text = WORD.sub(lambda match: renaming[match[0]], excerpt.text)
    return replace(
        excerpt,
        text=text,
        functions=tuple((renaming.get(name, name), "") for name, _ in excerpt.functions),
        identifiers=frozenset(new for old, new in renaming.items() if old in excerpt.identifiers),
    )


def misprint(rng: random.Random, library: Library, excerpt: Excerpt) -> Excerpt:
    """The same with some words replaced, each place by itself, by words of any document or of this one.

    Whoever copies it can rely on what is there alone, and not on what usually follows.
    """
    share, kept = rng.choice((0.03, 0.1, 0.2)), KEPT_WORDS | {name for name, _ in excerpt.functions}
    own = [word for word in WORD.findall(excerpt.text) if word not in kept]

    def word(match: re.Match) -> str:
        if rng.random() >= share or match[0] in kept:
            return match[0]
        return rng.choice(own if rng.random() < 0.5 else library.words)

    text = WORD.sub(word, excerpt.text)
    return replace(excerpt, text=text, functions=tuple((name, "") for name, _ in excerpt.functions))


def crowded_code(rng: random.Random, library: Library, tokens: int) -> Excerpt:
    """About `tokens` tokens of lines over a handful of names, some of which begin or end like others.

    A name stands in every second line and in all kinds of places, next to names that it must not be taken for.
    """
    names = [new_name(rng, library) for _ in range(rng.randint(2, 4))]
    names += [_similar_name(rng, library, rng.choice(names)) for _ in range(rng.randint(1, 5))]
    lines, chars, depth = [], 0, 0
    while chars < tokens * SCRAMBLED_CHARS_PER_TOKEN:
        lines.append("    " * depth + rng.choice(LINES_OF_NAMES).format(*rng.choices(names, k=4)))
        chars += len(lines[-1])
        depth = max(0, min(3, depth + rng.choice((-1, 0, 0, 1)))) if lines else 0
    return Excerpt("\n".join(lines), "code", identifiers=frozenset(names))


def _similar_name(rng: random.Random, library: Library, name: str) -> str:
    word = rng.choice(library.words)
    letter, digit = rng.choice("abcdefghijklmnopqrstuvwxyz"), rng.randrange(10)
    joined = (f"{name}_{word}", f"{word}_{name}", f"{word}{name.capitalize()}", f"{name}{word.capitalize()}")
    return rng.choice((*joined, f"{name}s", f"{letter}{name}", f"_{name}", f"{name}{digit}", name.upper()))


def new_name(rng: random.Random, library: Library) -> str:
    """A made-up identifier: words joined in one of the usual styles, or random letters."""
    style = rng.random()
    if style < 0.4:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8)))
    words = [library.words[int(rng.random() * len(library.words))] for _ in range(rng.choice((1, 1, 2, 2, 3)))]
    if style < 0.75:
        name = "_".join(words)
    else:
        name = "".join(map(str.capitalize, words))
    return name + str(rng.randrange(10)) if style > 0.9 else name


def random_string(rng: random.Random, library: Library, tokens: int) -> Excerpt:
    """About `tokens` random tokens that nothing but the prompt can predict: vocabulary entries, words or characters."""
    style = rng.random()
    if style < 0.5:
        parts = rng.choices(library.tokens, k=tokens)
    elif style < 0.7:
        parts = [f" {token.strip()}" for token in rng.choices(library.tokens, k=tokens)]
    elif style < 0.85:
        parts = [f" {word}" for word in rng.choices(library.words, k=max(8, tokens // 2))]
    else:
        parts = rng.choices(rng.choice(ALPHABETS), k=tokens)
    if rng.random() < 0.2:
        width = rng.randint(6, 24)
        parts = ["\n" + p.lstrip() if i % width == width - 1 else p for i, p in enumerate(parts)]
    return Excerpt(unicodedata.normalize("NFC", "".join(parts)).strip(), "string")


def random_token_text(rng: random.Random, library: Library, tokenizer: Tokenizer, count: int) -> str:
    """Text of random vocabulary entries that encodes to exactly `count` tokens, for measuring."""
    while True:
        ids = tokenizer.encode("".join(rng.choices(library.tokens, k=2 * count)).strip()).ids[:count]
        text = tokenizer.decode(ids).strip()
        if len(tokenizer.encode(text).ids) == count:
            return text


def random_records(rng: random.Random, library: Library, tokens: int) -> Excerpt:
    """A JSON array of flat records of about `tokens` tokens; all records have the same keys."""
    keys = rng.sample(library.words, rng.randint(3, 6))
    makers = [rng.choice((_random_number, _random_word, _random_word, _random_flag)) for _ in keys]
    count = max(2, min(60, tokens // (10 * len(keys))))
    records = [{k: make(rng, library) for k, make in zip(keys, makers, strict=True)} for _ in range(count)]
    if rng.random() < 0.4:
        return Excerpt(json.dumps(records, indent=2), "json")
    return Excerpt("[\n" + ",\n".join("  " + json.dumps(r) for r in records) + "\n]", "json")


def _random_number(rng: random.Random, library: Library) -> int:
    return rng.randrange(10 ** rng.randint(1, 5))


def _random_word(rng: random.Random, library: Library) -> str:
    return " ".join(rng.choices(library.words, k=rng.randint(1, 3)))


def _random_flag(rng: random.Random, library: Library) -> bool | None:
    return rng.choice((True, False, None))
