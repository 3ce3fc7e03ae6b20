"""One quantised matrix in the tensors of each format, packed value by value, and loaded on its own."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
from safetensors.numpy import save_file

from qwen38_jax.checkpoint import CheckpointError, load
from qwen38_jax.checkpoint.files import read_header
from qwen38_jax.checkpoint.formats import Declared, Stored, classify
from qwen38_jax.checkpoint.names import Place, Slice
from qwen38_jax.params import ArrayInfo

NOTHING = Declared(None, None)


def words(values: np.ndarray, bits: int, axis: int, order=None) -> np.ndarray:
    """int32 words of unsigned values, packed along an axis from the lowest bits on; `order[i]` goes to place i."""
    values = np.moveaxis(np.asarray(values), axis, 0)
    per = 32 // bits
    out = np.zeros((-(-len(values) // per), *values.shape[1:]), np.uint32)
    for i in range(len(values)):
        word, place = divmod(i, per)
        source = i if order is None else word * per + order[place]
        out[word] |= values[source].astype(np.uint32) << np.uint32(bits * place)
    return np.ascontiguousarray(np.moveaxis(out, 0, axis)).view(np.int32)


def values(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Unsigned values of int32 words that are packed along an axis: the inverse of `words`."""
    shifts = bits * np.arange(32 // bits, dtype=np.uint32)
    moved = np.moveaxis(words.view(np.uint32), axis, -1)
    unpacked = (moved[..., None] >> shifts) & np.uint32(2**bits - 1)
    return np.moveaxis(unpacked.reshape(*moved.shape[:-1], -1), -1, axis).astype(np.int64)


def random_matrix(n, k, groups, bits=4, *, symmetric=True, order=False, dtype="float16", seed=0):
    """Unsigned codes `u [N, K]`, zeros `z [N, G]`, scales `s [N, G]`, `g_idx [K]`, and the matrix in fp32."""
    rng = np.random.default_rng(seed)
    middle = 2 ** (bits - 1)
    u = rng.integers(0, 2 * middle, (n, k))
    s = rng.normal(size=(n, groups)).astype(dtype)
    # Zero points like a quantiser's: the mean weight is near 0.
    z = rng.integers(middle - 4, middle + 4, (n, groups)) if not symmetric else np.full((n, groups), middle)
    g_idx = np.arange(k) // (k // groups)
    if order:
        g_idx = rng.permutation(g_idx)
    matrix = (u - z[:, g_idx]).astype(np.float32) * s[:, g_idx].astype(np.float32)
    return SimpleNamespace(u=u, z=z, s=s, g_idx=g_idx.astype(np.int32), matrix=matrix, bits=bits)


def compressed(m, *, shape=True, order=False, zeros=False) -> dict[str, np.ndarray]:
    parts = {"weight_packed": words(m.u, m.bits, 1), "weight_scale": m.s}
    parts |= {"weight_shape": np.array(m.u.shape)} if shape else {}
    parts |= {"weight_g_idx": m.g_idx} if order else {}
    return parts | ({"weight_zero_point": words(m.z, m.bits, 0)} if zeros else {})


def gptq(m, less: int = 1) -> dict[str, np.ndarray]:
    """`less` 1 is the first version of the format, 0 the second."""
    stored = (m.z.T - less) % 2**m.bits
    scales = np.ascontiguousarray(m.s.T)
    return {"qweight": words(m.u.T, m.bits, 0), "qzeros": words(stored, m.bits, 1), "scales": scales, "g_idx": m.g_idx}


def awq(m) -> dict[str, np.ndarray]:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    scales = np.ascontiguousarray(m.s.T)
    return {"qweight": words(m.u.T, 4, 1, order), "qzeros": words(m.z.T, 4, 1, order), "scales": scales}


def load_matrix(directory: Path, *layers: dict[str, np.ndarray], shape, declared=NOTHING, dtype="float32"):
    """The leaf that one matrix, or a stack of several, loads as. `shape` is what config.json makes of each."""
    return load_fused(directory, layers, shape=shape, declared=declared, dtype=dtype)


def load_fused(directory: Path, *slices: tuple[dict[str, np.ndarray], ...], shape, declared=NOTHING, dtype="float32"):
    """The leaf that matrices, in one or several layers each, load as when they are fused."""
    count = len(slices[0])
    names = [tuple(f"layers.{j * count + i}.weight" for i in range(count)) for j in range(len(slices))]
    whole = (len(slices) * shape[0], *shape[1:])
    info = ArrayInfo(whole if count == 1 else (count, *whole), dtype, (), None)
    place = Place("x", info, tuple(Slice(own, tuple(shape)) for own in names), stacked=count > 1)
    stored, names = {}, place.names
    for i, parts in enumerate(matrix for layers in slices for matrix in layers):
        path = directory / f"{i}.safetensors"
        save_file({f"layers.{i}.{part}": value for part, value in parts.items()}, path)
        header = {name.rpartition(".")[2]: tensor for name, tensor in read_header(path).items()}
        result = classify(names[i], header, tuple(shape), declared)
        if not isinstance(result, Stored):
            raise CheckpointError("\n".join(result))
        stored[names[i]] = result
    return load._load_place(place, SimpleNamespace(stored=stored))
