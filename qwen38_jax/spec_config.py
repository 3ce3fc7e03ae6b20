"""How speculation is done: which drafts are put up for verification, and when a block is long."""

import dataclasses

from qwen38_jax.tree import MAX_DRAFTS, Tree

MODES = ("none", "mtp", "dflash2", "lookup", "mtp+lookup", "dflash2+lookup")


@dataclasses.dataclass(frozen=True)
class SpecConfig:
    """Thresholds of drafting. Hashable: a compiled step depends on it. A bad value is a ValueError that names it.

    D stands for the number of drafts of the drafter itself, k for `verify_tokens`. A short block verifies D drafts, a
    long one k, of which the lookup provides what it finds. Nothing here changes what is generated at temperature 0, and
    at any other not its distribution.

    Attributes:
      verify_tokens: k, drafts that a block has at most; it has one row more.
      lookup: whether tokens that followed an earlier occurrence of the text's end are drafts, too.
      nmin, nmax: shortest and longest match of the end of the text that counts. Of matches of `nmax` tokens that which
        continues the last one wins, else the most recent, however far older ones agree: a larger cap prefers old text.
      search: how many of the last tokens are searched.
      nstrong: a match this long replaces the drafter's own tokens.
      agree: a shorter match does so if as many of the first tokens agree with the drafter's.
      nmin_tail: a match this long provides the tokens behind the drafter's, if it also replaces those or all agree.
      longmin: a match this long, with tokens behind the drafter's, is a reason for a long block.
      adaptive: False makes every block long.
      sticky: long blocks that follow after the last reason for one.
      saturation: tokens that a short block must have emitted for its step to be a reason; 0 means D + 1, all.
      long_saturation: the same for a long block; 0 means D + 1.
      cheap_context: blocks are long while a sequence has fewer tokens than this.
      truncate_draft: sampled drafts heed the request's top-k and top-p.
      tree: shape of the drafts, `verify_tokens` of them; None for a chain.
    """

    verify_tokens: int
    lookup: bool = False
    nmin: int = 6
    nmax: int = 12
    search: int = 2**30
    nstrong: int = 6
    agree: int = 0
    nmin_tail: int = 4
    longmin: int = 6
    adaptive: bool = True
    sticky: int = 3
    saturation: int = 0
    long_saturation: int = 0
    cheap_context: int = 0
    truncate_draft: bool = True
    tree: Tree | None = None

    def __post_init__(self):
        least = {"verify_tokens": 0, "nmin": 1, "nmax": self.nmin, "search": 1, "nstrong": 1, "nmin_tail": 1}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is bool:
                if not isinstance(value, bool):
                    raise ValueError(f"{field.name} must be True or False, got {value!r}")
            elif field.type is int and (type(value) is not int or value < least.get(field.name, 0)):
                raise ValueError(
                    f"{field.name} must be an integer of at least {least.get(field.name, 0)}, got {value!r}"
                )
        if self.verify_tokens > MAX_DRAFTS:
            raise ValueError(f"verify_tokens must be at most {MAX_DRAFTS}, got {self.verify_tokens}")
        if self.tree is not None and (self.lookup or len(self.tree.paths) != self.verify_tokens):
            raise ValueError(
                f"a tree of {len(self.tree.paths)} drafts is verified whole and without a lookup, got "
                f"verify_tokens {self.verify_tokens}, lookup {self.lookup}"
            )
