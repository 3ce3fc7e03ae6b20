"""From the name of a mode to a drafter and its settings."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax.drafters.interface import Drafter
from qwen38_jax.drafters.lookup import NoDrafter
from qwen38_jax.drafters.mtp import Mtp
from qwen38_jax.layers.linear import rows_of
from qwen38_jax.params import DraftHead, Params
from qwen38_jax.quantization import LAYOUTS, QuantTensor, in_rows
from qwen38_jax.spec_config import MODES, SpecConfig

Array = jax.Array

MTP_TOKENS = 4
LOOKUP_TOKENS = 15  # 16 rows: what a tile of a matrix product takes anyway


def plan(mode: str, draft_tokens: int | None = None, verify_tokens: int | None = None) -> tuple[int, SpecConfig] | None:
    """How many drafts a mode's drafter proposes, and the mode's settings; None for "none". Needs no checkpoint.

    Args:
      mode: one of `MODES`.
      draft_tokens: of the drafter itself. verify_tokens: drafts that a block has at most, those of the lookup included.

    Raises:
      ValueError: the mode is unknown or has no use for an option; more drafts than are verified, or none.
    """
    if mode not in MODES:
        raise ValueError(f"speculation mode must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == "none":
        if draft_tokens is not None or verify_tokens is not None:
            raise ValueError("draft_tokens and verify_tokens are for speculation: choose a mode other than none")
        return None
    if "dflash2" in mode:
        raise ValueError(f"mode {mode} needs the DFlash2 drafter, which cannot be run yet: choose another")
    lookup, own = "lookup" in mode, mode != "lookup"
    if not own and draft_tokens is not None:
        raise ValueError("draft_tokens is for drafters with tokens of their own: lookup takes verify_tokens")
    drafts = (MTP_TOKENS if draft_tokens is None else draft_tokens) if own else 0
    if own and drafts < 1:
        raise ValueError(f"draft_tokens must be at least 1, got {drafts}")
    if verify_tokens is None:
        verify_tokens = max(LOOKUP_TOKENS, drafts) if lookup else drafts
    if verify_tokens < max(drafts, 1):
        raise ValueError(f"verify_tokens must be at least {max(drafts, 1)}, what is drafted, got {verify_tokens}")
    if not lookup and verify_tokens > drafts:
        raise ValueError(f"verify_tokens {verify_tokens} are more than the {drafts} that mode {mode} drafts")
    return drafts, SpecConfig(verify_tokens=verify_tokens, lookup=lookup)


def make_drafter(
    mode: str,
    params: Params,
    *,
    draft_head: DraftHead | None = None,
    draft_tokens: int | None = None,
    verify_tokens: int | None = None,
) -> tuple[Drafter, SpecConfig] | None:
    """The drafter and the settings of a mode; None for "none".

    Args:
      draft_head: rows of the output head that MTP drafts from; None for all. The other options are `plan`'s.

    Raises:
      ValueError: what `plan` raises; or the model has no MTP head.
    """
    planned = plan(mode, draft_tokens, verify_tokens)
    if planned is None:
        return None
    drafts, spec = planned
    if mode == "lookup":
        return NoDrafter(), spec
    if params.mtp is None:
        raise ValueError(f"mode {mode} needs an MTP head, and the checkpoint has none: choose lookup or none")
    return Mtp(draft_head, drafts, spec.truncate_draft), spec


def cut_draft_head(params: Params, ids: Sequence[int] | np.ndarray, *, vocab_size: int) -> DraftHead:
    """Rows of the output head for the tokens `ids`, which must ascend and be below `vocab_size`.

    Raises:
      ValueError: they do not ascend or lie outside.
    """
    ids = np.asarray(ids, np.int64)
    if ids.ndim != 1 or not ids.size or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ValueError(f"draft vocabulary must be ascending ids in [0, {vocab_size - 1}], got {ids}")
    head = params.embed if params.lm_head is None else params.lm_head
    ids = jnp.asarray(ids, jnp.int32)
    return DraftHead(_rows(head, ids), ids)


@jax.jit
def _rows(head: Array | QuantTensor, ids: Array) -> Array | QuantTensor:
    """Rows of a head, in the layout of that."""
    rows = rows_of(in_rows(head), ids)
    return LAYOUTS[head.layout].pack(rows) if isinstance(head, QuantTensor) else rows
