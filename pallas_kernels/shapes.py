"""Sizes of Qwen3.8-27B, for the tests, the benchmark and the compile check of every kernel.

Matrices that read the same input are one matrix here: their rows are laid one after the other before packing.
"""

from typing import NamedTuple


class Matmul(NamedTuple):
    """A matrix `[n, k]`, one of `layers` that are stacked."""

    name: str
    n: int
    k: int
    layers: int


HIDDEN = 5120
INTERMEDIATE = 17408
VOCABULARY = 248320
DRAFT_VOCABULARY = 40960
LAYERS = 64

MATMULS = (
    Matmul("gate_up", 2 * INTERMEDIATE, HIDDEN, 64),
    Matmul("down", HIDDEN, INTERMEDIATE, 64),
    Matmul("attention_qkv", 2 * 24 * 256 + 2 * 4 * 256, HIDDEN, 16),  # queries and gates, keys, values
    Matmul("linear_qkvz", 2 * 16 * 128 + 2 * 48 * 128, HIDDEN, 48),  # queries, keys, values, gates
    Matmul("mixer_out", HIDDEN, 6144, 64),  # of 24 heads of 256, or 48 of 128
    Matmul("mtp_fc", HIDDEN, 2 * HIDDEN, 1),
    Matmul("lm_head", VOCABULARY, HIDDEN, 1),
    Matmul("draft_head", DRAFT_VOCABULARY, HIDDEN, 1),
)


# Where 8 bits are worth their bytes.
INT8_MATMULS = tuple(shape for shape in MATMULS if shape.name in ("gate_up", "down", "lm_head", "draft_head"))


class Attention(NamedTuple):
    """Grouped-query attention over pages of `page` tokens."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    layers: int


FULL_ATTENTION = Attention("full_attention", 24, 4, 256, 64, 16)
DRAFTER_ATTENTION = Attention("dflash2_attention", 32, 8, 128, 64, 5)
DRAFTER_WINDOW = 2048
CONTEXTS = (1536, 25600, 131072)
PREFILLS = ((512, 8192), (2048, 8192), (2048, 32768), (2048, 131072))  # rows of a chunk, tokens up to its end


class GatedDeltaNet(NamedTuple):
    """Gated DeltaNet: `value_heads / key_heads` value heads share a key head."""

    name: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    layers: int


PREFILL_ROWS = 8192
GATED_DELTA_NET = GatedDeltaNet("gated_delta_net", 16, 48, 128, 128, 4, 48)

VERIFY_ROWS = (1, 8, 16, 32)
BATCH_ROWS = (16, 32)  # where activations of 8 bits pay: long blocks, and many sequences at once
