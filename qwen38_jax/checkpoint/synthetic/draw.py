"""Random numbers for the tensors of a synthetic checkpoint, as fast as they can be copied."""

import functools
import math
import zlib
from collections.abc import Iterator

import ml_dtypes  # noqa: F401 (registers the dtype names "bfloat16" and "float8_e4m3fn" with numpy)
import numpy as np

RMS_FP8 = 64.0  # of FP8 values before scaling; their largest is 448

_BLOCK = 1 << 22  # normals drawn once; tensors are pieces of them


class Draw:
    """The numbers of one tensor: they follow from the seed and its name, whoever draws them and when.

    Normals are cut from a block that all tensors share. It is kept in each dtype and size that was asked for: a cast to
    bf16 is slow and holds Python's lock, which would make threads wait for each other.
    """

    def __init__(self, seed: int, name: str):
        self._seed = seed
        # Twice as fast as the default generator.
        self._rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
        self.uniform, self.permutation = self._rng.uniform, self._rng.permutation

    def normal(self, shape: tuple[int, ...], std: float = 1.0, dtype: str = "float32") -> np.ndarray:
        """Normals of at most `_BLOCK` values; not to be written to. FP8 takes those of size `RMS_FP8`."""
        n = math.prod(shape)
        start = int(self._rng.integers(_BLOCK - n + 1))
        return _normals(self._seed, std, dtype)[start : start + n].reshape(shape)

    def words(self, shape: tuple[int, ...]) -> np.ndarray:
        """int32 of random bits."""
        n = math.prod(shape)
        limits = np.iinfo(np.int64)
        pairs = self._rng.integers(limits.min, limits.max, -(-n // 2), dtype=np.int64, endpoint=True)
        return pairs.view(np.int32)[:n].reshape(shape)

    @staticmethod
    def parts(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Shapes of consecutive rows, each part of at most half a block."""
        rows, width = shape[0], math.prod(shape[1:])
        step = max(1, _BLOCK // (2 * width))
        for start in range(0, rows, step):
            yield (min(step, rows - start), *shape[1:])


@functools.lru_cache(64)
def _normals(seed: int, std: float, dtype: str) -> np.ndarray:
    if (std, dtype) == (1.0, "float32"):
        return np.random.default_rng(seed).standard_normal(_BLOCK, dtype=np.float32)
    return (std * _normals(seed, 1.0, "float32")).clip(*_finite(dtype)).astype(dtype)


def _finite(dtype: str) -> tuple[float, float]:
    largest = float(ml_dtypes.finfo(dtype).max)
    return -largest, largest
