"""Batches of captured rows: windows of texts, and anchors in them, each step's a function of the step alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax.lab.capture import Captured, Text
from qwen38_jax.training.loop import Batch

Array = jax.Array

NO_ANCHOR = -1


@dataclasses.dataclass(frozen=True)
class Windows:
    """Draws `count` windows of `length` rows a step. Longer texts are more likely, as they have more to predict.

    Called with a step, it reads the windows and gives the arrays `[count, length, ...]` of `fields`, zeros behind
    the end of a text; then, if there are any, the anchors.

    Attributes:
      fields: of `captured`, in the order in which the loss takes them.
      anchors: how many to draw in each window: places of output tokens that another one follows.
      seed: of all draws.
    """

    captured: Captured
    fields: tuple[str, ...]
    length: int
    count: int
    seed: int
    anchors: int = 0

    def __post_init__(self):
        missing = set(self.fields) - self.captured.manifest["fields"].keys()
        if missing:
            raise ValueError(f"{self.captured.directory} has no {', '.join(sorted(missing))}: capture them as well")
        if not self._texts:
            raise ValueError(f"no text of {self.captured.directory} has two output tokens: there is nothing to draft")
        if self.length < 2 or self.count < 1:
            raise ValueError(f"windows need 2 rows at least, and a batch one window: got {self.length}, {self.count}")

    @functools.cached_property
    def _texts(self) -> list[Text]:
        return [text for text in self.captured.texts if text.rows - text.prompt >= 2]

    @functools.cached_property
    def _shares(self) -> np.ndarray:
        return np.cumsum([text.rows - text.prompt for text in self._texts])

    def draw(self, step: int) -> tuple[list[tuple[Text, int]], np.ndarray]:
        """Texts and their first rows; the anchors `[count, anchors]` int32, counted from there, or NO_ANCHOR."""
        rng = np.random.default_rng([self.seed, step])
        chosen = np.searchsorted(self._shares, rng.random(self.count) * self._shares[-1], side="right")
        windows = [(text, self._begin(rng, text)) for text in (self._texts[i] for i in chosen)]
        anchors = np.full((self.count, self.anchors), NO_ANCHOR, np.int32)
        for row, (text, begin) in enumerate(windows):
            end = min(text.rows, begin + self.length)
            places = np.arange(max(text.prompt, begin), end - 1) - begin
            some = rng.permutation(places)[: self.anchors]
            anchors[row, : len(some)] = np.sort(some)
        return windows, anchors

    def _begin(self, rng: np.random.Generator, text: Text) -> int:
        """The whole text if it fits; else a window whose end is anywhere in the output."""
        if text.rows <= self.length:
            return 0
        end = int(rng.integers(text.prompt + 2, text.rows + 1))
        return min(max(0, end - self.length), text.rows - self.length)

    def __call__(self, step: int) -> Batch:
        windows, anchors = self.draw(step)
        arrays = []
        for name in self.fields:
            first = self.captured.rows(windows[0][0], name, 0, 1)
            array = np.zeros((self.count, self.length, *first.shape[1:]), first.dtype)
            for row, (text, begin) in enumerate(windows):
                rows = self.captured.rows(text, name, begin, begin + self.length)
                array[row, : len(rows)] = rows
            arrays.append(array)
        return (*arrays, anchors) if self.anchors else tuple(arrays)


class ResidentWindows(Windows):
    """The same windows for a loss that has all rows as arrays: called with a step, it says where they are.

    A batch is where windows begin and how many rows they have, each `[count]` int32, and the anchors. `columns` are the
    arrays, `gather` makes of both what `Windows` would have given. For as much as the device holds.
    """

    def columns(self) -> tuple[tuple[np.ndarray, ...], ...]:
        """The fields of all texts, each `[rows, ...]`; taps in one array a layer, which 32 bits can still index."""
        found = []
        for name in self.fields:
            parts = [self.captured.rows(text, name) for text in self.captured.texts]
            layers = [[p[:, i] for p in parts] for i in range(parts[0].shape[1])] if name == "taps" else [parts]
            found.append(tuple(map(np.concatenate, layers)))
        return tuple(found)

    @functools.cached_property
    def _places(self) -> dict[Text, int]:
        starts = np.cumsum([0] + [text.rows for text in self.captured.texts])
        return {text: int(start) for text, start in zip(self.captured.texts, starts[:-1], strict=True)}

    def __call__(self, step: int) -> Batch:
        windows, anchors = self.draw(step)
        begins = np.array([self._places[text] + begin for text, begin in windows], np.int32)
        counts = np.array([min(self.length, text.rows - begin) for text, begin in windows], np.int32)
        return (begins, counts, anchors) if self.anchors else (begins, counts)

    def gather(self, columns: tuple[tuple[Array, ...], ...], begins: Array, counts: Array) -> tuple[Array, ...]:
        """`[count, length, ...]` of every field; jit-able."""
        offsets = jnp.arange(self.length)
        inside = offsets < counts[:, None]

        def read(column):
            rows = column.at[begins[:, None] + offsets].get(mode="clip")
            return jnp.where(inside.reshape(*inside.shape, *[1] * (rows.ndim - 2)), rows, 0)

        return tuple(
            jnp.stack([read(c) for c in column], axis=2) if name == "taps" else read(column[0])
            for name, column in zip(self.fields, columns, strict=True)
        )
