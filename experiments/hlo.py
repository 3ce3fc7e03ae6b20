"""What a compiled program says about itself: which weights a kernel reads, and what is copied."""

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from qwen38_jax.quantization import QuantTensor

_COPY = re.compile(r"\s*(?:ROOT )?%?(\S+) = (.*?) (?:copy|copy-start)\(")
_RESULT = re.compile(r"%?([\w.-]+) = (\w+\[[\d,]*\])")
_SHAPE = re.compile(r"(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


class Copy(NamedTuple):
    """An instruction that copies an array. shape: as the program writes it, e.g. `bf16[1,5120]`."""

    name: str
    shape: str
    nbytes: int


def large_copies(text: str, least: int) -> list[Copy]:
    """What an optimised program copies of at least so many bytes."""
    found = []
    for line in text.splitlines():
        if copy := _COPY.match(line):
            sizes = {shape[0]: _bytes(shape) for shape in _SHAPE.finditer(copy[2])}
            shape = max(sizes, key=sizes.__getitem__)
            if sizes[shape] >= least:
                found.append(Copy(copy[1], shape, sizes[shape]))
    return found


def _bytes(shape: re.Match) -> int:
    bits = int(shape[2] or 8)
    return math.prod(int(n) for n in shape[3].split(",") if n) * bits // 8


def packed_leaves(tree: Any) -> dict[str, QuantTensor]:
    """Matrices in the layout that kernels read, by their path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, QuantTensor))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in leaves
        if isinstance(leaf, QuantTensor) and leaf.layout == "mma"
    }


def without_kernel(text: str, weights: Iterable[QuantTensor]) -> list[str]:
    """Shapes of those matrices (or stacks) that no kernel of an optimised program for a GPU takes as a whole."""
    results = dict(_RESULT.findall(text))
    calls = re.findall(r" custom-call\((.*?)\), custom_call_target=\S*triton", text)
    operands = {results.get(name) for call in calls for name in re.findall(r"%?([\w.-]+)", call)}
    missing = []
    for weight in weights:
        *stack, _, _ = weight.shape
        layers = math.prod(stack)
        if f"s32[{layers},{weight.codes.size // layers}]" not in operands:
            missing.append(str(list(weight.shape)))
    return missing
