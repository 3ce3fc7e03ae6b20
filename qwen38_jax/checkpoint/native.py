"""The package's own checkpoints: fused matrices, in the layout that a kernel reads, loaded as they are.

Tensors are named after the leaves of `Params` (of a drafter, `DFlash2Params`) that they fill, a layer of a stacked leaf
by its place in the stack:

    linear.17.mixer.qkvz.codes   a field of a `QuantTensor`: codes, scales, zeros or group_of
    linear.17.mixer.conv.weight  an array
    full.3.mixer.qkv.0.codes     slice 0 (the query and gate rows) of a leaf whose slices are not stored alike

config.json is a Hugging Face one with an entry more, which says what the tensors themselves do not:

    "qwen38_jax": {
      "format": 1,
      "prefix": "model.language_model.",  of the text model's names in the checkpoint that this was made from
      "weights": {  every quantised leaf
        "linear.mixer.qkvz": {"bits": 4, "group": 128, "scales": "float16", "layout": "mma"}, ...
      }
    }
"""

import dataclasses
import re
from collections.abc import Container, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from qwen38_jax.checkpoint import names
from qwen38_jax.checkpoint.files import CheckpointError
from qwen38_jax.checkpoint.names import Place, Slice
from qwen38_jax.quantization import LAYOUTS, QuantTensor, quant_tensor

KEY = "qwen38_jax"
_SCALES = ("float32", "bfloat16", "float16")
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Spec:
    """How a leaf is quantised: `bits`, columns that share a scale, the dtype of `scales`, and a key of `LAYOUTS`."""

    bits: int
    group: int
    scales: str
    layout: str

    @property
    def label(self) -> str:
        return f"int{self.bits} group {self.group} ({self.layout})"

    def template(self, shape: tuple[int, int], fields: Container[str]) -> QuantTensor:
        """The `QuantTensor` of one matrix `[N, K]` as `jax.ShapeDtypeStruct`s; of optional fields, those in `fields`.

        Raises:
          ValueError: the groups do not divide K, or the layout cannot hold the matrix.
        """
        n, k = shape
        if k % self.group or k * self.bits % 8:
            raise ValueError(f"groups of {self.group} at {self.bits} bits do not divide rows of {k} values")

        def array(dtype: str, *dims: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))

        groups = k // self.group
        rows = quant_tensor(
            array("uint8", n, k * self.bits // 8),
            array(self.scales, n, groups),
            array("int8", n, groups) if "zeros" in fields else None,
            array("int32", k) if "group_of" in fields else None,
            bits=self.bits,
            dtype="float32",
        )
        return jax.eval_shape(LAYOUTS[self.layout].pack, rows)

    def for_kernels(self, shape: tuple[int, int], fields: Container[str]) -> "Spec":
        """The same in the layout that kernels read, or in rows if that cannot hold such a matrix."""
        packed = dataclasses.replace(self, layout="mma")
        try:
            packed.template(shape, fields)
        except ValueError:
            return dataclasses.replace(self, layout="rows")
        return packed


@dataclasses.dataclass(frozen=True)
class Native:
    """The entry of config.json. `weights` is by leaf, with a slice's number behind it where slices are apart."""

    prefix: str
    weights: Mapping[str, Spec]

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> "Native | None":
        """Reads the entry; None when there is none.

        Raises:
          CheckpointError: a format or layout that this version does not know, or an entry that is not as above.
        """
        entry = hf_config.get(KEY)
        if entry is None:
            return None
        try:
            version, prefix, weights = entry["format"], entry["prefix"], dict(entry["weights"])
            specs = {leaf: Spec(**spec) for leaf, spec in weights.items()}
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"config.json: {KEY!r} is malformed ({error!r}): prepare the checkpoint again"
            ) from None
        if version != FORMAT or prefix not in names.TRUNK_PREFIXES:
            raise CheckpointError(
                f"config.json: {KEY!r} has format {version!r} and prefix {prefix!r}, but this version reads format "
                f"{FORMAT} with one of {names.TRUNK_PREFIXES}: prepare the checkpoint again, or use a newer version"
            )
        for leaf, spec in specs.items():
            if spec.layout not in LAYOUTS:
                raise CheckpointError(
                    f"config.json: {KEY!r} stores {leaf!r} in the layout {spec.layout!r}, which this version does not "
                    f"know (it knows {', '.join(LAYOUTS)}): prepare the checkpoint again, or use a newer version"
                )
            if spec.bits not in (4, 8) or type(spec.group) is not int or spec.group < 1 or spec.scales not in _SCALES:
                raise CheckpointError(f"config.json: {KEY!r} gives {leaf!r} {spec}: prepare the checkpoint again")
        return cls(prefix, specs)

    def to_hf(self) -> dict[str, Any]:
        weights = {leaf: dataclasses.asdict(spec) for leaf, spec in self.weights.items()}
        return {"format": FORMAT, "prefix": self.prefix, "weights": weights}

    def places(self, places: Iterable[Place]) -> list[Place]:
        """The same leaves, filled by tensors of this format."""
        return [native_place(place, apart=f"{place.path}.0" in self.weights) for place in places]


def native_place(place: Place, *, apart: bool) -> Place:
    """A place filled by tensors of this format; `apart`: one for each of its slices."""
    rows = place.info.fused if apart else place.shape[:1]
    slices = []
    for i, n in enumerate(rows):
        own = f"{place.path}.{i}" if apart else place.path
        part, _, rest = own.partition(".")
        layers = [f"{part}.{layer}.{rest}" for layer in range(place.info.shape[0])] if place.stacked else [own]
        slices.append(Slice(tuple(f"{layer}.weight" for layer in layers), (n, *place.shape[1:])))
    return dataclasses.replace(place, slices=tuple(slices))


def leaf_of(weight: str) -> str:
    """The key of `Native.weights` for the name of a weight: `linear.17.mixer.qkvz.weight` -> `linear.mixer.qkvz`."""
    return re.sub(r"^(linear|full|layers)\.\d+\.", r"\1.", weight.removesuffix(".weight"))
