"""Tasks in chat format whose answers are in the prompt, or follow from it by a rule; plus a little small talk.

A task is a source of material (an `Excerpt`) and a function that asks something about it. The frame decides where the
excerpt stands in the user's message, and whether it is fenced; an answer that quotes a fenced document is fenced too.
"""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from qwen38_jax.training import wordings
from qwen38_jax.training.bpe import END_OF_TEXT, LINE_START
from qwen38_jax.training.excerpts import (
    CHARS_PER_TOKEN,
    SCRAMBLED_CHARS_PER_TOKEN,
    Excerpt,
    Library,
    crowded_code,
    draw_excerpt,
    log_uniform,
    misprint,
    new_name,
    random_records,
    random_string,
    scramble,
)

THINKING_SHARE = 0.4
SCRAMBLED_SHARE, MISPRINTED_SHARE = 0.35, 0.35
CROWDED_SHARE = 0.25  # of what is given to rename
BELOW_SHARE, CHANGED_BELOW_SHARE = 0.5, 0.85  # of documents that stand below the instruction
SYSTEM_SHARE = 0.12
SMALL_TALK_FIRST_SHARE = 0.06
FOLLOW_UP_SHARE = 0.15
FRAME_TOKENS = 48  # headers, instruction, thought
EDITED_WEIGHT = 4  # in the loss, of the few lines of a copy that do not follow the original


@dataclass(frozen=True)
class Frame:
    """How an excerpt is shown: below the instruction or above it, fenced or not, and what the instruction calls it."""

    below: bool
    fenced: bool
    tagged: bool
    phrase: str

    def say(self, rng: random.Random, wording: str, **slots) -> str:
        return rng.choice(wordings.INSTRUCTIONS[wording]).format(text=self.phrase, **slots)

    def show(self, instruction: str, document: str, kind: str) -> str:
        if not document:
            return instruction
        if self.fenced:
            document = fence(document, kind)
        elif self.tagged:
            document = f"<document>\n{document}\n</document>"
        return f"{instruction}\n\n{document}" if self.below else f"{document}\n\n{instruction}"

    def answer(self, text: str, kind: str) -> str:
        return fence(text, kind) if self.fenced else text


@dataclass(frozen=True)
class Question:
    """An instruction, what to think about it in one sentence, and the right answer. `document` is what is shown."""

    instruction: str
    thought: str
    answer: str
    document: str = ""


@dataclass(frozen=True)
class Task:
    """`source(rng, library, tokens)` gives material of about so many tokens; `ask` returns None where it does not fit.

    `answer_ratio` is the expected length of the answer in excerpts. `below` is the share of documents that stand below
    the instruction: who knows what to change can mark the places while reading.
    """

    source: Callable[[random.Random, Library, int], Excerpt]
    ask: Callable[[random.Random, Library, Excerpt, Frame], Question | None]
    answer_ratio: float
    below: float = BELOW_SHARE


@dataclass(frozen=True)
class Conversation:
    """Messages as a chat template takes them, the last one the answer to `task`."""

    task: str
    messages: tuple[dict[str, str], ...]
    thinking: bool


def fence(text: str, kind: str) -> str:
    return f"```{wordings.FENCE_LANGUAGES[kind]}\n{text}\n```"


def _think(rng: random.Random, key: str, **slots) -> str:
    return rng.choice(wordings.THOUGHTS[key]).format(**slots)


# ---- copying ----


def _reproduce(rng, library, excerpt, frame):
    answer = frame.answer(excerpt.text, excerpt.kind)
    return Question(frame.say(rng, "reproduce"), _think(rng, "reproduce"), answer, excerpt.text)


def _copy_string(rng, library, excerpt, frame):
    thought, text, how = _think(rng, "copy_string"), excerpt.text, rng.random()
    if how < 0.2:
        labels = rng.sample("ABCDEFGH", rng.randint(2, 4))
        strings = [
            text if i == 0 else random_string(rng, library, max(8, len(text) // 12)).text for i in range(len(labels))
        ]
        strings = [" ".join(s.split("\n")) for s in strings]
        document = "\n".join(f"{label}: {s}" for label, s in sorted(zip(labels, strings, strict=True)))
        return Question(
            frame.say(rng, "copy_labelled", label=labels[0]), thought, frame.answer(strings[0], excerpt.kind), document
        )
    if how < 0.35:
        answer = frame.answer(f"{text}\n{text}", excerpt.kind)
        return Question(frame.say(rng, "copy_string_twice"), thought, answer, text)
    return Question(frame.say(rng, "copy_string"), thought, frame.answer(text, excerpt.kind), text)


def _quote(rng, library, excerpt, frame):
    lines, thought = excerpt.lines, _think(rng, "quote")
    count = min(rng.choice((1, 2, 3, 5, 8, 13, 21, 34)), len(lines))
    first = rng.randrange(len(lines) - count + 1)
    quoted = lines[first : first + count]
    slots = {"first": first + 1, "last": first + count, "count": count, "line": lines[first].strip()}
    how, document = rng.random(), excerpt.text
    if how < 0.5:
        separator = rng.choice((": ", " | ", "\t"))
        numbered = [f"{i}{separator}{line}" for i, line in enumerate(lines, 1)]
        document, wording = "\n".join(numbered), "quote_numbered"
        if how < 0.15:
            wording, quoted = "quote_with_numbers", numbered[first : first + count]
    elif how < 0.65 and first + count <= 16:
        wording = "quote_unnumbered"
    elif slots["line"] and [line.strip() for line in lines].count(slots["line"]) == 1:
        wording = "quote_from"
    else:
        return None
    return Question(frame.say(rng, wording, **slots), thought, frame.answer("\n".join(quoted), excerpt.kind), document)


# ---- changing ----


def _rename(rng, library, excerpt, frame):
    return rename_question(rng, library, excerpt, frame, pairs=rng.choice((1, 1, 1, 1, 2, 2, 3)))


def rename_question(
    rng: random.Random, library: Library, excerpt: Excerpt, frame: Frame, pairs: int = 1
) -> Question | None:
    """Asks for `pairs` identifiers of the excerpt to be renamed; None if it has too few that suit."""
    words = Counter(re.findall(r"\w+", excerpt.text))
    counts = {w: n for w, n in words.items() if w in excerpt.identifiers and (n > 1 or rng.random() < 0.2)}
    # Half of the time the name is drawn by how often it occurs: more places to change.
    weights = list(counts.values()) if rng.random() < 0.5 else [1] * len(counts)
    olds = list(dict.fromkeys(rng.choices(list(counts), weights, k=2 * pairs)))[:pairs] if counts else []
    news = [new_name(rng, library) for _ in olds]
    if len(olds) < pairs or len({*olds, *news}) < 2 * pairs or not words.keys().isdisjoint(news):
        return None
    renamed = dict(zip(olds, news, strict=True))
    text = re.sub(rf"\b({'|'.join(olds)})\b", lambda match: renamed[match[0]], excerpt.text)
    if pairs == 1:
        slots = {"old": olds[0], "new": news[0]}
        instruction, thought = frame.say(rng, "rename", **slots), _think(rng, "rename", **slots)
    else:
        form = rng.choice(("`{}` to `{}`", "{} to {}", "{} -> {}"))
        listed = [form.format(*pair) for pair in renamed.items()]
        slots = {"pairs": ", ".join(listed[:-1]) + rng.choice((" and ", ", ")) + listed[-1]}
        instruction, thought = frame.say(rng, "rename_several", **slots), _think(rng, "rename_several", **slots)
    return Question(instruction, thought, frame.answer(text, excerpt.kind), excerpt.text)


def _edit(rng, library, excerpt, frame):
    lines = excerpt.lines
    counts = Counter(line.strip() for line in lines)
    places = [
        i for i, line in enumerate(lines) if 6 <= len(s := line.strip()) <= 100 and counts[s] == 1 and "`" not in s
    ]
    if len(places) < 2:
        return None
    at = rng.choice(places)
    line, how = lines[at].strip(), rng.choice(("replace", "delete", "delete_range", "insert"))
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    new, count = _changed_line(rng, library, line), min(rng.randint(2, 5), len(lines) - at)
    if new == line or (how == "delete_range" and count < 2):
        return None
    if how == "replace":
        edited = [*lines[:at], indent + new, *lines[at + 1 :]]
    elif how == "insert":
        edited = [*lines[: at + 1], indent + new, *lines[at + 1 :]]
    else:
        edited = [*lines[:at], *lines[at + (count if how == "delete_range" else 1) :]]
    instruction = frame.say(rng, f"edit_{how}", line=line, new=new, count=count, more=count - 1)
    return Question(instruction, _think(rng, "edit"), frame.answer("\n".join(edited), excerpt.kind), excerpt.text)


def _changed_line(rng: random.Random, library: Library, line: str) -> str:
    """The line with some of its words replaced, or a new one."""
    if rng.random() < 0.3:
        return f"{new_name(rng, library)} = {new_name(rng, library)}({rng.randrange(100)})"
    return re.sub(r"[A-Za-z_]\w+", lambda m: m[0] if rng.random() < 0.6 else new_name(rng, library), line) + rng.choice(
        ("", "", "  # " + new_name(rng, library))
    )


def _json(rng, library, excerpt, frame):
    records = json.loads(excerpt.text)
    keys, how = list(records[0]), rng.choice(("pick", "rename", "filter", "lines"))
    key = rng.choice(keys)
    if how == "pick":
        kept = [k for k in keys if k == key or rng.random() < 0.4]
        slots, result = {"keys": ", ".join(kept)}, [{k: r[k] for k in kept} for r in records]
    elif how == "rename":
        new = new_name(rng, library)
        slots, result = {"old": key, "new": new}, [{new if k == key else k: v for k, v in r.items()} for r in records]
    elif how == "filter":
        value = rng.choice(records)[key]
        slots = {"key": key, "value": json.dumps(value)}
        result = [r for r in records if r[key] == value]
    else:
        form = rng.choice(("{0}: {1}", "{0} = {1}", "{0}, {1}", "{1} ({0})"))
        other = rng.choice([k for k in keys if k != key])
        slots = {"form": form.format(key, other)}
        answer = "\n".join(form.format(json.dumps(r[key]), json.dumps(r[other])) for r in records)
    if how != "lines":
        answer = frame.answer("[\n" + ",\n".join("  " + json.dumps(r) for r in result) + "\n]", "json")
    return Question(frame.say(rng, f"json_{how}", **slots), _think(rng, "json"), answer, excerpt.text)


# ---- reading ----


def _continue(rng, library, excerpt, frame):
    lines = excerpt.lines
    count = min(rng.randint(3, 24), len(lines) // 3)
    if count < 2:
        return None
    shown, rest = "\n".join(lines[:-count]).rstrip(), "\n".join(lines[-count:])
    return Question(
        frame.say(rng, "continue", count=count), _think(rng, "continue"), frame.answer(rest, excerpt.kind), shown
    )


def _summarise(rng, library, excerpt, frame):
    thought = _think(rng, "summarise")
    documented = [(name, summary) for name, summary in excerpt.functions if summary]
    if documented:
        name, summary = rng.choice(documented)
        return Question(frame.say(rng, "summarise_function", name=name), thought, summary, excerpt.text)
    if excerpt.kind == "code":
        return None
    paragraph = excerpt.text.partition("\n\n")[0]
    if len(paragraph) < 40:  # a heading
        return None
    if rng.random() < 0.5:
        return Question(frame.say(rng, "summarise_paragraph"), thought, paragraph, excerpt.text)
    sentence = re.match(r".*?[.!?](?=\s|$)", paragraph, re.DOTALL)
    if not sentence:
        return None
    return Question(frame.say(rng, "summarise_sentence"), thought, sentence[0], excerpt.text)


def _list_functions(rng, library, excerpt, frame):
    if excerpt.kind != "code":
        return None
    answer = "\n".join(name for name, _ in excerpt.functions) or "There is none."
    return Question(frame.say(rng, "list_functions"), _think(rng, "list_functions"), answer, excerpt.text)


def _needle(rng, library, excerpt, frame):
    thought, lines = _think(rng, "needle"), list(excerpt.lines)
    names = Counter(name for name, _ in excerpt.functions)
    unique = [name for name, n in names.items() if n == 1]
    if unique and rng.random() < 0.4:
        key = rng.choice(unique)
        answer = next((s for line in lines if re.match(rf"(async )?def {key}\b", s := line.strip())), "")
        return Question(frame.say(rng, "needle_definition", key=key), thought, answer, excerpt.text)
    key = new_name(rng, library)
    if key in excerpt.text:
        return None
    if rng.random() < 0.15:
        return Question(frame.say(rng, "needle_value", key=key), thought, rng.choice(wordings.ABSENT), excerpt.text)
    value = rng.choice((str(rng.randrange(10 ** rng.randint(1, 8))), new_name(rng, library)))
    line = rng.choice(("{0} = {1}", "{0}: {1}", "The value of {0} is {1}.")).format(key, value)
    lines.insert(rng.randrange(1, len(lines) + 1), line)
    wording, answer = ("needle_value", value) if rng.random() < 0.6 else ("needle_line", line)
    return Question(frame.say(rng, wording, key=key), thought, answer, "\n".join(lines))


# ---- without a document ----


def _fact(rng, library, excerpt, frame):
    if not library.topics:
        return None
    title, body = rng.choice(library.topics)
    paragraphs = body.split("\n\n")
    answer = "\n\n".join(paragraphs[: 2 if len(paragraphs[0]) < 80 else 1])
    statement = re.fullmatch(r'The "(\w+)" statement', title)
    if statement and rng.random() < 0.7:
        instruction = frame.say(rng, "fact_statement", word=statement[1])
    else:
        instruction = frame.say(rng, "fact", title=title)
    return Question(instruction, _think(rng, "fact"), answer)


def _write_function(rng, library, excerpt, frame):
    if not library.functions:
        return None
    name, summary, source = rng.choice(library.functions)
    instruction = frame.say(rng, "write_function", name=name, summary=summary)
    return Question(instruction, _think(rng, "write_function"), fence(source, "code"))


def _small_talk(rng, library, excerpt, frame):
    questions, answers = rng.choice(wordings.SMALL_TALK)
    return Question(rng.choice(questions), _think(rng, "chat"), rng.choice(answers))


def _nothing(rng: random.Random, library: Library, tokens: int) -> Excerpt:
    return Excerpt("", "prose")


def _code(rng: random.Random, library: Library, tokens: int) -> Excerpt:
    return draw_excerpt(rng, library, tokens, "code")


def _scrambled(source):
    """The source, misprinted or scrambled in a share of the draws.

    What is scrambled is cut shorter, because made-up words take more tokens.
    """

    def draw(rng: random.Random, library: Library, tokens: int) -> Excerpt:
        how = rng.random()
        if how >= SCRAMBLED_SHARE:
            excerpt = source(rng, library, tokens)
            return misprint(rng, library, excerpt) if how < SCRAMBLED_SHARE + MISPRINTED_SHARE else excerpt
        tokens = int(tokens * SCRAMBLED_CHARS_PER_TOKEN / CHARS_PER_TOKEN["code"])
        return scramble(rng, library, source(rng, library, tokens))

    return draw


def _crowded(source):
    """The source, or lines crowded with similar names in a share of the draws."""

    def draw(rng: random.Random, library: Library, tokens: int) -> Excerpt:
        return (crowded_code if rng.random() < CROWDED_SHARE else source)(rng, library, tokens)

    return draw


def _string(rng: random.Random, library: Library, tokens: int) -> Excerpt:
    return random_string(rng, library, log_uniform(rng, 16, max(16, min(512, tokens))))


TASKS: dict[str, Task] = {
    "reproduce": Task(_scrambled(draw_excerpt), _reproduce, 1.0),
    "copy_string": Task(_string, _copy_string, 1.5),
    "quote": Task(_scrambled(draw_excerpt), _quote, 0.3),
    "rename": Task(_crowded(_scrambled(_code)), _rename, 1.0, CHANGED_BELOW_SHARE),
    "edit": Task(_scrambled(draw_excerpt), _edit, 1.0, CHANGED_BELOW_SHARE),
    "json": Task(random_records, _json, 0.7),
    "continue": Task(draw_excerpt, _continue, 0.0),
    "summarise": Task(draw_excerpt, _summarise, 0.1),
    "list_functions": Task(_code, _list_functions, 0.1),
    "needle": Task(draw_excerpt, _needle, 0.05),
    "fact": Task(_nothing, _fact, 0.0),
    "write_function": Task(_nothing, _write_function, 0.0),
    "small_talk": Task(_nothing, _small_talk, 0.0),
}
# What may be asked next about the same document: short answers, and none where the first question changed it.
FOLLOW_UPS = ("quote", "list_functions", "summarise")
FOLLOWED_UP = ("reproduce", "quote", "summarise", "list_functions", "needle")


def available_tasks(library: Library) -> tuple[str, ...]:
    """The tasks that the library has material for: not every installation ships the reference topics."""
    missing = {"fact": not library.topics, "write_function": not library.functions}
    return tuple(task for task in TASKS if not missing.get(task))


# ---- conversations ----


def make_conversation(
    rng: random.Random, library: Library, task: str, tokens: int, single_turn: bool = False
) -> Conversation:
    """A conversation of about `tokens` tokens around one task, sometimes with a system message and further turns.

    Raises ValueError if no excerpt suits the task (a library without, say, functions).
    """
    excerpt, frame, question = _draw_question(rng, library, task, tokens)
    thinking = rng.random() < THINKING_SHARE
    turns = [(frame.show(question.instruction, question.document, excerpt.kind), question)]
    if not single_turn:
        turns = _more_turns(rng, library, excerpt, turns, task in FOLLOWED_UP)
    messages = []
    if not single_turn and rng.random() < SYSTEM_SHARE:
        messages.append({"role": "system", "content": rng.choice(wordings.SYSTEM_MESSAGES)})
    for user, asked in turns:
        reply = {"role": "assistant", "content": asked.answer}
        if thinking:
            reply["reasoning_content"] = asked.thought
        messages += [{"role": "user", "content": user.strip()}, reply]
    return Conversation(task, tuple(messages), thinking)


def _draw_question(rng, library, task: str, tokens: int) -> tuple[Excerpt, Frame, Question]:
    """Draws until an excerpt suits: some have no name to change, some would give an answer that starts with a space.

    Each try is a little longer than the one before, since some tasks need more lines than the shortest excerpts have.
    """
    shape = TASKS[task]
    shown = (tokens - FRAME_TOKENS) / (1 + shape.answer_ratio)
    for attempt in range(50):
        excerpt = shape.source(rng, library, int(max(24, shown) * 1.05**attempt))
        frame = _draw_frame(rng, excerpt, below=rng.random() < shape.below)
        question = shape.ask(rng, library, excerpt, frame)
        if question and _is_clean(question.answer):
            return excerpt, frame, question
    raise ValueError(f"no document gives a question for the task {task!r} at {tokens} tokens: take more of the corpus")


def _is_clean(answer: str) -> bool:
    """The chat template strips contents, so an answer must be the same stripped."""
    return bool(answer) and answer == answer.strip()


def _draw_frame(rng: random.Random, excerpt: Excerpt, below: bool, again: bool = False) -> Frame:
    phrases = wordings.PHRASES_AGAIN if again else wordings.PHRASES_BELOW if below else wordings.PHRASES_ABOVE
    phrase = rng.choice(phrases).format(noun=rng.choice(wordings.NOUNS[excerpt.kind]))
    fenced = rng.random() < (0.5 if excerpt.kind == "code" else 0.25) and "```" not in excerpt.text
    return Frame(below=below, fenced=fenced, tagged=rng.random() < 0.3, phrase=phrase)


def _more_turns(rng, library, excerpt: Excerpt, turns: list[tuple[str, Question]], follow_up: bool):
    """Adds small talk before the question, or a second question about the same document, in a share of the draws."""
    how, (_, first) = rng.random(), turns[0]
    if how < SMALL_TALK_FIRST_SHARE:
        talk = _small_talk(rng, library, excerpt, None)
        return [(talk.instruction, talk), *turns]
    if how < SMALL_TALK_FIRST_SHARE + FOLLOW_UP_SHARE and follow_up and first.document == excerpt.text:
        frame = _draw_frame(rng, excerpt, below=False, again=True)
        question = TASKS[rng.choice(FOLLOW_UPS)].ask(rng, library, excerpt, frame)
        if question and question.document == excerpt.text and _is_clean(question.answer):
            return [*turns, (question.instruction, question)]
    return turns


def render_pieces(conversation: Conversation) -> list[tuple[str, int]]:
    """The chat template's rendering, cut into (text, loss weight); then the end-of-text token.

    The weight is 0 for what the model does not write. Each piece may be tokenised on its own: no token crosses a
    boundary.
    """
    pieces, prompt, asked = [], "", ""
    for message in conversation.messages:
        role, content = message["role"], message["content"]
        if role != "assistant":
            prompt += f"<|im_start|>{role}\n{content}<|im_end|>\n"
            asked += content + "\n"
            continue
        reasoning = message.get("reasoning_content", "")
        prompt += "<|im_start|>assistant\n<think>\n" + ("" if reasoning else "\n</think>\n\n")
        pieces.append((prompt, 0))
        if reasoning:
            pieces.append((f"{reasoning}\n</think>\n\n", 1))
        pieces += _weigh_lines(content, asked)
        pieces[-1] = (f"{pieces[-1][0]}<|im_end|>", pieces[-1][1])
        prompt = "\n"
    return [*pieces, (prompt + END_OF_TEXT, 0)]


def _weigh_lines(answer: str, asked: str) -> list[tuple[str, int]]:
    """Cuts an answer that is mostly a copy around the lines that do not follow the line before as they did.

    Those are the lines that were changed or inserted, and the first one after a change or after lines left out.
    """
    before = [line.rstrip("\n") for line in LINE_START.split(asked)]
    known, followed = set(before), set(itertools.pairwise(before))
    pieces = LINE_START.split(answer)
    lines = [piece.rstrip("\n") for piece in pieces]
    changed = [lines[0] not in known, *(pair not in followed for pair in itertools.pairwise(lines))]
    if 2 * sum(changed) > len(lines):
        return [(answer, 1)]
    runs = itertools.groupby(zip(pieces, changed, strict=True), key=lambda pair: pair[1])
    return [("".join(piece for piece, _ in run), EDITED_WEIGHT if new else 1) for new, run in runs]
