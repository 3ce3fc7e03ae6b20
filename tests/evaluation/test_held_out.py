"""What is asked about held-out documents: sizes, right answers, where modules are cut."""

import ast
import random
import re
from pathlib import Path

import pytest

from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.evaluation.exam import QUICK, draw_exam, expected_ids, jobs
from qwen38_jax.evaluation.held_out import (
    documents_hash,
    documents_of,
    draw_documents,
    excerpts,
    function_starts,
    line_sizes,
    plain_starts,
    renamings,
    spread,
    string_copies,
    token_sizes,
)
from qwen38_jax.tokenizer import Tokenizer
from qwen38_jax.training.corpus import Document, load_corpus
from qwen38_jax.training.dataset import LineEncoder, load_tokenizer
from qwen38_jax.training.excerpts import make_library


@pytest.fixture(scope="module")
def documents():
    return load_corpus(max_code_bytes=1_000_000).train[::3]


@pytest.fixture(scope="module")
def backend():
    return load_tokenizer(SHIPPED_CHECKPOINT)


@pytest.fixture(scope="module")
def encode(backend):
    return LineEncoder(backend)


def count(backend, text):
    return len(backend.encode(text).ids)


def test_excerpts_are_whole_lines_of_the_wanted_size():
    text = "\n".join(["a", "", "b", "  c", "", "  d", "e", "", "f", "g", "h", "i", "j"])
    document = Document("code:x", "code", text)
    found = [e.text for e in excerpts(document, line_sizes(document), 3, 4)]
    # "f" begins the next paragraph; "e" does not begin one, "  d" is indented, and "j" would be too short.
    assert found == ["a\n\nb\n  c", "f\ng\nh\ni"]
    [whole] = excerpts(document, line_sizes(document), 13, 13)
    assert whole.whole and whole.text == text
    assert excerpts(document, line_sizes(document), 14, 20) == []


def test_documents_have_the_asked_number_of_tokens(documents, backend, encode):
    chosen = draw_documents(documents, encode, 9, 900, 1100, random.Random(0))
    assert [e.document.kind for e in chosen] == ["prose"] * 3 + ["code"] * 6
    for excerpt in chosen:
        assert 890 <= count(backend, excerpt.text) <= 1100  # a line break at the end fewer
        assert excerpt.text in excerpt.document.text
    assert len({e.document.name for e in chosen}) == 9  # a document is not taken twice while there are others


def test_token_sizes_add_up(documents, backend, encode):
    for document in documents[:8]:
        assert sum(token_sizes(document, encode)) == count(backend, document.text + "\n")


def test_spread_goes_round():
    rng = random.Random(1)
    found = spread([[1, 2, 3], [10], [20, 21]], 5, rng)
    assert sorted(found[:3]) == [1, 10, 20] and sorted(found[3:]) == [2, 21]
    assert spread([], 3, rng) == [] == spread([[1]], 0, rng)


def test_renamings(documents, backend):
    questions = renamings(documents, make_library(documents, backend), 12, random.Random(0))
    assert len(questions) >= 10
    for q in questions:
        instruction, _, text = q.message.partition("\n\n")
        assert f"`{q.old}` to `{q.new}`" in instruction
        assert 90 <= text.count("\n") + 1 <= 110
        words = re.findall(r"\w+", text)
        assert words.count(q.old) >= 2 and q.new not in words
        answer = re.findall(r"\w+", q.expected)
        assert answer == [q.new if w == q.old else w for w in words]
        assert re.sub(r"\w", "", q.expected) == re.sub(r"\w", "", text)


def test_string_copies(documents, backend):
    for q in string_copies(make_library(documents, backend), backend, 3, 256, random.Random(0)):
        assert count(backend, q.expected) == 256 and q.message.endswith(q.expected)


def test_function_starts(documents, backend, encode):
    starts = function_starts(documents, encode, 40, 500, random.Random(0))
    texts = {d.text for d in documents}
    assert len(starts) == 40
    for start in starts:
        assert count(backend, start.prompt) <= 500 and start.prompt.endswith(start.header)
        assert any(text.startswith(start.prompt) for text in texts)
        body = start.header[: len(start.header) - len(start.header.lstrip())] + "    pass\n"
        margin = start.header[0].isspace()
        [function] = (
            ast.parse(("if True:\n" if margin else "") + start.header + body).body[0].body
            if margin
            else (ast.parse(start.header + body).body)
        )
        assert len(function.body) - (ast.get_docstring(function, clean=False) is not None) == 1


def test_a_function_start_has_its_docstring_and_no_statement(encode):
    text = (
        "class C:\n    @property\n    def f(\n        self,\n    ):\n        '''Says.\n\n        More.'''\n\n"
        "        @g\n        def h(): return 1\n\n    def only(self):\n        'doc'\n\n"
        "    def commented(self):\n        # why\n        return 2\n\n    async def k(self):\n        return 3"
    )
    starts = function_starts([Document("code:x", "code", text)], encode, 9, 500, random.Random(0))
    headers = sorted(s.header for s in starts)
    assert headers == [
        "    async def k(self):\n",
        "    def f(\n        self,\n    ):\n        '''Says.\n\n        More.'''\n\n",
    ]


def test_plain_starts(documents, backend, encode):
    for text in plain_starts(documents, encode, "prose", 200):
        assert text.endswith("\n") and count(backend, text) <= 201


def test_only_what_the_training_run_held_out_is_asked_about(documents):
    groups = {documents[0].group, "no/such/file.py"}
    assert {d.group for d in documents_of(documents, groups)} == {documents[0].group}
    assert documents_of(documents, None) == list(documents)
    with pytest.raises(ValueError, match="held out none"):
        documents_of(documents, {"other.py"})
    assert documents_hash(documents) != documents_hash(documents[1:])


def test_an_exam_is_the_same_every_time(documents, backend):
    documents = documents[:60]
    exam = draw_exam(documents, backend, QUICK, seed=3)
    assert exam == draw_exam(documents, backend, QUICK, seed=3) != draw_exam(documents, backend, QUICK, seed=4)
    tokenizer = Tokenizer.from_directory(Path(SHIPPED_CHECKPOINT))
    asked = jobs(exam, tokenizer, QUICK)
    sizes = {"reproduce_2k": 1, "reproduce_6k": 0, "rename": 2, "copy_256": 4, "code": 12, "prose": 4}
    assert {name: len(of) for name, of in asked.items()} == {**sizes, "chat": len(exam.chats)}
    [job], [question] = asked["reproduce_2k"], exam.questions["reproduce_2k"]
    assert job.max_new_tokens > len(expected_ids(tokenizer, question.expected)) > 1890
    assert question.expected in tokenizer.decode(job.prompt)
