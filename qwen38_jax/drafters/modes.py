"""From the name of a mode to a drafter and its settings."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax.config import DFlash2Config
from qwen38_jax.drafters.dflash2 import DFlash2
from qwen38_jax.drafters.interface import Drafter
from qwen38_jax.drafters.lookup import NoDrafter
from qwen38_jax.drafters.mtp import Mtp
from qwen38_jax.layers.linear import rows_of
from qwen38_jax.params import DFlash2Params, DraftHead, Params
from qwen38_jax.quantization import LAYOUTS, QuantTensor, in_rows
from qwen38_jax.spec_config import MODES, SpecConfig
from qwen38_jax.tree import Tree

Array = jax.Array

MTP_TOKENS = 4
LOOKUP_TOKENS = 15  # 16 rows: what a tile of a matrix product takes anyway


def plan(
    mode: str,
    draft_tokens: int | None = None,
    verify_tokens: int | None = None,
    dflash2: DFlash2Config | None = None,
    tree: Tree | None = None,
) -> tuple[int, SpecConfig] | None:
    """How many drafts a mode's drafter proposes, and the mode's settings; None for "none". Needs no checkpoint.

    Args:
      mode: one of `MODES`.
      draft_tokens: of the drafter itself. verify_tokens: drafts that a block has at most, those of the lookup included.
      dflash2: of the DFlash2 drafter. It drafts whole blocks, of which `verify_tokens` may be only the first part.
      tree: shape of the drafts of MTP or DFlash2, which says how many there are; None for a chain.

    Raises:
      ValueError: the mode is unknown or has no use for an option or a drafter, or lacks it; more drafts than are
        verified, or none.
    """
    if mode not in MODES:
        raise ValueError(f"speculation mode must be one of {', '.join(MODES)}, got {mode!r}")
    if "dflash2" in mode and dflash2 is None:
        raise ValueError(f"mode {mode} needs a DFlash2 drafter: name its directory (--drafter)")
    if "dflash2" not in mode and dflash2 is not None:
        raise ValueError(f"mode {mode} has no use for a DFlash2 drafter: choose dflash2 or dflash2+lookup")
    if mode == "none":
        if draft_tokens is not None or verify_tokens is not None or tree is not None:
            raise ValueError("draft_tokens, verify_tokens and trees are for speculation: choose a mode other than none")
        return None
    if tree is not None:
        if mode not in ("mtp", "dflash2") or draft_tokens is not None or verify_tokens is not None:
            raise ValueError(
                f"a tree of drafts is for modes mtp and dflash2 and says itself how many there are, got mode {mode}, "
                f"draft_tokens {draft_tokens}, verify_tokens {verify_tokens}"
            )
        return len(tree.paths), SpecConfig(verify_tokens=len(tree.paths), tree=tree)
    lookup, drafts = "lookup" in mode, _own_drafts(mode, draft_tokens, dflash2)
    if verify_tokens is None:
        verify_tokens = max(LOOKUP_TOKENS, drafts) if lookup else drafts
    least = max(drafts, 1) if dflash2 is None else 1
    if verify_tokens < least:
        raise ValueError(f"verify_tokens must be at least {least}, got {verify_tokens}")
    if not lookup and verify_tokens > drafts:
        raise ValueError(f"verify_tokens {verify_tokens} are more than the {drafts} that mode {mode} drafts")
    # Where a drafter has no tokens of its own, a short match spoils none, and any draft is better than an empty row.
    eager = {} if drafts else {"nmin": 1, "nstrong": 1, "nmin_tail": 1}
    return drafts, SpecConfig(verify_tokens=verify_tokens, lookup=lookup, **eager)


def _own_drafts(mode: str, draft_tokens: int | None, dflash2: DFlash2Config | None) -> int:
    """How many tokens the drafter of a mode proposes beside those looked up."""
    if mode == "lookup":
        if draft_tokens is not None:
            raise ValueError("draft_tokens is for drafters with tokens of their own: lookup takes verify_tokens")
        return 0
    if dflash2 is not None:
        drafts = dflash2.block_size - 1
        if draft_tokens not in (None, drafts):
            raise ValueError(
                f"draft_tokens: this drafter drafts blocks of {drafts} tokens, got {draft_tokens}; "
                "verify_tokens may be fewer"
            )
        return drafts
    drafts = MTP_TOKENS if draft_tokens is None else draft_tokens
    if drafts < 1:
        raise ValueError(f"draft_tokens must be at least 1, got {drafts}")
    return drafts


def make_drafter(
    mode: str,
    params: Params,
    *,
    draft_head: DraftHead | None = None,
    draft_tokens: int | None = None,
    verify_tokens: int | None = None,
    dflash2: tuple[DFlash2Params, DFlash2Config] | None = None,
    tree: Tree | None = None,
) -> tuple[Drafter, SpecConfig] | None:
    """The drafter and the settings of a mode; None for "none".

    Args:
      draft_head: rows of the output head that MTP drafts from; None for all.
      dflash2: a DFlash2 drafter as `checkpoint.load_drafter` returns it. The other options are `plan`'s.

    Raises:
      ValueError: what `plan` raises; or the model has no MTP head.
    """
    planned = plan(mode, draft_tokens, verify_tokens, None if dflash2 is None else dflash2[1], tree)
    if planned is None:
        return None
    drafts, spec = planned
    if mode == "lookup":
        return NoDrafter(), spec
    if dflash2 is not None:
        return DFlash2(*dflash2, spec.truncate_draft), spec
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
