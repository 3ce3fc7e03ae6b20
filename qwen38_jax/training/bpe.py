"""The small checkpoint's tokenizer: Qwen's added strings, 8k byte-level vocabulary, words apart from all else."""

import json
import os
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from qwen38_jax.training.corpus import Document

VOCAB_SIZE = 8192
END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"

# A word is split alike wherever it stands: no space, dot or bracket before it is ever part of its tokens, as it is with
# Qwen's own pattern. Otherwise a name would have to be spelled anew in every place, which a large model learns by heart
# from its text and a small one does not. Signs take the spaces around them, and words their underscores.
SPLIT_REGEX = (
    r"[\p{L}\p{M}_]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}_]+(?:[\r\n]+| ?)|\s*[\r\n]+|[^\S\r\n]+(?=[\p{L}\p{M}\p{N}_])"
    r"|\s+(?!\S)|\s+"
)
# Where a text may be cut without changing its tokens: before a line that is not blank. A token may run over the break
# (or breaks) that end a line, and no further.
LINE_START = re.compile(r"(?<=\n)(?=[^\S\r\n]*\S)")
# Those of the Qwen3.8 tokenizer_config, in the order of their ids.
ADDED_STRINGS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
    "<tts_text_bos_single>", "<|audio_pad|>",
)  # fmt: skip
# Not special: `skip_special_tokens` keeps these in decoded text.
PLAIN_ADDED_STRINGS = frozenset(
    ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    + ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
)


def train_tokenizer(documents: Iterable[Document], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Trains on the documents; the ids from `vocab_size - 33` on are the added strings.

    The same documents in the same order give the same ids.
    Raises ValueError when the text is too small for so many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    learned = vocab_size - len(ADDED_STRINGS)
    trainer = trainers.BpeTrainer(
        vocab_size=learned, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator((d.text for d in documents), trainer)
    if tokenizer.get_vocab_size() != learned:
        raise ValueError(
            f"the text gives only {tokenizer.get_vocab_size()} of {learned} byte-pair tokens: train on more documents"
        )
    for text in ADDED_STRINGS:
        token = AddedToken(text, normalized=False, special=text not in PLAIN_ADDED_STRINGS)
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    return tokenizer


def chat_template() -> str:
    """The Jinja source of the chat template that ships with the small checkpoint."""
    return resources.files("qwen38_jax").joinpath("checkpoints/chat_template.jinja").read_text(encoding="utf-8")


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja, which `transformers` loads as they are.

    `max_length` is the longest sequence, in tokens, that the model is made for.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "pretokenize_regex": SPLIT_REGEX,
    }
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "chat_template.jinja": chat_template(),
    }
    for name, text in files.items():
        temporary = directory / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, directory / name)
