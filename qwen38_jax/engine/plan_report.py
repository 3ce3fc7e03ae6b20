"""A plan against a budget, as a table for a terminal and as JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from qwen38_jax.engine.memory import Budget
from qwen38_jax.engine.plan import Plan, Settings, Weights, alternatives, make_plan


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run needs, what there is, and what would fit in its place.

    Attributes:
      budget: None where nothing tells how much memory there is.
      fitting: changes in words with the bytes that the run then needs; empty if it fits as it is.
    """

    weights: Weights
    settings: Settings
    plan: Plan
    budget: Budget | None
    fitting: tuple[tuple[str, int], ...]

    @property
    def fits(self) -> bool:
        return self.budget is None or self.plan.nbytes <= self.budget.nbytes


def make_report(weights: Weights, settings: Settings, budget: Budget | None) -> Report:
    """Plans a run; ValueError as `make_plan`."""
    plan = make_plan(weights, settings)
    fitting = []
    if budget is not None and plan.nbytes > budget.nbytes:
        fitting = alternatives(weights, settings, budget)
    return Report(weights, settings, plan, budget, tuple(fitting))


def to_json(report: Report) -> dict[str, Any]:
    """The report in JSON's types; all sizes in bytes."""
    sizes = report.settings.sizes(report.weights.cfg)
    return {
        "fits": report.fits,
        "total": report.plan.nbytes,
        "budget": None if report.budget is None else dataclasses.asdict(report.budget),
        "items": [dataclasses.asdict(item) for item in report.plan.items],
        "fitting": [{"change": words, "total": nbytes} for words, nbytes in report.fitting],
        "settings": dataclasses.asdict(report.settings),
        "set_up": {"slots": sizes.batch, "tokens": sizes.capacity},
        "dtype": report.weights.cfg.dtype,
    }


def to_text(report: Report) -> str:
    """The report as lines for a terminal."""
    lines = [("part", "what", "how", "GiB", "bytes")]
    lines += [(item.part, item.name, item.detail, *_size(item.nbytes)) for item in report.plan.items]
    total, budget = report.plan.nbytes, report.budget
    lines.append(("total", "", "", *_size(total)))
    if budget is not None:
        if budget.reserve:
            lines.append(("reserve", "CUDA context, libraries, graphs", "beside the arrays", *_size(budget.reserve)))
        lines.append(("there are", "", budget.source, *_size(budget.nbytes + budget.reserve)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [_line(cells, widths) for cells in lines]
    if budget is not None:
        spare = budget.nbytes - total
        verdict = f"fits, {_gib(spare)} to spare" if spare >= 0 else f"does not fit: {_gib(-spare)} too much"
        text += ["", verdict]
    text += [f"  would fit: {words} ({_gib(nbytes)})" for words, nbytes in report.fitting]
    if not report.fits and not report.fitting:
        text.append("  no change of these settings, and no format read here, would fit")
    return "\n".join(text)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:3], widths[:3], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[3:], widths[3:], strict=True)]
    return "  ".join((*left, *right)).rstrip()


def _size(nbytes: int) -> tuple[str, str]:
    return f"{nbytes / 2**30:.3f}", f"{nbytes:,}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
