"""From counts of accepted drafts to acceptance by depth and rank."""

import numpy as np

from experiments.tree_drafts import DEPTH, RANKS, acceptance_of, comb


def test_acceptance_along_a_comb():
    tree = comb(2, 3)
    assert tree.paths == ((0,), (1,), (2,), (0, 0), (0, 1), (0, 2))
    # Of 100 steps the likeliest token was right in 60, the next in 20; after those 60, in 30, 6 and 3.
    found = acceptance_of(tree, 100, np.array([60, 20, 5, 30, 6, 3]))
    np.testing.assert_allclose(found, [[0.6, 0.2, 0.05], [0.5, 0.1, 0.05]])
    assert acceptance_of(tree, 0, np.zeros(6, int)) == [[0.0] * 3] * 2
    assert len(comb(DEPTH, RANKS).paths) == 30
