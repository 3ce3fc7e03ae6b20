"""Trees of drafts: shapes, the walk, and that the step emits with them what plain decoding does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from qwen38_jax.block import Block
from qwen38_jax.drafters.dflash2 import DFlash2
from qwen38_jax.drafters.interface import MTP, DraftContext, point_masses
from qwen38_jax.drafters.mtp import Mtp, mtp_forward
from qwen38_jax.drafters.selector import Lattice, tree_walk
from qwen38_jax.model import logits
from qwen38_jax.spec_config import SpecConfig
from qwen38_jax.state import flush
from qwen38_jax.tree import Tree, best_tree, expected_tokens, read_tree
from qwen38_jax.verification import walk_tree
from tests.models import SMALL, assert_same_up_to_rounding, nudged, prompt, small_params
from tests.speculation import CAPACITY, GREEDY, Scripted, assert_same_mtp_cache, generate, plain

#  0 --- 00 - 000        1 --- 10            2
#     \- 01 - 010           \- 11 - 110
#                              \--- 111 - 1111
TREE = Tree(
    ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 1, 0), (1, 1, 0), (1, 1, 1), (1, 1, 1, 1))
)
SPEC = SpecConfig(verify_tokens=len(TREE.paths), tree=TREE)
PROMPTS = [np.asarray(prompt(n, seed=n))[0].tolist() for n in (5, 21)]
NEW = 33


def test_shape():
    assert TREE.depth == 4 and TREE.ranks == 3
    assert TREE.parents.tolist() == [-1, 0, 0, 0, 1, 1, 2, 2, 4, 5, 7, 7, 11]
    assert TREE.depths.tolist() == [0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]
    assert np.flatnonzero(TREE.ancestors[12]).tolist() == [0, 2, 7, 11, 12]
    rows, parents, ranks = TREE.level(3)
    assert (rows.tolist(), parents.tolist(), ranks.tolist()) == ([8, 9, 10, 11], [4, 5, 7, 7], [0, 0, 0, 1])


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ((), "1 to 31 drafts"),
        (tuple((i,) for i in range(32)), "1 to 31 drafts"),
        (((1,), (0,)), "sorted"),
        (((0,), (0,)), "must differ"),
        (((0,), (1, 0)), "no parent"),
        (((-1,),), "rank below 0"),
        (((),), "no parent"),
    ],
)
def test_what_is_no_tree(paths, words):
    with pytest.raises(ValueError, match=words):
        Tree(paths)


def test_trees_from_files(tmp_path):
    path = tmp_path / "tree.json"
    path.write_text("[[0, 1], [1], [0]]")
    assert read_tree(path) == Tree(((0,), (1,), (0, 1)))
    for text in ("[[0, 1]]", "[0]", "{}", "[[true]]", "x", "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="tree.json: "):
            read_tree(path)


def test_a_tree_has_no_lookup_and_is_whole():
    with pytest.raises(ValueError, match="without a lookup"):
        SpecConfig(verify_tokens=len(TREE.paths), tree=TREE, lookup=True)
    with pytest.raises(ValueError, match="verified whole"):
        SpecConfig(verify_tokens=3, tree=TREE)


def test_best_tree():
    """Of all trees of a size none is expected to have more accepted; counted out over a small set."""
    acceptance = [[0.6, 0.25, 0.1], [0.5, 0.3, 0.05], [0.4, 0.35, 0.2]]
    every = [()]
    for level in acceptance:
        every += [(*path, r) for path in every if len(path) == len(every[-1]) for r in range(len(level))]
    worth = {path: float(np.prod([acceptance[i][r] for i, r in enumerate(path)])) for path in every[1:]}
    for drafts in (1, 2, 5, 9):
        tree = best_tree(acceptance, drafts)
        assert len(tree.paths) == drafts
        best = sum(sorted(worth.values(), reverse=True)[:drafts])
        assert np.isclose(expected_tokens(tree, acceptance), 1 + best)
    assert len(best_tree(acceptance, 31).paths) == 31 and len(best_tree([[0.5, 0.1]], 31).paths) == 2


def test_walk_equals_a_walk_by_hand():
    """Few tokens, so that paths are long and siblings are equal now and then; some drafts are not valid."""
    rng = np.random.default_rng(0)
    said, drafts = rng.integers(0, 3, (2000, 13)), rng.integers(0, 3, (2000, 12))
    valid = rng.random((2000, 12)) < 0.9
    valid = np.all(valid[:, None, :] | ~TREE.ancestors[1:, 1:], axis=2)
    verdict = jax.jit(walk_tree, static_argnames="tree")(*map(jnp.asarray, (said, drafts, valid)), tree=TREE)
    verdict = jax.device_get(verdict)
    depths = set()
    for b in range(2000):
        rows = [0]
        while True:
            following = np.flatnonzero(TREE.parents == rows[-1])
            fitting = [r for r in following if valid[b, r - 1] and drafts[b, r - 1] == said[b, rows[-1]]]
            if not fitting:
                break
            rows.append(int(fitting[0]))
        n = int(verdict.accepted[b])
        depths.add(n)
        assert verdict.rows[b, : n + 1].tolist() == rows
        assert verdict.tokens[b, : n + 1].tolist() == [int(said[b, r]) for r in rows]
    assert depths == {0, 1, 2, 3, 4}


@struct.dataclass
class ScriptedTree(Scripted):
    """Drafts of TREE: what follows in `text` where `right [drafts]` says so, else another token for each rank."""

    right: jax.Array

    draft_tokens = len(TREE.paths)

    def propose_tree(self, params, cfg, context: DraftContext, state, tree):
        at = context.position[:, None] + tree.depths[1:]
        tokens = jnp.take_along_axis(self.text, jnp.minimum(at, CAPACITY - 1), axis=1)
        ranks = np.array([path[-1] for path in tree.paths])
        tokens = jnp.where(self.right, tokens, (tokens + 1 + ranks) % cfg.vocab_size)
        return point_masses(tokens, jnp.ones(tokens.shape, bool), MTP), state


def script(sequences, path) -> ScriptedTree:
    """The draft `path` and those on the way to it are right, no others."""
    text = np.zeros((len(sequences), CAPACITY), np.int32)
    for row, sequence in enumerate(sequences):
        text[row, : len(sequence)] = sequence[:CAPACITY]
    right = [path[: len(p)] == p for p in TREE.paths]
    return ScriptedTree(jnp.asarray(text), jnp.zeros(0, bool), jnp.asarray(0), jnp.asarray(right))


def request(**fields):
    return dataclasses.replace(GREEDY, **{"max_new_tokens": NEW, **fields})


def run(drafter, requests=None, **options):
    return generate(small_params(), SMALL, drafter, SPEC, PROMPTS, requests or [request()] * 2, **options)


@functools.cache
def greedy():
    """What plain decoding says after PROMPTS, and the whole texts."""
    texts, _ = plain(small_params(), SMALL, PROMPTS, 60)
    return texts, [p + t for p, t in zip(PROMPTS, texts, strict=True)]


@pytest.mark.parametrize("path", [(), *TREE.paths])
def test_every_draft_of_the_tree_is_accepted_where_it_is_right(path):
    """Among them the second children at depths 1, 2, 3 and 4 at once."""
    texts, whole = greedy()
    got, state = run(script(whole, path))
    assert got == [t[:NEW] for t in texts]
    steps = -(-(NEW - 1) // (len(path) + 1))
    assert state.counts.steps.tolist() == [steps] * 2
    last = (NEW - 1) - (steps - 1) * (len(path) + 1) - 1  # drafts of the last, shorter step
    expected = [(path[: len(p)] == p) * (steps - 1 + (len(p) <= last)) for p in TREE.paths]
    assert state.counts.accepted[:, MTP].tolist() == [expected] * 2
    assert state.counts.drafted[0, MTP, :3].tolist() == [steps - (last == 0)] * 3
    for row, ids in enumerate(whole):
        n = len(PROMPTS[row]) + NEW
        np.testing.assert_array_equal(state.history[row, :n], ids[:n])


@pytest.mark.parametrize("path", [(), (2,), (1, 1), (0, 1, 0), (1, 1, 1, 1)])
def test_state_after_a_path_equals_that_of_single_tokens(path):
    """Recurrent state, convolution, keys and values, and what the drafter observed, with NaN in all that is free."""
    _, whole = greedy()
    _, state = run(script(whole, path), steps=1)
    _, single = plain(small_params(), SMALL, PROMPTS, len(path) + 2)
    _, off = plain(nudged(small_params()), SMALL, PROMPTS, len(path) + 2)
    assert_same_up_to_rounding(flush(state.decode.model), single.model, off.model)
    np.testing.assert_allclose(state.decode.hidden, single.hidden, atol=1e-4)
    assert_same_mtp_cache(state, [w[: len(p) + len(path) + 1] for w, p in zip(whole, PROMPTS, strict=True)])


def test_sampled_text_is_that_of_plain_sampling():
    """Token by token, since every token is drawn from the model with the noise of its position."""
    requests = [request(temperature=1.0, seed=5, top_k=20), request(temperature=0.7, seed=6, frequency_penalty=0.5)]
    texts, _ = plain(small_params(), SMALL, PROMPTS, NEW, requests)
    assert texts != [t[:NEW] for t in greedy()[0]]
    whole = [p + t for p, t in zip(PROMPTS, texts, strict=True)]
    for path, steps in (((1, 1, 1, 1), 7), ((0, 1), 11), ((), 32)):
        got, state = run(script(whole, path), requests)
        assert got == texts and state.counts.steps.tolist() == [steps] * 2


def test_stop_ids_and_limits_at_every_depth():
    texts, whole = greedy()
    drafter = script(whole, (1, 1, 1, 1))
    for place in range(7):
        stop = texts[0][place]
        got, _ = run(drafter, [request(stop_token_ids=(stop,)), request(max_new_tokens=place + 1)])
        assert got == [texts[0][: texts[0].index(stop) + 1], texts[1][: place + 1]]


def chain_context(state, anchor) -> DraftContext:
    old = state.decode
    return DraftContext(
        anchor=anchor,
        position=old.model.lengths,
        hidden=old.hidden,
        history=state.history,
        active=old.active,
        sampler=old.sampler,
        block_table=old.model.block_table,
    )


def test_mtp_trees_follow_every_branch():
    """Each draft is the token that a chain proposes which was led to its parent."""
    params = small_params()
    _, whole = greedy()
    _, state = run(script(whole, ()), steps=3)
    context = chain_context(state, state.decode.token)
    mtp = Mtp(None, 4)
    propose_tree = jax.jit(mtp.propose_tree, static_argnames=("cfg", "tree"))
    tree, _ = propose_tree(params, cfg=SMALL, context=context, state=state.drafter, tree=TREE)
    assert tree.valid.all() and tree.point_mass.all()

    @jax.jit
    def one(token, hidden, cache, at):
        block = Block(token[:, None], at[:, None], context.active[:, None])
        rows, cache = mtp_forward(params, SMALL, block, hidden[:, None], cache, context.block_table, at)
        return rows[:, 0], jnp.argsort(-logits(params, rows[:, 0]), axis=-1), cache

    for path in [path for path in TREE.paths if len(path) >= 2]:
        token, hidden, cache = context.anchor, context.hidden, state.drafter
        for depth, rank in enumerate(path):
            hidden, ranked, cache = one(token, hidden, cache, context.position - 1 + depth)
            token = ranked[:, rank]
            np.testing.assert_array_equal(tree.tokens[:, TREE.paths.index(path[: depth + 1])], token)


def test_dflash2_trees_follow_every_branch():
    rng = np.random.default_rng(0)
    lattice = Lattice(
        jnp.asarray(rng.permuted(np.tile(np.arange(50), (2, 4, 1)), axis=2)[:, :, :4]),
        jnp.asarray(rng.normal(size=(2, 4, 4, 4)), jnp.float32),
    )
    got = np.asarray(tree_walk(lattice, TREE))
    ids, scores = map(np.asarray, lattice)
    for b in range(2):
        for i, path in enumerate(TREE.paths):
            chosen = 0
            for depth, rank in enumerate(path):
                chosen = int(np.argsort(-scores[b, depth, chosen])[rank])
            assert got[b, i] == ids[b, len(path) - 1, chosen]


def test_a_tree_beyond_the_block_of_dflash2():
    from tests.drafters.dflash2_golden import CFG

    deep = Tree(tuple((0,) * n for n in range(1, 9)))
    wide = Tree(tuple((rank,) for rank in range(17)))
    for tree in (deep, wide):
        with pytest.raises(ValueError, match="16 candidates in each of 7 places"):
            DFlash2(None, CFG).propose_tree(None, None, None, None, tree)
