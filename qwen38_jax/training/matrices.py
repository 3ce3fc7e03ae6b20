"""Which parameters an optimiser treats as matrices, told from the names of their axes."""

from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers


def decayed(infos: Any) -> Any:
    """For each `ArrayInfo` of a pytree whether weight decay is for it: for matrices."""
    return jax.tree.map(lambda info: _is_matrix(info.axes), infos)


def muon_dimensions(infos: Any) -> Any:
    """For each `ArrayInfo` of a pytree how Muon sees it; None for what stays with AdamW.

    Muon is for matrices between layers; what is indexed by tokens, embedding and head, stays with AdamW.
    """

    def dimensions(info):
        if not _is_matrix(info.axes) or "vocab" in info.axes:
            return None
        return MuonDimensionNumbers(reduction_axis=len(info.axes) - 1, output_axis=len(info.axes) - 2)

    return jax.tree.map(dimensions, infos)


def _is_matrix(axes: tuple[str, ...]) -> bool:
    """Norms, short filters and the per-head constants of the recurrence are none."""
    return len([axis for axis in axes if axis != "layer"]) == 2 and "width" not in axes
