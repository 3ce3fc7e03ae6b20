"""Tasks have right answers, and conversations render as the chat template renders them."""

import ast
import json
import random
import re

import jinja2.sandbox
import numpy as np
import pytest

from qwen38_jax.training import tasks as tasks_module
from qwen38_jax.training import wordings
from qwen38_jax.training.bpe import chat_template
from qwen38_jax.training.dataset import LineEncoder, held_out_tasks
from qwen38_jax.training.excerpts import (
    Excerpt,
    dedent_like_first_line,
    draw_excerpt,
    misprint,
    random_string,
    random_token_text,
    scramble,
)
from qwen38_jax.training.tasks import (
    EDITED_WEIGHT,
    TASKS,
    Conversation,
    Frame,
    available_tasks,
    make_conversation,
    render_pieces,
)

PLAIN = Frame(below=True, fenced=False, tagged=False, phrase="this text")


def _refuse(message):
    raise jinja2.TemplateError(message)


@pytest.fixture(scope="module")
def template():
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(chat_template())


def _questions(library, task, count=60, tokens=400):
    """(excerpt, question) pairs of a task, shown without a fence."""
    rng, found = random.Random(task), []
    while len(found) < count:
        excerpt = TASKS[task].source(rng, library, tokens)
        question = TASKS[task].ask(rng, library, excerpt, PLAIN)
        if question:
            found.append((excerpt, question))
    return found


# ---- conversations and the template ----


@pytest.mark.parametrize("task", TASKS)
def test_pieces_are_what_the_template_renders(library, template, task):
    rng = random.Random(1)
    for _ in range(25):
        talk = make_conversation(rng, library, task, rng.randint(128, 500))
        pieces = render_pieces(talk)
        assert "".join(s for s, _ in pieces) == template.render(messages=talk.messages) + "<|endoftext|>"
        prompt = template.render(messages=talk.messages[:-1], add_generation_prompt=True, enable_thinking=talk.thinking)
        weights = [weight for _, weight in pieces]
        asked = max(i for i, weight in enumerate(weights[:-1]) if weight == 0)
        assert "".join(s for s, _ in pieces[: asked + 1]) == prompt
        assert weights[0] == weights[-1] == 0 and set(weights) <= {0, 1, EDITED_WEIGHT}


def test_changed_lines_of_a_copy_weigh_more():
    talk = Conversation(
        "rename",
        (
            {"role": "user", "content": "Rename a to b.\n\nx = 1\nz = x\n\na = x\ny = 2"},
            {"role": "assistant", "content": "x = 1\nz = x\n\nb = x\ny = 2", "reasoning_content": "Only a changes."},
        ),
        thinking=True,
    )
    assert render_pieces(talk)[1:-1] == [
        ("Only a changes.\n</think>\n\n", 1),
        ("x = 1\nz = x\n\n", 1),
        ("b = x\ny = 2<|im_end|>", EDITED_WEIGHT),
    ]
    elsewhere = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!\nHow are you?"})
    assert render_pieces(Conversation("small_talk", elsewhere, thinking=False))[1:-1] == [
        ("Hi!\nHow are you?<|im_end|>", 1)
    ]


def test_pieces_tokenise_like_the_whole(library, tokenizer):
    rng, encode = random.Random(2), LineEncoder(tokenizer)
    for task in TASKS:
        for _ in range(10):
            pieces = render_pieces(make_conversation(rng, library, task, rng.randint(128, 500)))
            ids = np.concatenate(encode([s for s, _ in pieces]))
            assert ids.tolist() == tokenizer.encode("".join(s for s, _ in pieces)).ids


@pytest.mark.parametrize(
    "text", ["", "\n", "a\n\n  b\n \n\tc  \n\n", "x)\n\n)\r\n \r\n y", "\n\n  \n q", "\x1c\n\x85 z\u2028\n w"]
)
def test_line_encoder_equals_the_tokenizer(tokenizer, text):
    encode = LineEncoder(tokenizer)
    assert encode([text, text])[1].tolist() == tokenizer.encode(text).ids


def test_template_system_tools_and_calls(template):
    call = {"function": {"name": "look", "arguments": {"path": "a.py", "lines": [1, 2]}}}
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": [{"type": "text", "text": " a"}, {"type": "text", "text": "b "}]},
        {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    text = template.render(
        messages=messages, tools=[{"name": "look"}], add_generation_prompt=True, enable_thinking=False
    )
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert '<tools>\n{"name": "look"}\n</tools>' in text
    assert text.index("</tools>") < text.index("Be brief.<|im_end|>\n<|im_start|>user\nab<|im_end|>\n")
    assert text.endswith(
        "<|im_start|>assistant\n<think>\nI look.\n</think>\n\n<tool_call>\n<function=look>\n"
        "<parameter=path>\na.py\n</parameter>\n<parameter=lines>\n[1, 2]\n</parameter>\n</function>\n"
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    plain = template.render(messages=messages[:2])
    assert plain == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "no messages"),
        ([{"role": "system", "content": "a"}], "no user message"),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "must come first"),
        ([{"role": "user", "content": "a"}, {"role": "pilot", "content": "b"}], "Unknown role: pilot"),
        ([{"role": "user", "content": [{"type": "image"}]}], "reads text only"),
        ([{"role": "user", "content": 3}], "must be a string"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "x"}]}],
            "must be a mapping",
        ),
    ],
)
def test_template_refuses(template, messages, error):
    with pytest.raises(jinja2.TemplateError, match=error):
        template.render(messages=messages)


def test_thinking_shapes_the_prompt(library):
    rng = random.Random(3)
    talks = [make_conversation(rng, library, "small_talk", 128, single_turn=True) for _ in range(200)]
    assert 50 < sum(t.thinking for t in talks) < 110
    for talk in talks:
        assert ("reasoning_content" in talk.messages[-1]) == talk.thinking
        assert len(talk.messages) == 2


def test_conversations_have_varied_turns(library):
    rng = random.Random(4)
    talks = [make_conversation(rng, library, "reproduce", 300) for _ in range(200)]
    roles = ["".join(m["role"][0] for m in t.messages) for t in talks]
    assert {"ua", "sua", "uaua"} <= set(roles)


# ---- right answers ----


def test_rename_changes_every_whole_word_and_nothing_else(library):
    sizes = set()
    for excerpt, question in _questions(library, "rename"):
        names = [w for w in re.findall(r"\w+", question.instruction) if w in excerpt.identifiers]
        words = re.findall(r"\w+", excerpt.text), re.findall(r"\w+", question.answer)
        changed = {(a, b) for a, b in zip(*words, strict=True) if a != b}
        olds, news = ({pair[i] for pair in changed} for i in (0, 1))
        assert len(olds) == len(news) == len(changed)
        assert olds <= set(names) and olds.isdisjoint(words[1]) and news.isdisjoint(words[0])
        sizes.add(len(changed))
        assert re.split(r"\w+", question.answer) == re.split(r"\w+", excerpt.text)
    assert sizes == {1, 2, 3}


def _common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_edit_changes_one_place(library):
    sizes = set()
    for excerpt, question in _questions(library, "edit"):
        before, after = excerpt.text.split("\n"), question.answer.split("\n")
        same = _common_prefix(before, after) + _common_prefix(before[::-1], after[::-1])
        assert max(len(before), len(after)) - same <= 5
        assert before != after
        sizes.add(len(after) - len(before))
    assert {1, 0, -1} <= sizes and min(sizes) < -1


def test_quotes_are_the_lines_asked_for(library):
    for excerpt, question in _questions(library, "quote"):
        span = re.search(r"lines (\d+)( to | through |-)(\d+)", question.instruction)
        lines = excerpt.text.split("\n")
        if span:
            first, last = int(span[1]), int(span[3])
            expected = lines[first - 1 : last]
            if re.search(r"numbers and all|with their|included", question.instruction):
                expected = question.document.split("\n")[first - 1 : last]
                assert all(line.startswith(str(first + i)) for i, line in enumerate(expected))
        else:
            asked = re.search("`(.+)`", question.instruction)[1]
            start = next(i for i, line in enumerate(lines) if line.strip() == asked)
            count = int(re.search(r"(\d+) lines", question.instruction)[1])
            expected = lines[start : start + count]
        assert question.answer == "\n".join(expected)


def test_functions_are_those_that_ast_finds(library):
    checked = 0
    for excerpt, question in _questions(library, "list_functions", 150):
        try:
            tree = ast.parse(excerpt.text)
        except SyntaxError:
            continue
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        names = [n.name for n in sorted(nodes, key=lambda n: n.lineno)]
        assert question.answer.split("\n") == (names or ["There is none."])
        checked += 1
    assert checked > 10


def test_json_answers(library):
    for excerpt, question in _questions(library, "json"):
        records = json.loads(excerpt.text)
        if not question.answer.startswith("["):
            assert len(question.answer.split("\n")) == len(records)
            continue
        answer = json.loads(question.answer)
        values = [list(r.values()) for r in records]
        if len(answer) < len(records):
            assert all(r in records for r in answer)
        else:
            assert all(set(map(repr, a.values())) <= set(map(repr, v)) for a, v in zip(answer, values, strict=True))


def test_copies_continuations_and_needles(library):
    for excerpt, question in _questions(library, "reproduce"):
        assert question.answer == question.document == excerpt.text
    for excerpt, question in _questions(library, "continue"):
        shown, answer = question.document, question.answer
        assert excerpt.text.startswith(shown) and excerpt.text.endswith(answer)
        assert not excerpt.text[len(shown) : -len(answer)].strip()
    for _, question in _questions(library, "needle"):
        assert (question.answer in question.document) != (question.answer in wordings.ABSENT)
    for _, question in _questions(library, "copy_string"):
        assert question.answer.partition("\n")[0] in question.document


def test_a_fenced_document_gets_a_fenced_answer():
    frame = Frame(below=False, fenced=True, tagged=False, phrase="the code above")
    question = tasks_module._reproduce(random.Random(0), None, Excerpt("x = 1", "code"), frame)
    assert frame.show(question.instruction, question.document, "code").startswith("```python\nx = 1\n```\n\n")
    assert question.answer == "```python\nx = 1\n```"


def test_a_task_without_material_says_so(library):
    empty = type(library)(library.documents, library.cumulative, library.words, library.tokens, (), ())
    with pytest.raises(ValueError, match="'fact'"):
        make_conversation(random.Random(0), empty, "fact", 200)
    assert set(TASKS) - set(available_tasks(empty)) == {"fact", "write_function"}
    assert set(available_tasks(library)) == set(TASKS)


# ---- material ----


def test_scrambling_is_consistent(library):
    rng, words, changed = random.Random(5), 0, 0
    for _ in range(20):
        excerpt = draw_excerpt(rng, library, 400, "code")
        scrambled = scramble(rng, library, excerpt)
        pairs = zip(re.findall(r"[A-Za-z_]\w+", excerpt.text), re.findall(r"[A-Za-z_]\w+", scrambled.text), strict=True)
        mapping = {}
        for old, new in pairs:
            assert mapping.setdefault(old, new) == new
        words, changed = words + len(mapping), changed + sum(old != new for old, new in mapping.items())
    assert changed > words / 2


def test_misprints_are_few_and_spare_what_answers_are_made_of(library):
    rng, words, changed = random.Random(5), 0, 0
    for _ in range(40):
        excerpt = draw_excerpt(rng, library, 400, "code")
        printed = misprint(rng, library, excerpt)
        pairs = zip(re.findall(r"[A-Za-z_]\w+", excerpt.text), re.findall(r"[A-Za-z_]\w+", printed.text), strict=True)
        spared = {"def", "class", *(name for name, _ in excerpt.functions)}
        for old, new in pairs:
            assert new == old or old not in spared
            words, changed = words + 1, changed + (old != new)
        assert [name for name, _ in printed.functions] == [name for name, _ in excerpt.functions]
    assert 0.02 * words < changed < 0.2 * words


@pytest.mark.parametrize("name", ["destroy", "set_task_name", "qqe", "_x1", "masks_attname_log2", "HeadMaster"])
def test_a_name_is_split_alike_wherever_it_stands(tokenizer, name):
    alone = tokenizer.encode(name).tokens
    for text in (
        "self.{}(a)",
        "f(x, {}, y)",
        "    {} = 1",
        "# {}.\n",
        "`{}`",
        "({})",
        "not {}\n",
        "\n{}: int",
        "a-{}+b",
    ):
        before = tokenizer.encode(text[: text.index("{")]).tokens
        assert tokenizer.encode(text.format(name)).tokens[len(before) :][: len(alone)] == alone


def test_excerpts_start_at_many_places_and_have_about_the_length(library, tokenizer):
    rng = random.Random(6)
    excerpts = [draw_excerpt(rng, library, 300) for _ in range(100)]
    assert len({e.text[:40] for e in excerpts}) > 70
    sizes = [len(tokenizer.encode(e.text).ids) for e in excerpts]
    assert 180 < np.median(sizes) < 360


def test_dedent():
    method_then_class = "\n    def f():\n\n        pass\n\nclass A:\n    def g():\n        pass\n\n"
    assert dedent_like_first_line(method_then_class) == ("def f():\n\n    pass\n\nclass A:\n    def g():\n        pass")
    assert dedent_like_first_line("a\n  b") == "a\n  b"


def test_random_token_text_has_the_exact_length(library, tokenizer):
    rng = random.Random(7)
    for count in (16, 256):
        assert len(tokenizer.encode(random_token_text(rng, library, tokenizer, count)).ids) == count
    assert len({random_string(rng, library, 64).text for _ in range(20)}) == 20


def test_held_out_tasks_use_held_out_documents_only(corpus, tokenizer):
    drawn = held_out_tasks(corpus, tokenizer, tasks=("reproduce", "small_talk"), per_task=10, seed=1)
    assert drawn == held_out_tasks(corpus, tokenizer, tasks=("reproduce", "small_talk"), per_task=10, seed=1)
    assert [d.task for d in drawn] == ["reproduce"] * 10 + ["small_talk"] * 10
    assert all(d.messages[-1]["role"] == "user" and d.expected for d in drawn)
    train = "\n".join(d.text for d in corpus.train)
    longest = [max(d.expected.split("\n"), key=len) for d in drawn[:10]]
    assert sum(line.strip() in train for line in longest) < 5
