"""Names of Hugging Face `qwen3_5` tensors and the places they have in `Params`.

Inside this package a tensor goes by its canonical name: what the text-only model calls it, without `model.`
(`layers.0.mlp.up_proj.weight`, `lm_head.weight`, `mtp.fc.weight`). Public checkpoints spell the same tensors with
different prefixes; `parse` reads any of them and `spell` writes one.
"""

import dataclasses
import re
from collections.abc import Iterable

import jax

from qwen38_jax.config import ModelConfig
from qwen38_jax.params import ArrayInfo, abstract

# The multimodal save, its older form, the text-only save, and conversions that drop the prefix altogether.
TRUNK_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")

# kind -> (prefixes it is seen under, beginnings of its canonical names)
_SPELLINGS = {
    "trunk": (TRUNK_PREFIXES, ("embed_tokens.", "layers.", "norm.")),
    "head": ((*TRUNK_PREFIXES, "language_model."), ("lm_head.",)),
    "mtp": (("", "model.", "language_model."), ("mtp.",)),
    "native": (("",), ("embed.", "linear.", "full.", "draft_head.")),  # of a prepared checkpoint, see `native`
}
_VISION = re.compile(r"(model\.|language_model\.)*(visual|vision_tower|vision_model|multi_modal_projector)\.")

EMBED = "embed_tokens.weight"
HEAD = "lm_head.weight"
DRAFT_HEAD = "mtp.draft_lm_head.weight"

# Leaf of `Params` -> the tensor that fills it, or those that fill its rows from the first to the last.
_TOP = {"embed": EMBED, "norm": "norm.weight", "lm_head": HEAD}
_LAYER = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "mlp.gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down": "mlp.down_proj.weight",
    "mixer.qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "mixer.o": "self_attn.o_proj.weight",
    "mixer.q_norm": "self_attn.q_norm.weight",
    "mixer.k_norm": "self_attn.k_norm.weight",
    "mixer.qkvz": ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"),
    "mixer.ba": ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
    "mixer.conv": "linear_attn.conv1d.weight",
    "mixer.A_log": "linear_attn.A_log",
    "mixer.dt_bias": "linear_attn.dt_bias",
    "mixer.norm": "linear_attn.norm.weight",
    "mixer.out": "linear_attn.out_proj.weight",
}
_MTP = {
    "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "fc": "mtp.fc.weight",
    "norm": "mtp.norm.weight",
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """Consecutive rows of a leaf and the tensors that fill them.

    Attributes:
      names: canonical names; one for each layer of a stacked leaf, in stacking order.
      shape: of one tensor in the file. A depthwise convolution has the middle axis of a `Conv1d`: [C, 1, W].
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Place:
    """One leaf of `Params` and the tensors that fill it.

    Attributes:
      path: fields from the root, e.g. `linear.mixer.qkvz`.
      info: shape and dtype of the leaf, the layer axis included.
      slices: its rows from the first to the last; one slice, but for a fused leaf.
      stacked: whether `info.shape` begins with the layer axis.
    """

    path: str
    info: ArrayInfo
    slices: tuple[Slice, ...]
    stacked: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names of all tensors."""
        return tuple(name for part in self.slices for name in part.names)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf without the layer axis."""
        return self.info.shape[1:] if self.stacked else self.info.shape


@dataclasses.dataclass(frozen=True)
class ParsedName:
    kind: str  # trunk, head, mtp, native, vision or unknown
    canonical: str
    prefix: str


def places(cfg: ModelConfig) -> list[Place]:
    """Every leaf of `abstract(cfg)`, in the order of `jax.tree.leaves`."""
    result = []
    for path, info in jax.tree_util.tree_leaves_with_path(abstract(cfg)):
        dotted = jax.tree_util.keystr(path, simple=True, separator=".")
        part, _, rest = dotted.partition(".")
        stacked = part in ("linear", "full")
        if stacked:
            tensors, prefixes = _LAYER[rest], [f"layers.{n}." for n in _layer_numbers(cfg, part)]
        elif rest.startswith("layer."):
            tensors, prefixes = _LAYER[rest.removeprefix("layer.")], ["mtp.layers.0."]
        else:
            tensors, prefixes = _MTP[rest] if part == "mtp" else _TOP[part], [""]
        result.append(place(dotted, info, tensors, prefixes, stacked))
    return result


def place(path: str, info: ArrayInfo, tensors: str | tuple[str, ...], prefixes: Iterable[str], stacked: bool) -> Place:
    """A leaf filled by one tensor, or by several from its first row to its last, of each layer (by prefix)."""
    tensors = (tensors,) if isinstance(tensors, str) else tensors
    rows, *columns = info.shape[1:] if stacked else info.shape
    if path.endswith(".conv"):
        columns = [1, *columns]
    slices = tuple(
        Slice(tuple(prefix + tensor for prefix in prefixes), (n, *columns))
        for tensor, n in zip(tensors, info.fused or (rows,), strict=True)
    )
    return Place(path, info, slices, stacked)


def draft_place(cfg: ModelConfig, rows: int) -> Place:
    """The rows of the output head that the MTP head may draft from. They are no part of `abstract(cfg)`."""
    head = abstract(dataclasses.replace(cfg, tie_word_embeddings=False)).lm_head
    shape = (rows, head.shape[1])
    return Place("draft_head", dataclasses.replace(head, shape=shape), (Slice((DRAFT_HEAD,), shape),), stacked=False)


def _layer_numbers(cfg: ModelConfig, part: str) -> list[int]:
    kind = "linear_attention" if part == "linear" else "full_attention"
    return [n for n, layer_type in enumerate(cfg.layer_types) if layer_type == kind]


def parse(name: str) -> ParsedName:
    """What a checkpoint's tensor name means, whichever prefix it is spelled with."""
    if _VISION.match(name):
        return ParsedName("vision", name, "")
    for kind, (prefixes, beginnings) in _SPELLINGS.items():
        for prefix in prefixes:
            if name.startswith(tuple(prefix + beginning for beginning in beginnings)):
                return ParsedName(kind, name[len(prefix) :], prefix)
    return ParsedName("unknown", name, "")


def spell(canonical: str, prefix: str) -> str:
    """The name of a tensor in a checkpoint whose trunk has `prefix`, one of `TRUNK_PREFIXES`."""
    kind = parse(canonical).kind
    if kind == "trunk":
        return prefix + canonical
    if kind == "head" and prefix == "language_model.model.":
        return f"language_model.{canonical}"
    return canonical


def layer_class(parsed: ParsedName) -> str:
    """The class that `inspect` counts a tensor under."""
    if parsed.canonical.startswith("draft_head."):
        return "mtp"
    if parsed.kind not in ("trunk", "native"):
        return parsed.kind
    if parsed.canonical.endswith("norm.weight"):
        return "norms"
    for mark, name in _CLASSES.items():
        if mark in parsed.canonical:
            return name
    return "unknown"


_CLASSES = {
    "embed_tokens.": "embed",
    "embed.": "embed",
    ".mlp.": "mlp",
    ".linear_attn.": "gated_delta_net",
    ".self_attn.": "attention",
    "linear.": "gated_delta_net",
    "full.": "attention",
}
LAYER_CLASSES = ("gated_delta_net", "attention", "mlp", "norms", "embed", "head", "mtp", "vision", "unknown")
