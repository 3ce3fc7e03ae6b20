"""Text and token ids: byte-level BPE, the checkpoint's chat template, streaming decoding. Imports no jax.

Special tokens and text of unknown origin. A prompt may hold `<|im_end|>` or `<tool_call>` because the chat
template wrote a turn boundary, or because a user, a tool or a web page wrote those characters. Only the
former may become the special token. Content is not altered to tell them apart: a template sees what the
caller passed, and its own logic (`content.startswith('<tool_response>')`) works on that. Instead the
template's literals are marked: before compilation every special string in a literal that the template
prints gets MARK in front, and in the rendered text a special string counts if and only if it has the mark.
One that arises across a seam (two text parts; a tool named `f><tool_call`) has none either.
"""

import codecs
import datetime
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A lone surrogate: Python strings can carry it, valid text never holds it, so no content can forge it.
MARK = "\ud800"


class TokenizerError(ValueError):
    """The tokenizer files of a checkpoint are missing, corrupt, or not those of a byte-level BPE."""


class ChatError(ValueError):
    """Messages that the chat template refuses or cannot render, or a template that is missing or broken."""


class Tokenizer:
    """Byte-level BPE with added tokens, and the chat template that belongs to it.

    Attributes:
        vocab_size: one more than the largest id that stands for text (248,077 for Qwen3.8). The model's own
            vocabulary may be padded beyond it; those ids decode to nothing.
        added_ids: the id of every added token, by its text.
        special_ids: the ids flagged special, which decoding skips by default. `<think>` and `<tool_call>` are
            added tokens but not special in Qwen3.8, so they stay visible.
    """

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: str | None = None, name: str = "tokenizer"):
        """`name` is what errors call this tokenizer, for instance its file.

        Raises TokenizerError if the vocabulary is empty or not byte-level, or if an added token does not
        encode to itself.
        """
        # Settings that training left in the file; either would alter prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self._name = name
        self._backend = backend
        self._plain = _without_added_tokens(backend)
        self._template_source = chat_template
        added = backend.get_added_tokens_decoder()
        self.added_ids = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._pieces = _piece_bytes(backend)
        self.vocab_size = len(self._pieces)
        self._check()

    @classmethod
    def from_directory(cls, directory: str | Path) -> Self:
        """Reads a checkpoint's tokenizer.json and, where there is one, its chat template.

        The template comes from chat_template.jinja, else from "chat_template" in tokenizer_config.json.
        Raises TokenizerError naming the file that is missing or corrupt.
        """
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{path} is missing; copy tokenizer.json, tokenizer_config.json and chat_template.jinja "
                "from the checkpoint that the model was made from"
            )
        text = _read_text(path)
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # The library raises nothing more specific.
            raise TokenizerError(f"{path} is corrupt ({error}); copy it again from the checkpoint") from error
        return cls(backend, _read_chat_template(path.parent), str(path))

    def _check(self) -> None:
        if not self._pieces:
            raise TokenizerError(f"{self._name} holds no vocabulary; copy it again from the checkpoint")
        if not isinstance(self._backend.decoder, tokenizers.decoders.ByteLevel):
            raise TokenizerError(
                f"{self._name} decodes with {self._backend.decoder}, but only byte-level BPE is supported"
            )
        for content, token_id in self.added_ids.items():
            ids = self.encode(content, parse_special=True)
            if ids != [token_id]:
                raise TokenizerError(
                    f"{self._name} is not consistent: the added token {content!r} has id {token_id} "
                    f"but encodes to {ids}; copy it again from the checkpoint"
                )

    def token_to_id(self, token: str) -> int | None:
        """The id of an added token such as `<|im_end|>` or of a BPE piece, None if there is no such token."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Token ids of `text`, with no BOS or EOS.

        With `parse_special` the strings of added tokens become those tokens; without, they are text like any
        other. Raises ValueError if the text holds a lone surrogate.
        """
        _require_unicode(text, "the text")
        backend = self._backend if parse_special else self._plain
        return backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. Raises ValueError for a negative id."""
        hidden = self.special_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in hidden)
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for: none for an id in the padded tail. ValueError for a negative id."""
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative; drop padding before decoding")
        return self._pieces[token_id] if token_id < self.vocab_size else b""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The conversation as the checkpoint's template writes it.

        `messages` and `tools` have OpenAI's form; tool-call arguments may be JSON strings, as OpenAI sends
        them. `template_kwargs` are variables of the template: for Qwen3.8 `reasoning_effort` ("xhigh",
        "medium", "low"), `preserve_thinking`, `add_vision_id`.
        Raises ChatError with the template's own message if it refuses the conversation, or naming the message
        that is malformed; ValueError if a string holds a lone surrogate.
        """
        variables = _chat_variables(messages, add_generation_prompt, enable_thinking, tools, template_kwargs)
        return _render(self._template, variables)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        parse_special: bool = False,
        add_generation_prompt: bool = True,
        enable_thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of `render_chat(...)`, in which only the template can write special tokens.

        Wherever the caller's strings (content, reasoning, tool results, arguments, tool definitions) spell a
        special token, they are encoded as ordinary text. `parse_special` gives up that distinction and
        equals `encode(render_chat(...), parse_special=True)`. Raises what `render_chat` does.
        """
        variables = _chat_variables(messages, add_generation_prompt, enable_thinking, tools, template_kwargs)
        if parse_special:
            return self.encode(_render(self._template, variables), parse_special=True)
        return self._encode_marked(_render(self._marked_template, variables))

    def _encode_marked(self, marked: str) -> list[int]:
        ids = []
        # Splitting at a group alternates: text, special string, text, ...
        for index, piece in enumerate(re.split(MARK + self._special_pattern, marked)):
            if index % 2:
                ids.append(self.added_ids[piece])
            elif text := piece.replace(MARK, ""):
                ids += self.encode(text, parse_special=False)
        return ids

    @functools.cached_property
    def _special_pattern(self) -> str:
        # Longest first, as the library prefers it too; without added tokens a pattern that never matches.
        longest_first = sorted(self.added_ids, key=len, reverse=True)
        return "(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")"

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        return self._compile(mark=False)

    @functools.cached_property
    def _marked_template(self) -> jinja2.Template:
        """The template with marks, after a check that they find every special token of harmless chats."""
        template = self._compile(mark=True)
        for messages, tools in _HARMLESS_CHATS:
            variables = _chat_variables(messages, True, True, tools, {})
            try:
                expected = self.encode(_render(self._template, variables), parse_special=True)
            except ChatError:  # A template may know fewer roles than these.
                continue
            if self._encode_marked(_render(template, variables)) != expected:
                raise ChatError(
                    f"the chat template of {self._name} assembles special tokens from pieces, so they cannot be "
                    "told from the same characters in a message; pass parse_special=True for trusted messages"
                )
        return template

    def _compile(self, mark: bool) -> jinja2.Template:
        if self._template_source is None:
            raise ChatError(
                f"{self._name} has no chat template beside it; "
                "copy chat_template.jinja from the checkpoint that the model was made from"
            )
        environment = _environment()
        try:
            tree = environment.parse(self._template_source)
            if mark:
                _mark_literals(tree, re.compile(self._special_pattern))
            code = environment.compile(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(
                f"the chat template of {self._name} is broken at line {error.lineno}: {error.message}"
            ) from error
        return jinja2.Template.from_code(environment, code, environment.make_globals(None))


class Detokenizer:
    """Turns a stream of ids into text piece by piece; the pieces add up to `tokenizer.decode(ids)`.

    A character whose UTF-8 bytes are spread over tokens is held back until it is complete, or until it is
    certain that it never will be and U+FFFD stands for it. Work per token is proportional to its own length.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, often "". Raises ValueError for a negative id."""
        if token_id in self._hidden:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is still held back (U+FFFD for a broken character); the stream may then start anew."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def _without_added_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same BPE model, normaliser and splitting (shared, not copied), blind to added tokens.

    The library can switch off parsing per tokenizer only for tokens flagged special, and `<think>` is not.
    """
    plain = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    return plain


def _piece_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """Table from id to the bytes that the token stands for; ids that the vocabulary leaves out get b""."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (1 + max(vocabulary.values(), default=-1))
    byte_of = _byte_alphabet()
    for piece, token_id in vocabulary.items():
        try:
            table[token_id] = bytes(map(byte_of.__getitem__, piece))
        except KeyError:  # An added token that is not spelled in the byte alphabet is the text itself.
            table[token_id] = piece.encode()
    return table


def _byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level BPE spells bytes: printable ones as they are, the rest from U+0100.

    Source: the byte encoder of GPT-2, which every byte-level BPE since has kept.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = sorted(set(range(0x100)).difference(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is corrupt ({error}); copy it again from the checkpoint") from error


def _read_chat_template(directory: Path) -> str | None:
    """chat_template.jinja, else chat_template (of several: "default") in tokenizer_config.json, else None."""
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        return _read_text(jinja)
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        template = json.loads(_read_text(path)).get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise TokenizerError(f"{path} is corrupt ({error!r}); copy it again from the checkpoint") from error
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{path}: chat_template must be a string or a list of named templates")
    return template


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja with the conventions of transformers, sandboxed because templates are downloaded programs."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change tool definitions.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


_FUNCTION = {"function": {"name": "f", "arguments": {"x": 1}}}
_HARMLESS_CHATS = (
    ([{"role": "user", "content": "a"}], None),
    (
        [
            {"role": "system", "content": "a"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "a", "reasoning_content": "a", "tool_calls": [_FUNCTION]},
            {"role": "tool", "content": "a"},
            {"role": "user", "content": "a"},
        ],
        [_FUNCTION],
    ),
)

# For each kind of node whose value is printed, the children whose values are printed with it. Others, such as
# the arguments of a call or the sides of a comparison, only decide.
_PRINTED_CHILDREN = {
    nodes.Output: ("nodes",),
    nodes.Assign: ("node",),
    nodes.Concat: ("nodes",),
    nodes.Add: ("left", "right"),
    nodes.And: ("left", "right"),
    nodes.Or: ("left", "right"),
    nodes.CondExpr: ("expr1", "expr2"),
    nodes.Filter: ("node",),
}


def _mark_literals(tree: nodes.Template, specials: re.Pattern[str]) -> None:
    """Puts MARK before each special string in the literals that the template prints or assigns; in place."""

    def mark(node: nodes.Node) -> None:
        if isinstance(node, nodes.TemplateData):
            node.data = specials.sub(MARK + r"\1", node.data)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            node.value = specials.sub(MARK + r"\1", node.value)
        for child in node.iter_child_nodes(only=_PRINTED_CHILDREN.get(type(node), ())):
            mark(child)

    for statement in list(tree.find_all((nodes.Output, nodes.Assign))):
        mark(statement)


# What Jinja lets through from the operations of a template on values that it did not expect.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def _render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    try:
        return template.render(variables)
    except _TEMPLATE_FAILURES as error:
        raise ChatError(str(error)) from error


def _chat_variables(
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    enable_thinking: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """The template's variables, after the checks that a template does not make; the caller's objects stay."""
    if not isinstance(enable_thinking, bool):
        raise ChatError(f"enable_thinking must be true or false, not {enable_thinking!r}")
    if not _is_list_of_mappings(messages):
        raise ChatError("messages must be a list of objects with a role and a content")
    if tools is not None and not _is_list_of_mappings(tools):
        raise ChatError("tools must be a list of objects that define functions, or absent")
    prepared = [_prepare_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    for name, values in (("messages", prepared), ("tools", tools or ())):
        for index, value in enumerate(values):
            for text in _strings(value):
                _require_unicode(text, f"{name}[{index}]")
    for name, value in template_kwargs.items():
        for text in _strings(value):
            _require_unicode(text, name)
    return {
        **template_kwargs,
        "messages": prepared,
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        "enable_thinking": enable_thinking,
    }


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)


def _prepare_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A copy whose tool-call arguments are mappings."""
    if not isinstance(message.get("role"), str):
        raise ChatError(f"{where} has no role; give it one of system, user, assistant, tool")
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    if not _is_list_of_mappings(calls):
        raise ChatError(f"{where}.tool_calls must be a list of objects")
    prepared = []
    for index, call in enumerate(calls):
        place = f"{where}.tool_calls[{index}]"
        if "function" in call:
            prepared.append({**call, "function": _prepare_function(call["function"], place)})
        else:
            prepared.append(_prepare_function(call, place))
    return {**message, "tool_calls": prepared}


def _prepare_function(function: Any, where: str) -> dict[str, Any]:
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(f"{where} has no function name")
    if "arguments" not in function:
        return dict(function)
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ChatError(f"{where}: the arguments are not valid JSON ({error})") from error
    if not isinstance(arguments, Mapping):
        raise ChatError(f"{where}: the arguments must be a JSON object, not {type(arguments).__name__}")
    return {**function, "arguments": arguments}


def _strings(value: Any) -> Iterator[str]:
    """Every string inside nested lists and mappings, keys included, however deeply nested."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            pending.extend(value.keys())
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)


def _require_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, "
            "which is not valid Unicode; decode the input as UTF-8 or replace it"
        ) from None
