"""A leaf of `Params` as arrays that are yet to be read: matrices of one input fused, layers made alike."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from qwen38_jax.checkpoint.formats import Stored
from qwen38_jax.checkpoint.names import Place
from qwen38_jax.checkpoint.native import Spec
from qwen38_jax.checkpoint.unpack import Rows, concatenate, floats, integers, no_zeros, own_order


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows of a leaf that are stored alike.

    Attributes:
      arrays: `weight` alone, or the fields of a `QuantTensor`; of each layer of a stack, else of one.
      shape: of the matrix that one layer is.
      spec: how integers are stored; None for floats.
    """

    arrays: dict[str, list[Rows]]
    shape: tuple[int, ...]
    spec: Spec | None


def is_table(path: str) -> bool:
    """Whether rows of a leaf are looked up, so that it must stay in the layout "rows"."""
    return path.rpartition(".")[2] in ("embed", "predecessors", "successors")


def leaf_blocks(place: Place, stored: Mapping[str, Stored]) -> list[Block]:
    """The leaf in one block if all its slices are stored alike, else in one for each slice.

    Alike are floats; and integers of the same width and groups, whose columns are in the same order.
    """
    slices = [[_Matrix.of(stored[name], place) for name in part.names] for part in place.slices]
    formats = {(m.stored.bits, m.stored.group, m.stored.layout) for layers in slices for m in layers}
    if len(formats) == 1 and all(_same_order(layer) for layer in zip(*slices, strict=True)):
        return [_fuse(slices)]
    return [_fuse([layers]) for layers in slices]


@dataclasses.dataclass(frozen=True)
class _Matrix:
    stored: Stored
    arrays: dict[str, Rows]

    @classmethod
    def of(cls, stored: Stored, place: Place) -> "_Matrix":
        if stored.bits:
            return cls(stored, integers(stored, place.info.dtype))
        # A convolution has a middle axis in the file and none in the leaf.
        return cls(stored, {"weight": floats(stored, place.info.dtype).reshape(*place.shape[1:])})

    def get(self, name: str) -> Rows:
        """An array by its name, made up where this matrix has none of it and says so by that."""
        return self.arrays[name] if name in self.arrays else _NEUTRAL[name](self.stored)


_NEUTRAL = {"zeros": no_zeros, "group_of": own_order}


def _same_order(slices: tuple[_Matrix, ...]) -> bool:
    """Whether the slices of one layer have the same `group_of`."""
    orders = [matrix.arrays["group_of"] for matrix in slices if "group_of" in matrix.arrays]
    if not orders:
        return True
    first, *others = (order.read(0, order.shape[0]) for order in orders)
    return len(orders) == len(slices) and all(np.array_equal(first, other) for other in others)


def _fuse(slices: list[list[_Matrix]]) -> Block:
    """Slice below slice, layer by layer. What only some matrices have becomes explicit in the others."""
    layers = list(zip(*slices, strict=True))
    names = {name: None for layer in layers for matrix in layer for name in matrix.arrays}
    arrays = {name: [[matrix.get(name) for matrix in layer] for layer in layers] for name in names}
    if len({rows.dtype for layer in arrays.get("scales", ()) for rows in layer}) > 1:
        # fp32 holds fp16 and bf16 exactly.
        arrays["scales"] = [[rows.astype("float32") for rows in layer] for layer in arrays["scales"]]
    fused = {
        name: [parts[0] if name == "group_of" else concatenate(parts) for parts in layers]
        for name, layers in arrays.items()
    }
    first = slices[0][0].stored
    rows = sum(layers[0].stored.shape[0] for layers in slices)
    if not first.bits:
        return Block(fused, (rows, *fused["weight"][0].shape[1:]), None)
    spec = first.spec or Spec(first.bits, first.group, fused["scales"][0].dtype, "rows")
    return Block(fused, (rows, first.shape[1]), spec)
