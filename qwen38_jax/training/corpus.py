"""Text that every Python installation brings along: reference prose, standard-library source, docstrings.

Nothing is downloaded. Which documents there are depends on the interpreter (3.11 to 3.13) and on the distribution:
Debian strips most of `test/`, others strip `pydoc_data`. What is there is taken, `Corpus.counts` reports it.
"""

import ast
import hashlib
import runpy
import sysconfig
import unicodedata
import warnings
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

MIN_BYTES = 1_000_000
HELD_OUT_PER_MILLE = 40
# Installed packages, generated tables (codecs, build settings) and files that are wrong or odd on purpose.
SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "_bundled"}
SKIPPED_PATHS = ("lib2to3/tests/data/", "test/cjkencodings/", "test/tokenizedata/", "test/encoded_modules/")
# A document with one of these would put control tokens inside plain text.
CONTROL_STRINGS = ("<|", "<think>", "</think>", "<tool_", "</tool_", "<tts_")

Kind = Literal["prose", "code"]


@dataclass(frozen=True)
class Function:
    """A function of a code document; `start` and `end` are character offsets of its `def` line and of its end."""

    name: str
    start: int
    end: int
    summary: str  # first line of the docstring, "" without one


@dataclass(frozen=True)
class Document:
    """One text. `functions` (by offset) and `identifiers` (sorted) are what `ast` found; empty for prose."""

    name: str
    kind: Kind
    text: str
    functions: tuple[Function, ...] = ()
    identifiers: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """Documents made from the same file share a group, and stay on the same side of the split."""
        return self.name.partition(":")[2]


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, split by document."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Documents and characters by split and kind, e.g. `counts["train/code"]["characters"]`."""
        counts = {}
        for split in ("train", "held_out"):
            for kind in ("prose", "code"):
                texts = [d.text for d in getattr(self, split) if d.kind == kind]
                counts[f"{split}/{kind}"] = {"documents": len(texts), "characters": sum(map(len, texts))}
        return counts


def load_corpus(max_code_bytes: int | None = None, *, root: Path | None = None) -> Corpus:
    """Reads the corpus of the running interpreter; about half a minute for all of it, most of it `ast`.

    `max_code_bytes` keeps an arbitrary but fixed subset of the source files, for tests and smoke runs; `root` is the
    library directory of another installation, so that a run elsewhere can learn from the same documents.
    Raises ValueError when the installation holds less than 1 MB of text, or no held-out document.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    documents = _topics(root)
    for path in _source_files(root, max_code_bytes):
        documents += _documents_of_file(path, path.relative_to(root).as_posix())
    size = sum(len(d.text) for d in documents)
    if size < MIN_BYTES:
        raise ValueError(
            f"found only {size:,} characters of text under {root} ({len(documents)} documents), need {MIN_BYTES:,}: "
            "use a Python installation that ships its standard library as .py files"
        )
    corpus = _split(sorted(documents, key=lambda d: d.name))
    if not corpus.held_out:
        raise ValueError(f"none of the {len(documents)} documents under {root} is held out: take more source files")
    return corpus


def _digest(name: str, salt: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{salt}:{name}".encode()).digest()[:8], "big")


def _topics(root: Path) -> list[Document]:
    path = root / "pydoc_data" / "topics.py"
    if not path.exists():
        return []
    topics = runpy.run_path(str(path))["topics"]
    return [Document(f"topic:{name}", "prose", _clean(text)) for name, text in topics.items()]


def _source_files(root: Path, max_bytes: int | None) -> list[Path]:
    files = sorted(root.rglob("*.py"), key=lambda path: _digest(path.relative_to(root).as_posix(), "order"))
    files = [path for path in files if _is_wanted(path.relative_to(root))]
    if max_bytes is None:
        return files
    sizes = accumulate(path.stat().st_size for path in files)
    return [path for path, size in zip(files, sizes, strict=True) if size <= max_bytes]


def _is_wanted(path: Path) -> bool:
    return (
        SKIPPED_DIRECTORIES.isdisjoint(path.parts)
        and not path.as_posix().startswith(SKIPPED_PATHS)
        and not path.name.startswith(("_sysconfigdata", "bad_", "badsyntax_"))
    )


def _clean(text: str) -> str:
    """NFC (as the tokenizer sees it), Unix line ends, no white space at line ends or around the text."""
    text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\f", "")
    return "\n".join(line.rstrip() for line in text.split("\n")).strip()


def _is_natural(text: str) -> bool:
    """Whether the text is neither a table of numbers, nor packed data, nor about control tokens."""
    digits = sum(text.count(digit) for digit in "0123456789")
    longest = max(map(len, text.split("\n")))
    return digits < 0.12 * len(text) and longest < 400 and not any(s in text for s in CONTROL_STRINGS)


def _documents_of_file(path: Path, name: str) -> list[Document]:
    """The file as a code document and its docstrings as a prose document; [] for what does not parse or is data."""
    try:
        text = _clean(path.read_text(encoding="utf-8"))
        with warnings.catch_warnings():  # invalid escapes in old files are of no interest here
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    if len(text) < 200 or not _is_natural(text):
        return []
    documents = [_code_document(name, text, tree)]
    prose = _docstrings(name, tree)
    if len(prose) >= 400 and _is_natural(prose):
        documents.append(Document(f"docstrings:{name}", "prose", prose))
    return documents


def _code_document(name: str, text: str, tree: ast.Module) -> Document:
    line_starts = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]
    functions, identifiers = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            identifiers.add(node.id)
        elif isinstance(node, ast.Attribute):
            identifiers.add(node.attr)
        elif isinstance(node, ast.arg):
            identifiers.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            identifiers.add(node.name)
            summary = (ast.get_docstring(node) or "").partition("\n")[0].strip()
            start, end = line_starts[node.lineno - 1], line_starts[node.end_lineno] - 1
            functions.append(Function(node.name, start, end, summary))
    functions.sort(key=lambda f: f.start)
    names = sorted(i for i in identifiers if len(i) > 1 and not i.startswith("__") and i not in ("self", "cls"))
    return Document(f"code:{name}", "code", text, tuple(functions), tuple(names))


def _docstrings(name: str, tree: ast.Module) -> str:
    """All docstrings of a module in the order of the source, each under the name and arguments of what it describes."""
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    sections: list[str] = []

    def visit(node, heading: str, prefix: str) -> None:
        docstring = ast.get_docstring(node)
        if docstring:
            sections.append(f"{heading}\n\n{docstring}")
        for child in node.body:
            if isinstance(child, ast.ClassDef):
                visit(child, f"class {prefix}{child.name}", f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(child):
                visit(child, f"{prefix}{child.name}({ast.unparse(child.args)})", f"{prefix}{child.name}.")

    visit(tree, f"Module {module}", "")
    return _clean("\n\n".join(sections))


def _split(documents: list[Document]) -> Corpus:
    """Holds out 4 % of the groups by the hash of their names, less those that are mostly found in training too."""
    held_out = {d.group for d in documents if _digest(d.group, "split") % 1000 < HELD_OUT_PER_MILLE}
    lines = {d.name: _telling_lines(d.text) for d in documents}
    while True:
        seen = set().union(*(lines[d.name] for d in documents if d.group not in held_out))
        copies = {d.group for d in documents if d.group in held_out and _overlap(lines[d.name], seen) > 0.4}
        if not copies:
            break
        held_out -= copies
    return Corpus(
        train=tuple(d for d in documents if d.group not in held_out),
        held_out=tuple(d for d in documents if d.group in held_out),
    )


def _telling_lines(text: str) -> Counter:
    """Lines long enough to be characteristic of a text, with their counts."""
    return Counter(stripped for line in text.split("\n") if len(stripped := line.strip()) >= 24)


def _overlap(lines: Counter, seen: set[str]) -> float:
    return sum(n for line, n in lines.items() if line in seen) / max(1, lines.total())
