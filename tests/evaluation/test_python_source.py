"""Where a generated body ends and is cut, and that the cut hides no error."""

import ast
import inspect
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen38_jax.evaluation import python_source
from qwen38_jax.evaluation.python_source import BrokenSource, body_parses, cut_body, logical_lines

HEADER = "def f(x):\n"


@pytest.mark.parametrize(
    ("generated", "body"),
    [
        ("    a = 1\n    b = 2\n    c =", "    a = 1\n    b = 2\n"),
        ("    a = 1\n    b = 2", "    a = 1\n"),  # the second may go on
        ("    a = 1\n\n    # b\n", "    a = 1\n"),
        ("    a = f(1,\n  2)\n    b = g(1,\n", "    a = f(1,\n  2)\n"),
        ('    a = """\nx = (\n"""\n    b = """\n  y', '    a = """\nx = (\n"""\n'),
        ("    a = 1 + \\\n2\n    b = 1 + \\\n", "    a = 1 + \\\n2\n"),
        ("    a = '#('  # ]\n    b = \"it's\"\n    c", "    a = '#('  # ]\n    b = \"it's\"\n"),
        ("    if a:\n        b\n    else:\n", "    if a:\n        b\n"),
        ("    if a:\n        b\n        if c:\n            while d:\n", "    if a:\n        b\n"),
        ("    a = 1\n    try:\n        b = 2\n", "    a = 1\n"),  # no except yet
        ("    try:\n        b\n    except E:\n        c\n        d", "    try:\n        b\n    except E:\n        c\n"),
        ("    try:\n        b\n    finally:\n        c\n", "    try:\n        b\n    finally:\n        c\n"),
        ("    a\n    @b\n    @c(1)\n", "    a\n"),
        ("    a\n    @b\n    def c():\n        d\n", "    a\n    @b\n    def c():\n        d\n"),
        ("    x: int = 1\n    y: int", "    x: int = 1\n"),
        ("    f = lambda: 0\n    d = {1:\n", "    f = lambda: 0\n"),
        ("    if a: b\n    if c:", "    if a: b\n"),
        ("\ta = 1\n\tb = (", "\ta = 1\n"),
    ],
)
def test_a_growing_body_is_cut_behind_its_last_complete_statement(generated, body):
    assert cut_body(generated, 0, ended=False).text == body
    assert body_parses(HEADER, generated, ended=False)


@pytest.mark.parametrize(
    ("indent", "body", "rest"),
    [
        (0, "    a = 1\n    return a\n\n\n", "def g():\n    pass\n"),
        (0, "    if a:\n        b\n\n", "x"),  # the first word of the next thing is enough
        (4, "        a = 1\n\n", "    def g(self):\n"),
        (4, "        a = '''\nno dedent\n'''\n", "class C:"),
        (4, "        a = (1,\n2)\n", "    @property"),
        (0, "    a\n# at the margin\n    b\n", "c"),
        (8, "\t\ta = 1\n", "\tb = 2\n"),
    ],
)
def test_a_dedented_line_ends_the_body(indent, body, rest):
    found = cut_body(body + rest, indent, ended=False)
    assert found.text == body
    assert found.statements >= 1


def test_where_the_model_ended_nothing_is_cut():
    assert cut_body("    a\n    b", 0, ended=True).text == "    a\n    b\n"
    assert not body_parses(HEADER, "    a\n    b = (1,", ended=True)
    assert not body_parses(HEADER, "    a\n    if b:\n", ended=True)


@pytest.mark.parametrize(
    "generated",
    [
        "",
        "\n\n",
        "    # only a comment\n",
        "    if a:\n",
        "    x = (1,\n    2,\n",  # nothing complete
        "a = 1\n",  # no body at all
        "    a = 1\n    b = 'open\n    c = 2\n",
        "    a = 1\n    b = (1]\n    c = 2\n",
        "    a = 1)\n    b = 2\n",
        "    a = 1\n    b = f(c,\n    return b\n    d = 2\n",  # swallowed by a bracket that will never close
        "    a b\n    c = 2\n",
        "    a = 1\n      b = 2\n    c = 3\n",
        "    a = 1\n  b = 2\n    c = 3\n",
        "    if a:\n    b = 1\n    c = 2\n",
        "    try:\n        a\n    b = 1\n    c = 2\n",
        "    a = 1\n    else:\n        b\n    c\n",
        "    if a\n        b\n    c = 1\n",
        "    @a\n    b = 1\n    c = 2\n",
        "        a = 1\n    b = 2\n",
        "    a = 1\n    if b:\n\ndef g():\n    pass\n",  # over, with a block that has no content
        "    a = 1\n    try:\n        b = 2\n\nc = 3\n",
    ],
)
def test_errors_are_not_cut_away(generated):
    assert not body_parses(HEADER, generated, ended=False)


def test_methods_parse_where_they_stand():
    header = '    def f(self,\n          x):\n        """Says (\n"""\n\n'
    assert body_parses(header, "        return x\n\n    def", ended=False)
    assert not body_parses(header, "    def g(self):\n", ended=False)


@pytest.mark.parametrize("text", ["a)", "(]", "'a\n", '"a\\"\n', "(return)", "[\nimport os\n"])
def test_broken(text):
    with pytest.raises(BrokenSource):
        list(logical_lines(text))


def test_strings():
    text = "a = rb'\\'' + f\"{x}\" + u'''\n'\n''' + bar\nb\n"
    assert [text[line.start : line.end] for line in logical_lines(text)] == [text[:-2], "b\n"]


def test_logical_lines_are_those_of_the_parser():
    """Statements of this package's own sources begin where `ast` says they do."""
    for module in (python_source, inspect, textwrap, ast):
        source = inspect.getsource(module)
        found = {source.count("\n", 0, line.start) + 1 for line in logical_lines(source)}
        nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.stmt)]
        assert {n.lineno for n in nodes} <= found
        assert found <= {n.lineno for n in nodes} | _clause_lines(source)


def _clause_lines(source):
    words = ("else", "elif", "except", "finally", "case", "@")
    return {i for i, line in enumerate(source.split("\n"), 1) if line.lstrip().startswith(words)}


@settings(deadline=None)
@given(st.integers(1, 400))
def test_any_beginning_of_valid_source_parses(length):
    """Cut anywhere, real code is never counted as broken once it holds a complete statement."""
    header, _, body = inspect.getsource(python_source.cut_body).partition('    """')
    docstring, _, body = body.partition('"""\n')
    body = body[:length]
    if cut_body(body, 0, ended=False).statements:
        assert body_parses(f'{header}    """{docstring}"""\n', body, ended=False)
