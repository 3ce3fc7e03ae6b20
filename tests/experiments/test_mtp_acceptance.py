"""Walking over chains that were worked out offline."""

import numpy as np

from experiments.mtp_acceptance import walk


def test_walk():
    """A prompt of 2 tokens, an answer of 7: one step accepts both drafts, one the first; the last has room for none."""
    text = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9])
    right = np.stack([np.pad(text, (0, 9))[1 + d : 10 + d] for d in (1, 2)])  # of row t, token t + 1 + d
    wrong = np.zeros((2, 9), bool)
    # Anchors are the tokens at 2, then 5 (2 accepted), then 7 (1 accepted), whose only follower is the last token.
    wrong[1, 4] = True
    drafted, accepted, steps = walk(np.where(wrong, 0, right), text, 2)
    assert (drafted.tolist(), accepted.tolist(), steps) == ([2, 2], [2, 1], 3)
    drafted, accepted, steps = walk(np.zeros((2, 9), int), text, 2)
    assert (drafted.tolist(), accepted.tolist(), steps) == ([5, 4], [0, 0], 6)
