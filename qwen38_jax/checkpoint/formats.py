"""How a checkpoint stores one weight: told by which tensors exist and by their shapes, not by config.json's claims.

    kind    tensors                                                             of X.weight [N, K]
    dense   weight                                                              [N, K] floats
    fp8     weight F8_E4M3, weight_scale_inv                                    [N, K]; a scale for each 128 x 128 block
    packed  weight_packed, weight_scale, optional weight_shape,                 compressed-tensors "pack-quantized"
            weight_zero_point, weight_g_idx
    gptq    qweight [K/8, N], qzeros, scales, optional g_idx and bias (all 0)   AutoGPTQ, GPTQModel, AutoRound
    awq     qweight [K, N/8], qzeros, scales                                    AutoAWQ, 4 bits
    native  codes, scales, optional zeros, group_of                             fields of a `QuantTensor`, see `native`

Groups are the same number of columns each, a power of two or a whole row: with that the shape of the scales alone tells
the group size, and a group size that does not divide K is always seen.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from qwen38_jax.checkpoint.files import DTYPES, TensorInfo
from qwen38_jax.checkpoint.native import KEY, Native, Spec, leaf_of

FLOATS = ("BF16", "F16", "F32")
FP8_BLOCK = 128

_PARTS = {
    "packed": (("weight_packed", "weight_scale"), ("weight_shape", "weight_zero_point", "weight_g_idx")),
    "gptq": (("qweight", "qzeros", "scales"), ("g_idx", "bias")),
    "awq": (("qweight", "qzeros", "scales"), ()),
    "native": (("codes", "scales"), ("zeros", "group_of")),
    "fp8": (("weight", "weight_scale_inv"), ()),
    "dense": (("weight",), ()),
}
_NAMES = {"packed": "compressed-tensors", "gptq": "GPTQ", "awq": "AWQ"}

# Parts of formats that are recognised and not read.
_FOREIGN = {
    "weight_global_scale": "NVFP4",
    "weight_scale_2": "NVFP4",
    "trellis": "EXL3",
    "weight_scale": "a scaled weight of another format",
}
_COMPANIONS = ("input_scale", "input_global_scale", "suh", "svh", "mcg", "mul1")
PARTS = {part for required, optional in _PARTS.values() for part in (*required, *optional)}
PARTS |= {*_FOREIGN, *_COMPANIONS}


@dataclasses.dataclass(frozen=True)
class Declared:
    """What config.json says that tensors do not tell: of GPTQ's zero points, and of a prepared checkpoint's layouts.

    Attributes:
      zeros: `gptq` (stored less 1), `gptq_v2` (stored as they are), or None when nothing is said.
      symmetric: None when nothing is said.
      native: of a prepared checkpoint, how each leaf is quantised; empty for any other.
    """

    zeros: str | None
    symmetric: bool | None
    native: Mapping[str, Spec] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> "Declared":
        native = Native.from_hf(hf_config)
        if native is not None:
            return cls(None, None, native.weights)
        declared = hf_config.get("quantization_config")
        if not isinstance(declared, Mapping):
            return cls(None, None)
        said = declared.get("checkpoint_format") or declared.get("packing_format")
        known = {"gptq": "gptq", "gptq_v2": "gptq_v2", "auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq"}
        symmetric = declared.get("sym")
        return cls(
            known.get(said) if isinstance(said, str) else None, symmetric if symmetric in (True, False) else None
        )


@dataclasses.dataclass(frozen=True)
class Stored:
    """One weight as it is stored.

    Attributes:
      weight: canonical name.
      kind: of the table above.
      parts: its tensors by the last part of their names.
      shape: of the weight in the file.
      bits, group: of integers; 0 and 0 for floats, which includes FP8.
      declared: see there.
      spec: what config.json says of it, in a prepared checkpoint; None for any other, and for floats.
    """

    weight: str
    kind: str
    parts: Mapping[str, TensorInfo]
    shape: tuple[int, ...]
    bits: int
    group: int
    declared: Declared
    spec: Spec | None = None

    @property
    def layout(self) -> str:
        """Key of `quantization.LAYOUTS`."""
        return self.spec.layout if self.spec else "rows"

    @property
    def main(self) -> TensorInfo:
        """The tensor with the weight's values or codes."""
        return self.parts[_PARTS[self.kind][0][0]]

    @property
    def label(self) -> str:
        """The format in words, e.g. `int4 group 128 (GPTQ)` or `bf16`."""
        if self.kind == "fp8":
            return f"fp8 {FP8_BLOCK}x{FP8_BLOCK} blocks"
        if self.kind == "dense":
            return self.main.dtype.lower()
        groups = "per channel" if self.group == self.shape[-1] else f"group {self.group}"
        return f"int{self.bits} {groups} ({_NAMES.get(self.kind, self.layout)})"


def classify(
    weight: str, parts: Mapping[str, TensorInfo], shape: tuple[int, ...], declared: Declared
) -> Stored | list[str]:
    """How `weight`, which config.json makes `shape`, is stored, or what is wrong with its tensors."""
    kind = _kind(parts, shape)
    first = next(iter(parts.values()))
    if kind is None:
        foreign = next((name for part, name in _FOREIGN.items() if part in parts), "of an unknown format")
        dtypes = ", ".join(f"{part} ({tensor.dtype})" for part, tensor in parts.items())
        return [
            f"{first} belongs to a weight stored as {dtypes}, which is {foreign} and not supported: use a bf16, "
            "compressed-tensors (packed), GPTQ, AWQ or block-scaled FP8 checkpoint"
        ]
    required, optional = _PARTS[kind]
    first = next(parts[part] for part in required if part in parts)
    problems = [f"{first} lacks its companion {part!r}: restore it" for part in required if part not in parts]
    problems += [
        f"{tensor} is a second form of {parts[required[0]].name!r}, or of no format known here: remove one of them"
        for part, tensor in parts.items()
        if part not in (*required, *optional)
    ]
    if kind not in ("dense", "fp8") and len(shape) != 2:
        problems.append(f"{first} is quantised, but {weight!r} {list(shape)} is no matrix: restore it in bf16")
    if problems:
        return problems
    bits, group, problems = 0, 0, []
    spec = declared.native.get(leaf_of(weight))
    if (kind == "native") != (spec is not None):
        said = "nothing of it" if spec is None else f"that it is {spec.label}"
        return [
            f"{first} is stored as {kind}, but {KEY!r} in config.json says {said}: they belong to different checkpoints"
        ]
    if spec is not None:
        problems = _native(parts, shape, spec)
        return problems or Stored(weight, kind, parts, shape, spec.bits, spec.group, declared, spec)
    if kind == "dense":
        problems = _check(parts["weight"], shape, FLOATS)
    elif kind == "fp8":
        blocks = tuple(-(-n // FP8_BLOCK) for n in shape)
        problems = _check(parts["weight"], shape, ("F8_E4M3",))
        problems += _check(parts["weight_scale_inv"], blocks, FLOATS)
    else:
        bits, group, problems = _integers(kind, parts, shape)
    return problems or Stored(weight, kind, parts, shape, bits, group, declared)


def _kind(parts: Mapping[str, TensorInfo], shape: tuple[int, ...]) -> str | None:
    if any(part in parts for part in ("weight_global_scale", "weight_scale_2", "trellis", *_COMPANIONS)):
        return None
    if "codes" in parts:
        return "native"
    if "weight_packed" in parts:
        return "packed"
    if "qweight" in parts:
        return "awq" if parts["qweight"].shape[:1] == shape[-1:] else "gptq"
    if "weight" not in parts:
        return None
    if "weight_scale_inv" in parts:
        return "fp8"
    if "weight_scale" in parts or parts["weight"].dtype.startswith(("F8_", "F6_", "F4")):
        return None
    return "dense"


def _integers(kind: str, parts: Mapping[str, TensorInfo], shape: tuple[int, int]) -> tuple[int, int, list[str]]:
    """Bits and group size of a matrix `[N, K]` of integers, and what contradicts them."""
    n, k = shape
    codes = parts[_PARTS[kind][0][0]]
    widths = {bits: _codes_shape(kind, shape, bits) for bits in ((4,) if kind == "awq" else (4, 8))}
    bits = next((bits for bits, width in widths.items() if width == codes.shape), None)
    if bits is None or codes.dtype != "I32":
        fitting = " or ".join(f"{list(width)} ({bits} bits)" for bits, width in widths.items())
        return (
            0,
            0,
            [f"{codes} is {codes.dtype} {list(codes.shape)}, but {list(shape)} in config.json makes it I32 {fitting}"],
        )
    if k * bits % 8 or (kind == "awq" and n % 8):
        return 0, 0, [f"{codes} holds {list(shape)} in {bits} bits, which are not whole bytes a row"]
    scale = parts["weight_scale" if kind == "packed" else "scales"]
    transposed = kind != "packed"
    groups = scale.shape[0 if transposed else -1] if len(scale.shape) == 2 else 0
    problems = _check(scale, (groups, n) if transposed else (n, groups), FLOATS)
    group = k // groups if groups else 0
    if not problems and (not group or k % groups or (groups > 1 and group & (group - 1))):
        problems.append(
            f"{scale} has {groups} groups for the {k} columns of {codes.name!r}: no group size (a power of two, or "
            f"the row) divides {k} into so many"
        )
    zeros_shape = (groups, -(-n * bits // 32)) if transposed else (-(-n * bits // 32), groups)
    for part, tensor in parts.items():
        if part in ("qzeros", "weight_zero_point"):
            problems += _check(tensor, zeros_shape, ("I32",))
        elif part in ("g_idx", "weight_g_idx"):
            problems += _check(tensor, (k,), ("I32", "I64"))
        elif part == "bias":
            problems += _check(tensor, (n,), FLOATS)
        elif part == "weight_shape":
            problems += _check(tensor, (2,), ("I32", "I64"))
    return bits, group, problems


def _native(parts: Mapping[str, TensorInfo], shape: tuple[int, ...], spec: Spec) -> list[str]:
    """What contradicts the fields of a matrix `[N, K]` in its layout."""
    try:
        template = spec.template(shape, parts)
    except ValueError as error:
        return [f"{parts['codes']} cannot hold {list(shape)} as {spec.label}: {error}"]
    problems = []
    for part, tensor in parts.items():
        field = getattr(template, part)
        codes = tuple(code for code, name in DTYPES.items() if name == field.dtype.name)
        problems += _check(tensor, field.shape, codes)
    return problems


def _codes_shape(kind: str, shape: tuple[int, int], bits: int) -> tuple[int, int]:
    """Shape of the int32 words that hold the codes of `[N, K]`."""
    n, k = shape
    if kind == "awq":
        return k, -(-n * bits // 32)
    return (-(-k * bits // 32), n) if kind == "gptq" else (n, -(-k * bits // 32))


def _check(tensor: TensorInfo, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> list[str]:
    problems = []
    if tensor.shape != shape:
        problems.append(
            f"{tensor} has shape {list(tensor.shape)}, but config.json makes it {list(shape)}: "
            "config.json and weights belong to different checkpoints"
        )
    if tensor.dtype not in dtypes:
        problems.append(f"{tensor} has dtype {tensor.dtype}, expected one of {', '.join(dtypes)}")
    return problems
