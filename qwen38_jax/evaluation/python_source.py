"""Whether a generated function body is Python: where it ends, where an unfinished one is cut, whether it parses.

Nothing here is tried until it parses, which would let every text pass: the cut follows from brackets, quotes and
indentation alone, and what stands before it must parse as a whole.
"""

import ast
import dataclasses
import re
import warnings
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
    | (?P<quote>\b[rRbBuUfF]{1,2}(?:\"{3}|'{3}|\"|')|\"{3}|'{3}|\"|')
    | (?P<open>[(\[{]) | (?P<close>[)\]}])
    | (?P<joined>\\\n) | (?P<newline>\n)
    | (?P<word>\w+) | (?P<blank>[^\S\n]+) | (?P<other>.)""",
    re.VERBOSE,
)
_STRING_END = {
    '"""': re.compile(r'(?:\\.|[^\\])*?"""', re.DOTALL),
    "'''": re.compile(r"(?:\\.|[^\\])*?'''", re.DOTALL),
    '"': re.compile(r'(?:\\.|[^"\\\n])*"', re.DOTALL),
    "'": re.compile(r"(?:\\.|[^'\\\n])*'", re.DOTALL),
}
_LINE_END = re.compile(r"(?:\\.|[^\\\n])*\n", re.DOTALL)  # the first that no backslash joins
_CLOSING = {"(": ")", "[": "]", "{": "}"}
# No bracket of a valid text holds one of these words.
_STATEMENT_WORDS = frozenset(
    "def class return import while with try except finally raise pass break continue del global nonlocal assert".split()
)


@dataclasses.dataclass(frozen=True)
class LogicalLine:
    """A line as Python counts them: brackets, triple quotes and backslashes join several into one.

    Attributes:
      start, end: character offsets, of its first word and past its line break.
      indent: columns, tabs as Python takes them (to the next multiple of 8).
      first: its first word, "" where it begins with something else.
      opens: whether it ends with a colon, and so wants an indented block.
      finished: whether it has its line break; only the last line of a text may lack it.
    """

    start: int
    end: int
    indent: int
    first: str
    opens: bool
    finished: bool


class BrokenSource(ValueError):
    """Text that no continuation makes valid: a bracket or a quote that cannot be closed any more."""


def logical_lines(text: str) -> Iterator[LogicalLine]:
    """The logical lines of a text; blank lines and comments are none.

    Raises BrokenSource at a bracket that closes nothing or the wrong one, a quote that its line does not close, and
    a statement's keyword between brackets.
    """
    at, brackets = 0, []
    start, first, last = None, "", ""  # of the logical line that is being read
    while at < len(text):
        match = _TOKEN.match(text, at)
        kind, token, at = match.lastgroup, match[0], match.end()
        if kind in ("blank", "comment", "joined"):
            continue
        if kind == "newline":
            if start is not None and not brackets:
                yield LogicalLine(start, at, _indentation(text, start), first, last == ":", finished=True)
                start = None
            continue
        if start is None:
            start, first = match.start(), token if kind == "word" else ""
        last = token
        if kind == "quote":
            at = _string_end(text, at, token.lstrip("rRbBuUfF"))
        elif kind == "open":
            brackets.append(token)
        elif kind == "close" and (not brackets or _CLOSING[brackets.pop()] != token):
            raise BrokenSource(f"{token!r} at character {match.start()} closes nothing")
        elif kind == "word" and brackets and token in _STATEMENT_WORDS:
            raise BrokenSource(f"{token!r} at character {match.start()} stands between brackets")
    if start is not None:
        yield LogicalLine(start, at, _indentation(text, start), first, opens=False, finished=False)


def _string_end(text: str, at: int, quote: str) -> int:
    """Offset past the string whose content begins at `at`; the text's end if it is still open there."""
    if match := _STRING_END[quote].match(text, at):
        return match.end()
    if len(quote) == 1 and _LINE_END.match(text, at):
        raise BrokenSource(f"the string at character {at} has no end on its line")
    return len(text)


def _indentation(text: str, start: int) -> int:
    margin = text[text.rfind("\n", 0, start) + 1 : start]
    return len(margin.expandtabs(8))


@dataclasses.dataclass(frozen=True)
class Body:
    """What of a generated text counts as the function's body, and how many simple statements that holds."""

    text: str
    statements: int


def cut_body(generated: str, indent: int, ended: bool) -> Body:
    """The body of a function whose header is indented by `indent` columns; `generated` goes on below the header.

    * Where a line is indented no further than the header, the function is over: the body is all that stands before it.
    * Where the model ended its text (`ended`), the body is all of it.
    * Otherwise the body is still growing, and it is cut behind the last simple statement (one without a block of its
      own) that has its line break and that does not stand inside a `try` still without `except` or `finally`. Headers
      of blocks without content and decorators without a definition fall away with what follows the cut.

    Raises BrokenSource as `logical_lines` does.
    """
    text = generated if not ended or generated.endswith("\n") else generated + "\n"
    cut = statements = seen = 0
    blocks: list[tuple[int, str]] = []  # indentation and keyword of the headers around the current line
    for line in logical_lines(text):
        if line.indent <= indent:
            return Body(text[: text.rfind("\n", 0, line.start) + 1], seen)
        while blocks and line.indent <= blocks[-1][0]:
            blocks.pop()
        if line.opens:
            blocks.append((line.indent, line.first))
        elif line.finished and text[line.start] != "@":
            seen += 1
            if all(keyword != "try" for _, keyword in blocks):
                cut, statements = line.end, seen
    return Body(text, seen) if ended else Body(text[:cut], statements)


def body_parses(header: str, generated: str, ended: bool) -> bool:
    """Whether a function with this header (whole lines, from `def` on) and the generated body is valid Python.

    The body must hold at least one statement beside those of the header, which may include a docstring.
    """
    margin = header[: len(header) - len(header.lstrip())]
    try:
        body = cut_body(generated, len(margin.expandtabs(8)), ended)
    except BrokenSource:
        return False
    if not body.statements:
        return False
    function = header + body.text
    return parses(f"if True:\n{function}" if margin else function)


def parses(source: str) -> bool:
    """Whether `ast.parse` takes the text."""
    try:
        with warnings.catch_warnings():  # an invalid escape is a warning, not an error
            warnings.simplefilter("ignore")
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
