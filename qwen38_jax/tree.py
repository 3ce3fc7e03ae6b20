"""Trees of drafts of a fixed shape: several continuations of the anchor that one block verifies together."""

import dataclasses
import functools
import heapq
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

MAX_DRAFTS = 31  # blocks of 32 rows


@dataclasses.dataclass(frozen=True)
class Tree:
    """Which drafts there are and which of them follow which. Hashable: a compiled step depends on it.

    Row 0 of the block is the anchor, row i + 1 the draft `paths[i]`. A row's depth is its distance from the anchor.

    Attributes:
      paths: the ranks on the way to each draft, level by level: `(0,)` is the likeliest token after the anchor,
        `(0, 1)` the second likeliest after that one.

    Raises:
      ValueError: no drafts or too many, a draft twice or out of order, one without its parent.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        if not 1 <= len(self.paths) <= MAX_DRAFTS:
            raise ValueError(f"a tree has 1 to {MAX_DRAFTS} drafts, got {len(self.paths)}")
        if list(self.paths) != sorted(set(self.paths), key=lambda path: (len(path), path)):
            raise ValueError("the drafts of a tree must differ and be sorted, by depth and then by ranks")
        known = {(), *self.paths}
        for path in self.paths:
            if not path or min(path) < 0 or path[:-1] not in known:
                raise ValueError(f"draft {list(path)} of the tree has no parent {list(path[:-1])}, or a rank below 0")

    @property
    def depth(self) -> int:
        """Of the deepest draft."""
        return len(self.paths[-1])

    @property
    def ranks(self) -> int:
        """How many ranks there are at most below one row."""
        return 1 + max(path[-1] for path in self.paths)

    @functools.cached_property
    def depths(self) -> np.ndarray:
        """`[rows]` int32."""
        return np.array([0, *map(len, self.paths)], np.int32)

    @functools.cached_property
    def parents(self) -> np.ndarray:
        """`[rows]` int32, the row that each row follows; -1 for the anchor."""
        row = {(): 0, **{path: i + 1 for i, path in enumerate(self.paths)}}
        return np.array([-1, *(row[path[:-1]] for path in self.paths)], np.int32)

    @functools.cached_property
    def ancestors(self) -> np.ndarray:
        """`[rows, rows]` bool: column j is row i itself or on the way to it."""
        reach = np.eye(len(self.parents), dtype=bool)
        for row, parent in enumerate(self.parents[1:], start=1):
            reach[row] |= reach[parent]
        return reach

    def level(self, depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows of a depth of 1 or more, their parents and their ranks."""
        rows = np.flatnonzero(self.depths == depth)
        return rows, self.parents[rows], np.array([self.paths[row - 1][-1] for row in rows])


def read_tree(path: Path) -> Tree:
    """A tree from a JSON file: a list of drafts, each the list of its ranks.

    Raises:
      OSError: the file cannot be read. ValueError: it holds something else.
    """
    try:
        paths = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(paths, list) or not all(
            isinstance(p, list) and all(type(r) is int for r in p) for p in paths
        ):
            raise ValueError("expected a list of drafts, each a list of ranks such as [0, 1]")
        return Tree(tuple(sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def best_tree(acceptance: Sequence[Sequence[float]], drafts: int) -> Tree:
    """The tree of so many drafts that is expected to have the most accepted, and none deeper or wider than measured.

    Args:
      acceptance: `[depth][rank]`, how often the model's token at that depth has that rank among a drafter's, where all
        tokens before it were right. A draft is reached as often as the product along its way says.
    """
    chosen: list[tuple[int, ...]] = []
    # No child is likelier than its parent, so taking the likeliest of all that can be added is best for every size.
    frontier = [(-p, (rank,)) for rank, p in enumerate(acceptance[0])]
    heapq.heapify(frontier)
    while frontier and len(chosen) < drafts:
        negative, path = heapq.heappop(frontier)
        chosen.append(path)
        if len(path) < len(acceptance):
            for rank, p in enumerate(acceptance[len(path)]):
                heapq.heappush(frontier, (negative * p, (*path, rank)))
    return Tree(tuple(sorted(chosen, key=lambda path: (len(path), path))))


def expected_tokens(tree: Tree, acceptance: Sequence[Sequence[float]]) -> float:
    """Tokens a step that `best_tree` expects of a tree: the accepted drafts and the model's own."""
    return 1 + sum(float(np.prod([acceptance[i][rank] for i, rank in enumerate(path)])) for path in tree.paths)
