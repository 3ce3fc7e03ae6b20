"""Figures beside their targets."""

import pytest

from qwen38_jax.evaluation.figures import FIGURES, Figure, figures_table


@pytest.mark.parametrize(
    ("figure", "reached", "missed", "target"),
    [
        (Figure("", "", "tokens", 5, at_most=True), 5, 5.5, "at most 5"),
        (Figure("", "", "share", 0.9, over=True), 0.925, 0.9, "over 90.0 %"),
        (Figure("", "", "share", 0.65), 0.65, 0.649, "at least 65.0 %"),
        (Figure("", "", "points", 20), 20.0, 19.9, "at least +20.0 points"),
    ],
)
def test_targets(figure, reached, missed, target):
    assert figure.reached(reached) and not figure.reached(missed)
    assert figure.written_target == target


def test_table():
    copies = {"trials": 20, "exact": 0.5, "median_wrong_tokens": 2.0}
    drafts = {"accepted": 0.7, "positions": 2500, "new": {"accepted": 0.6, "positions": 900}}
    results = {
        "reproduce_2k": copies,
        "reproduce_6k": None,
        "rename": copies,
        "copy_256": {**copies, "exact": 0.95},
        "continuation": {"trials": 9, "model": 0.8, "ngram_greedy": 0.5, "ngram_sampled": 0.1, "points_ahead": 30.0},
        "mtp_acceptance": {k: drafts for k in ("chat", "prose", "code")},
        "perplexity": {
            k: {"perplexity": 12.346, "bits_per_byte": 1.5, "tokens": 10_000, "trials": 3} for k in ("prose", "code")
        },
    }
    lines = figures_table(results).split("\n")
    assert len(lines) == 2 + len(FIGURES) and len(set(map(len, lines))) == 1
    cells = {row[0]: row[1:] for line in lines if (row := [cell.strip() for cell in line.strip("|").split("|")])}
    assert cells["reproduces 2k tokens: wrong tokens, median"][::3] == ["2", "not reached"]
    assert cells["reproduces 6k tokens: wrong tokens, median"] == ["not measured", "", "at most 5", ""]
    assert cells["copies 256 random tokens: without an error"] == ["95.0 %", "20 trials", "over 90.0 %", "reached"]
    assert cells["MTP acceptance at position 1, code"][:2] == ["70.0 %", "2,500 positions"]
    assert cells["the same where the code does not repeat itself"] == ["60.0 %", "900 positions", "", ""]
    assert cells["perplexity a token of prose"] == ["12.35", "10,000 tokens", "", ""]
