"""What a small checkpoint must reach, and how a record of measurements compares with it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number of a record's results, and its target if it has one.

    Attributes:
      name: what it is, in words.
      path: where it stands in the results, keys joined by dots.
      unit: how it is written: a share in per cent, a count, points of a hundred, or a plain number.
      target: None for what is reported only. at_most, or else at least; strictly more than that if `over`.
    """

    name: str
    path: str
    unit: Literal["share", "tokens", "points", "number"]
    target: float | None = None
    at_most: bool = False
    over: bool = False

    def value(self, results: Mapping[str, Any]) -> float | None:
        """The measured number; None where it was not measured."""
        value: Any = results
        for key in self.path.split("."):
            value = None if value is None else value.get(key)
        return value

    def reached(self, value: float) -> bool:
        if self.at_most:
            return value <= self.target
        return value > self.target if self.over else value >= self.target

    def write(self, value: float) -> str:
        if self.unit == "share":
            return f"{100 * value:.1f} %"
        return {"tokens": "{:g}", "points": "{:+.1f} points", "number": "{:,.4g}"}[self.unit].format(value)

    @property
    def written_target(self) -> str:
        if self.target is None:
            return ""
        relation = "at most" if self.at_most else "over" if self.over else "at least"
        return f"{relation} {self.write(self.target)}"


# Greedy, on held-out documents.
FIGURES = (
    Figure("reproduces 2k tokens: wrong tokens, median", "reproduce_2k.median_wrong_tokens", "tokens", 1, True),
    Figure("reproduces 2k tokens: without an error", "reproduce_2k.exact", "share"),
    Figure("reproduces 6k tokens: wrong tokens, median", "reproduce_6k.median_wrong_tokens", "tokens", 5, True),
    Figure("reproduces 6k tokens: without an error", "reproduce_6k.exact", "share"),
    Figure("renames in a 100-line source file: exactly right", "rename.exact", "share", 0.9, over=True),
    Figure("copies 256 random tokens: without an error", "copy_256.exact", "share", 0.9, over=True),
    Figure("continues Python: bodies that parse", "continuation.model", "share"),
    Figure("the same of a 5-gram model, greedy", "continuation.ngram_greedy", "share"),
    Figure("the same of a 5-gram model, sampled", "continuation.ngram_sampled", "share"),
    Figure("ahead of the better of these", "continuation.points_ahead", "points", 20),
    Figure("MTP acceptance at position 1, chat", "mtp_acceptance.chat.accepted", "share", 0.65),
    Figure("MTP acceptance at position 1, prose", "mtp_acceptance.prose.accepted", "share", 0.65),
    Figure("MTP acceptance at position 1, code", "mtp_acceptance.code.accepted", "share", 0.75),
    Figure("the same where the chat does not repeat itself", "mtp_acceptance.chat.new.accepted", "share"),
    Figure("the same where the prose does not repeat itself", "mtp_acceptance.prose.new.accepted", "share"),
    Figure("the same where the code does not repeat itself", "mtp_acceptance.code.new.accepted", "share"),
    Figure("perplexity a token of prose", "perplexity.prose.perplexity", "number"),
    Figure("perplexity a token of code", "perplexity.code.perplexity", "number"),
    Figure("bits a byte of prose", "perplexity.prose.bits_per_byte", "number"),
    Figure("bits a byte of code", "perplexity.code.bits_per_byte", "number"),
)
HEADINGS = ("held-out figure", "measured", "of", "target", "reached")


def figures_table(results: Mapping[str, Any]) -> str:
    """A Markdown table of all figures, aligned for a terminal too."""
    return markdown([HEADINGS, *(_row(figure, results) for figure in FIGURES)])


def tasks_table(results: Mapping[str, Any]) -> str:
    """The task families, read teacher-forced: right tokens, and answers that are right throughout."""
    share = Figure("", "", "share").write
    rows = [(name, share(t["accuracy"]), share(t["exact"]), str(t["trials"])) for name, t in results["tasks"].items()]
    return markdown([("task", "tokens right", "answers exactly right", "of"), *rows])


def _row(figure: Figure, results: Mapping[str, Any]) -> tuple[str, ...]:
    value = figure.value(results)
    if value is None:
        return (figure.name, "not measured", "", figure.written_target, "")
    reached = "" if figure.target is None else "reached" if figure.reached(value) else "not reached"
    return (figure.name, figure.write(value), _sample(figure, results), figure.written_target, reached)


def _sample(figure: Figure, results: Mapping[str, Any]) -> str:
    """How many trials, positions or tokens the figure is made of."""
    parent = dataclasses.replace(figure, path=figure.path.rpartition(".")[0]).value(results)
    count = next(name for name in ("positions", "tokens", "trials") if name in parent)
    return f"{parent[count]:,} {count}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its head."""
    widths = [max(3, *map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)
