"""Padding, chunks, partial commits and trees: every way of feeding the same tokens must leave the same state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen38_jax.block import Block, ancestors, chain_block
from qwen38_jax.layers import gated_delta_net as gdn
from qwen38_jax.layers.attention import pages_at_once
from qwen38_jax.model import forward
from qwen38_jax.state import (
    StateConfig,
    abstract_state,
    accept,
    accept_path,
    check_block,
    flush,
    init_state,
    write_rows,
)
from tests.models import (
    SMALL,
    assert_same_state,
    assert_same_up_to_rounding,
    committed,
    extend,
    nudged,
    poisoned_state,
    prompt,
    run,
    small_params,
)

SIZES = StateConfig(batch=1, capacity=128, rows=16, page=8)
# Some drawn prompts amplify fp32 rounding to 4e-4 in these random layers; a wrong row is off by 0.1 and more.
LOOSE = 3e-3


@pytest.fixture(scope="module")
def base():
    """A poisoned state that has read 21 tokens, in the middle of a page."""
    state = poisoned_state(SMALL, SIZES)
    return extend(small_params(), SMALL, state, prompt(21), chunk=7)[1]


@pytest.mark.parametrize("bucket", [8, 64, 128, 512])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_to_a_bucket_changes_nothing(bucket, side):
    params, tokens = small_params(), prompt(5)
    expected, reference = extend(params, SMALL, init_state(SMALL, SIZES), tokens, chunk=1)
    first = 0 if side == "right" else bucket - 5
    padded = jnp.full((1, bucket), 63).at[:, first : first + 5].set(tokens)
    rows = jnp.arange(bucket)[None]
    block = chain_block(padded, jnp.zeros(1, jnp.int32), (rows >= first) & (rows < first + 5))
    hidden, _, state = run(params, SMALL, block, poisoned_state(SMALL, SIZES), commit=True)
    np.testing.assert_allclose(hidden[:, first : first + 5], expected, atol=1e-4, rtol=1e-4)
    assert_same_state(state, reference)
    follow_up = [extend(params, SMALL, s, prompt(20, seed=1), chunk=1)[0] for s in (state, reference)]
    np.testing.assert_allclose(*follow_up, atol=1e-4, rtol=1e-4)


def test_rows_of_a_batch_do_not_meet():
    """Three prompts of different lengths in one padded batch, beside an idle row that must stay as it was."""
    params, lengths = small_params(), [5, 16, 1, 0]
    tokens, valid = prompt(16, batch=4), jnp.arange(16) < jnp.asarray(lengths)[:, None]
    sizes = StateConfig(batch=4, capacity=128, rows=16, page=8)
    state = poisoned_state(SMALL, sizes)
    _, _, batch = run(params, SMALL, chain_block(tokens, state.lengths, valid), state, commit=True)
    for row, n in enumerate(lengths):
        single = init_state(SMALL, SIZES)
        if n:
            _, single = extend(params, SMALL, single, tokens[row : row + 1, :n], chunk=1)
        np.testing.assert_allclose(batch.recurrent[:, row], single.recurrent[:, 0], atol=1e-4)
        np.testing.assert_allclose(batch.conv[:, row], single.conv[:, 0], atol=1e-4)
        np.testing.assert_allclose(
            committed(batch, batch.kv.k)[:, row, :n], committed(single, single.kv.k)[:, 0, :n], atol=1e-4
        )
    pages = np.asarray(batch.block_table[3])
    assert np.isnan(np.asarray(batch.kv.k)[:, pages]).all(), "an idle row's pages were written"


@pytest.fixture(scope="module", params=["usual", "strong", "none"])
def decaying(request):
    """Parameters whose decay a token is as drawn, about exp(-30), or 1."""
    params = small_params()
    if request.param != "usual":
        mixer = params.linear.mixer
        A_log, dt_bias = {"strong": (0.0, 30.0), "none": (-40.0, 0.0)}[request.param]
        mixer = mixer.replace(A_log=jnp.full_like(mixer.A_log, A_log), dt_bias=jnp.full_like(mixer.dt_bias, dt_bias))
        params = params.replace(linear=params.linear.replace(mixer=mixer))
    return params


def test_every_number_of_accepted_rows_of_every_block(decaying):
    """After a block of 1 to 16 rows of which n are kept, all is as if just those n had been fed one by one."""
    params, drafts = decaying, prompt(16, seed=2)

    def one_by_one(params):
        states, rows = [extend(params, SMALL, poisoned_state(SMALL, SIZES), prompt(21), chunk=7)[1]], []
        for n in range(16):
            row, state = extend(params, SMALL, states[-1], drafts[:, n : n + 1])
            states.append(state)
            rows.append(row[:, 0])
        return states, rows

    references, singles = one_by_one(params)
    off, _ = one_by_one(nudged(params))
    start = references[0]
    next_block = chain_block(prompt(16, seed=3), start.lengths)
    for length in range(1, 17):
        block = chain_block(drafts, start.lengths, jnp.arange(16)[None] < length)
        hidden, _, pending = run(params, SMALL, block, start, commit=False)
        np.testing.assert_allclose(hidden[0, :length], jnp.concatenate(singles)[:length], atol=LOSE)
        for n in range(length + 1):
            state = ACCEPT(pending, jnp.array([n]))
            assert_same_up_to_rounding(FLUSH(state), FLUSH(references[n]), FLUSH(off[n]))
        # The next block finds the same state without a flush, whatever the dropped rows left behind.
        block = next_block.replace(positions=next_block.positions + n)
        after, expected = (run(params, SMALL, block, s, commit=False)[0] for s in (state, references[n]))
        np.testing.assert_allclose(after, expected, atol=LOSE)


# A wrong row is off by 0.1; rounding alone reaches 3e-4 in a few entries of some draws of the weights.
LOSE = 1e-3
ACCEPT, FLUSH = jax.jit(accept), jax.jit(flush)


def test_no_more_is_accepted_than_there_is(base):
    """More rows than the block has, padding, a second time, or after a committed call: lengths and state stay sound."""
    params = small_params()
    block = chain_block(prompt(16, seed=5), base.lengths, jnp.arange(16)[None] < 3)
    _, _, pending = run(params, SMALL, block, base, commit=False)
    three = accept(pending, jnp.array([3]))
    assert_same_state(flush(accept(pending, jnp.array([99]))), flush(three), atol=0)
    assert_same_state(flush(accept(three, jnp.array([2]))), flush(three), atol=0)
    _, state = extend(params, SMALL, three, prompt(7, seed=6))
    assert_same_state(flush(accept(state, jnp.array([2]))), flush(state), atol=0)
    idle = chain_block(prompt(16, seed=5), base.lengths, jnp.zeros((1, 16), bool))
    _, _, nothing = run(params, SMALL, idle, base, commit=False)
    assert_same_state(flush(accept(nothing, jnp.array([1]))), flush(base), atol=0)


def test_drafts_that_are_always_wrong_leave_no_trace():
    """200 steps of which only the anchor is ever kept, beside a live neighbour in the last slot."""
    params = small_params()
    sizes = StateConfig(batch=2, capacity=256, rows=16, page=8)
    state = poisoned_state(SMALL, sizes)
    valid = jnp.array([[True] * 4 + [False] * 12, [False] * 16])
    neighbour = run(params, SMALL, chain_block(prompt(16, batch=2), state.lengths, valid[::-1]), state, commit=True)[2]
    anchors, state = prompt(200, seed=8), neighbour
    rng = np.random.default_rng(0)
    for step in range(200):
        tokens = jnp.asarray(rng.integers(0, 64, (2, 16))).at[0, 0].set(anchors[0, step])
        _, _, state = run(params, SMALL, chain_block(tokens, state.lengths, valid), state, commit=False)
        state = ACCEPT(state, jnp.array([1, 1]))
    state = flush(state)
    _, alone = extend(params, SMALL, init_state(SMALL, StateConfig(1, 256, rows=16, page=8)), anchors, chunk=7)
    np.testing.assert_allclose(state.recurrent[:, 0], alone.recurrent[:, 0], atol=1e-3, rtol=1e-3)
    np.testing.assert_array_equal(state.lengths, [200, 4])
    np.testing.assert_array_equal(state.recurrent[:, 1], neighbour.recurrent[:, 1])
    np.testing.assert_array_equal(state.conv[:, 1], neighbour.conv[:, 1])
    pages = np.asarray(state.block_table[1])
    np.testing.assert_array_equal(state.kv.k[:, pages], neighbour.kv.k[:, pages])


@given(st.data())
@settings(deadline=None, max_examples=25)
def test_any_padding_of_any_prompt(data):
    """A prompt of up to 16 tokens anywhere in a bucket of 16."""
    n = data.draw(st.integers(1, 16))
    first = data.draw(st.integers(0, 16 - n))
    tokens = prompt(n, seed=data.draw(st.integers(0, 99)))
    filler = data.draw(st.integers(0, 63))
    padded = jnp.full((1, 16), filler).at[:, first : first + n].set(tokens)
    rows = jnp.arange(16)[None]
    block = chain_block(padded, jnp.zeros(1, jnp.int32), (rows >= first) & (rows < first + n))
    hidden, _, state = run(small_params(), SMALL, block, poisoned_state(SMALL, SIZES), commit=True)
    expected, reference = extend(small_params(), SMALL, init_state(SMALL, SIZES), tokens, chunk=1)
    np.testing.assert_allclose(hidden[:, first : first + n], expected, atol=LOOSE, rtol=LOOSE)
    assert_same_state(state, reference, atol=LOOSE)


@given(st.lists(st.integers(1, 16), min_size=1, max_size=6))
@settings(deadline=None, max_examples=15)
def test_any_chunks_equal_single_tokens(cuts):
    params, tokens = small_params(), prompt(sum(cuts), seed=len(cuts))
    state, at = poisoned_state(SMALL, SIZES), 0
    for cut in cuts:
        _, state = extend(params, SMALL, state, tokens[:, at : at + cut], chunk=16)
        at += cut
    _, reference = extend(params, SMALL, init_state(SMALL, SIZES), tokens, chunk=1)
    assert_same_state(state, reference, atol=LOOSE)


def test_pending_rows_are_gone_when_none_is_accepted(base):
    params = small_params()
    _, _, pending = run(params, SMALL, chain_block(prompt(4, seed=5), base.lengths), base, commit=False)
    assert_same_state(flush(pending), flush(base), atol=0)


def test_poisoned_rejected_rows_do_no_harm(base):
    _, _, pending = run(small_params(), SMALL, chain_block(prompt(4, seed=5), base.lengths), base, commit=False)
    clean = flush(accept(pending, jnp.array([2])))

    def poison(t):
        return t.at[:, :, 2:].set(jnp.nan)

    rows = pending.pending
    rows = rows.replace(writes=jax.tree.map(poison, rows.writes), k=poison(rows.k), v=poison(rows.v))
    assert_same_state(flush(accept(pending.replace(pending=rows), jnp.array([2]))), clean, atol=0)


def test_half_precision_state_is_rounded_when_it_is_committed(base):
    """The next block reads what is stored, so a flush in between changes nothing, bit for bit."""
    params = small_params()
    state = base.replace(recurrent=base.recurrent.astype(jnp.float16))
    _, _, state = run(params, SMALL, chain_block(prompt(4, seed=5), state.lengths), state, commit=False)
    state = accept(state, jnp.array([3]))
    block = chain_block(prompt(4, seed=6), state.lengths)
    fused, flushed = (run(params, SMALL, block, s, commit=False) for s in (state, flush(state)))
    np.testing.assert_array_equal(fused[0], flushed[0])
    assert_same_state(flush(fused[2]), flush(flushed[2]), atol=0)


# Two branches after the anchor, one of which splits again:  0 - 1 - 2 - 5
#                                                             \    \- 4
#                                                              3
PARENTS = [-1, 0, 1, 0, 1, 2]
DEPTHS = [0, 1, 2, 1, 2, 3]


@pytest.mark.parametrize("path", [[0], [0, 3], [0, 1, 4], [0, 1, 2, 5], []])
def test_tree_equals_each_of_its_paths(base, path):
    params, tokens = small_params(), prompt(6, seed=4)
    block = Block(tokens, base.lengths[:, None] + jnp.array([DEPTHS]), jnp.ones((1, 6), bool), jnp.array([PARENTS]))
    hidden, _, pending = run(params, SMALL, block, base, commit=False)
    reference = base
    for row in path:
        single, reference = extend(params, SMALL, reference, tokens[:, row : row + 1])
        np.testing.assert_allclose(hidden[:, row], single[:, 0], atol=1e-4, rtol=1e-4)
    keep = jnp.isin(jnp.arange(16), jnp.array(path, jnp.int32))[None]
    assert_same_state(flush(accept_path(pending, keep)), flush(reference))


@pytest.mark.parametrize("first", [0, 2])
def test_padded_tree(base, first):
    """Padding on either side of a tree changes nothing."""
    params, tokens, rows = small_params(), prompt(6, seed=4), slice(first, first + 6)
    plain = Block(tokens, base.lengths[:, None] + jnp.array([DEPTHS]), jnp.ones((1, 6), bool), jnp.array([PARENTS]))
    empty = jnp.zeros((1, 16), jnp.int32)
    parents = jnp.array([[p + first if p >= 0 else -1 for p in PARENTS]])
    padded = Block(
        tokens=empty.at[:, rows].set(tokens),
        positions=empty.at[:, rows].set(plain.positions),
        valid=(empty > 0).at[:, rows].set(True),
        parents=(empty - 1).at[:, rows].set(parents),
    )
    check_block(SMALL, padded, base)
    expected = run(params, SMALL, plain, base, commit=False)[0]
    hidden = run(params, SMALL, padded, base, commit=False)[0]
    np.testing.assert_allclose(hidden[:, rows], expected, atol=1e-4, rtol=1e-4)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=24))
@settings(deadline=None, max_examples=30)
def test_ancestors_of_any_tree(numbers):
    parents = [number % (i + 1) - 1 for i, number in enumerate(numbers)]
    n = len(parents)
    expected = np.eye(n, dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            expected[i] |= expected[parent]
    zeros = jnp.zeros((1, n), jnp.int32)
    block = Block(zeros, zeros, jnp.ones((1, n), bool), jnp.array([parents]))
    np.testing.assert_array_equal(ancestors(block)[0], expected)


@pytest.mark.parametrize("length", [1, 5, 64, 65, 200])
@pytest.mark.parametrize("decay", [0.0, -30.0, "mixed"])
def test_chunked_rule_equals_the_recurrence(length, decay):
    rng = np.random.default_rng(length)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    g = -jnp.abs(normal(2, length, 4)) if decay == "mixed" else jnp.full((2, length, 4), decay)
    unit = lambda t: t / jnp.linalg.norm(t, axis=-1, keepdims=True)  # noqa: E731
    inputs = gdn.Inputs(
        unit(normal(2, length, 2, 8)), unit(normal(2, length, 2, 8)), normal(2, length, 4, 12), g,
        jax.nn.sigmoid(normal(2, length, 4)),
    )  # fmt: skip
    state = normal(2, 4, 8, 12)
    block = chain_block(jnp.zeros((2, length), jnp.int32), jnp.zeros(2, jnp.int32))
    out, delta, log_decay, after = jax.jit(gdn.delta_rule)(inputs, state, block)
    expected, expected_after = jax.jit(gdn.recurrent_delta_rule)(inputs, state)
    np.testing.assert_allclose(out, expected, atol=1e-4)
    np.testing.assert_allclose(after, expected_after, atol=1e-4)
    if length <= gdn.CHUNK:
        path = jnp.ones((2, length), bool)
        kept = gdn.keep_rows(state, gdn.Writes(inputs.k, delta, log_decay, jnp.zeros(0)), path)
        np.testing.assert_allclose(kept, expected_after, atol=1e-4)


@pytest.mark.parametrize("n", [1, 2, 3, 16, 33, 64])
def test_inverse_of_the_chunk_matrix(n):
    """Also for equal keys without decay, where powers of the matrix overflow what fp32 can cancel."""
    random = np.tril(np.random.default_rng(n).uniform(-1, 1, (2, n, n)) / n**0.5, -1)
    ones = np.tril(np.ones((1, n, n)), -1)
    for lower in (random, ones):
        upper = np.triu(np.full(lower.shape, 7.0))  # not part of the matrix
        inverse = gdn.unit_lower_inverse(jnp.asarray(lower + upper, jnp.float32))
        np.testing.assert_allclose(inverse, np.linalg.inv(np.eye(n) + lower), atol=1e-5)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_any_rows_kept_of_any_layer_block(data):
    """Layer level, fp32: n rows of a block of 16, under weak and extreme decay, with NaN in the rows dropped."""
    n = data.draw(st.integers(0, 16))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    decay = data.draw(st.sampled_from([0.0, -1.0, -30.0, -200.0]))
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    q, k = (t / jnp.linalg.norm(t, axis=-1, keepdims=True) for t in (normal(1, 16, 2, 8), normal(1, 16, 2, 8)))
    g = decay * jnp.asarray(rng.random((1, 16, 4)), jnp.float32)
    inputs = gdn.Inputs(q, k, normal(1, 16, 4, 12), g, jnp.asarray(rng.random((1, 16, 4)), jnp.float32))
    state = normal(1, 4, 8, 12)
    block = chain_block(jnp.zeros((1, 16), jnp.int32), jnp.zeros(1, jnp.int32))
    _, delta, log_decay, _ = _RULE(inputs, state, block)
    kept = jnp.arange(16)[None] < n
    poisoned = (jnp.where(kept[..., None], t.reshape(1, 16, -1), jnp.nan).reshape(t.shape) for t in
                (inputs.k, delta, log_decay))  # fmt: skip
    after = _KEEP(state, gdn.Writes(*poisoned, jnp.zeros(0)), kept)
    masked = gdn.Inputs(*(jnp.where(kept.reshape(1, 16, *[1] * (t.ndim - 2)), t, 0.0) for t in inputs))
    np.testing.assert_allclose(after, _RECURRENCE(masked, state)[1], atol=1e-4)


_RULE, _KEEP, _RECURRENCE = jax.jit(gdn.delta_rule), jax.jit(gdn.keep_rows), jax.jit(gdn.recurrent_delta_rule)


def test_row_without_a_page_is_dropped_not_wrapped():
    state = init_state(SMALL, StateConfig(1, 16, page=8))
    state = state.replace(block_table=jnp.array([[0, 2]]))  # the second page is not assigned: 2 is out of range
    k = jnp.ones((1, 3, 2, 16))
    kv = write_rows(state.kv, 0, state.block_table, k, k, jnp.array([[0, 8, 16]]), jnp.ones((1, 3), bool))
    written = np.argwhere(np.asarray(kv.k[0, :, :, 0, 0]))
    np.testing.assert_array_equal(written, [[0, 0]])
    assert not np.asarray(kv.k[1]).any(), "another layer was written"


def test_donated_buffers_and_snapshots():
    """Three donating steps from a snapshot equal three that keep their buffers, and the snapshot stays as it was."""
    params = small_params()
    donating = jax.jit(run.__wrapped__, static_argnames=("cfg", "commit"), donate_argnames="state")
    _, state = extend(params, SMALL, init_state(SMALL, SIZES), prompt(7), chunk=7)
    snapshot, kept = jax.tree.map(np.array, state), state
    before = jax.tree.map(np.copy, snapshot)
    for _ in range(2):
        donated = jax.tree.map(jnp.array, snapshot)
        for step in range(3):
            block = chain_block(prompt(1, seed=step), donated.lengths)
            given_away, (_, _, donated) = donated, donating(params, SMALL, block, donated, commit=True)
            assert given_away.kv.k.is_deleted() and given_away.recurrent.is_deleted()
    for step in range(3):
        _, kept = extend(params, SMALL, kept, prompt(1, seed=step))
    jax.tree.map(np.testing.assert_array_equal, donated, kept)
    jax.tree.map(np.testing.assert_array_equal, snapshot, before)


def test_a_step_copies_no_cache():
    """What a step needs beside its arguments does not grow with the room that the caches have."""
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), small_params())
    step = jax.jit(run.__wrapped__, static_argnames=("cfg", "commit"), donate_argnames="state")
    row = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    needed = []
    for capacity in (512, 8192):
        state = abstract_state(SMALL, StateConfig(1, capacity))
        block = Block(row, row, jax.ShapeDtypeStruct((1, 1), jnp.bool_))
        compiled = step.lower(params, SMALL, block, state, commit=True).compile()
        needed.append(compiled.memory_analysis().temp_size_in_bytes)
    table = 4 * (8192 - 512) // 64
    assert needed[1] - needed[0] <= 2 * table, needed  # the block table itself may be copied


def test_page_sizes_and_capacities():
    for page, capacity in [(16, 640), (32, 700), (64, 513), (8, 9), (1024, 5000)]:
        sizes = StateConfig(1, capacity, page=page)
        assert sizes.pages_per_sequence * page >= capacity
        assert sizes.pages_per_sequence % pages_at_once(page, sizes.pages_per_sequence) == 0
    for field in ("batch", "capacity", "page"):
        with pytest.raises(ValueError, match=field):
            StateConfig(**{"batch": 1, "capacity": 8, field: 0})
    with pytest.raises(ValueError, match="rows"):
        StateConfig(1, 8, rows=-1)


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_one_bad_index_is_an_error_outside_a_trace(data):
    """Inside a compiled program it would be clamped, wrapped or dropped, and the answer would look plausible."""
    state = init_state(SMALL, StateConfig(2, 32, rows=8, page=8))
    block = chain_block(prompt(6, batch=2), jnp.array([3, 20])).replace(
        parents=jnp.broadcast_to(jnp.arange(6) - 1, (2, 6))
    )
    check_block(SMALL, block, state)
    where = (data.draw(st.integers(0, 1)), data.draw(st.integers(0, 5)))
    field, bad = data.draw(
        st.sampled_from(
            [("tokens", [-1, 64, 2**30]), ("positions", [-1, 32]), ("parents", [-2, 6]), ("table", [-1, 9])]
        )
    )
    value = data.draw(st.sampled_from(bad))
    if field == "table":
        state = state.replace(block_table=state.block_table.at[where[0], where[1] % 4].set(value))
    else:
        block = block.replace(**{field: getattr(block, field).at[where].set(value)})
    with pytest.raises(ValueError, match=r"not in \[0|no page"):
        check_block(SMALL, block, state)
    if field == "tokens":
        rows = jnp.arange(6) > where[1]  # padding may hold anything
        check_block(SMALL, block.replace(valid=jnp.broadcast_to(rows, (2, 6)), parents=None), state)


def test_position_without_a_page_is_an_error_outside_a_trace():
    state = init_state(SMALL, StateConfig(1, 16, page=8))
    state = state.replace(block_table=jnp.array([[0, 2]]))
    with pytest.raises(ValueError, match="position 8 has no page"):
        forward(small_params(), SMALL, chain_block(prompt(2), jnp.array([7])), state, commit=True)


@pytest.mark.parametrize(
    "rows,length,parents,commit,words",
    [(0, 1, False, False, "0 rows pending"), (4, 5, False, False, "4 rows"), (8, 4, True, True, "tree")],
)
def test_blocks_that_do_not_fit_are_refused(rows, length, parents, commit, words):
    state = init_state(SMALL, StateConfig(1, 16, rows=rows, page=8))
    block = chain_block(prompt(length), state.lengths)
    if parents:
        block = block.replace(parents=jnp.arange(length)[None] - 1)
    with pytest.raises(ValueError, match=words):
        run(small_params(), SMALL, block, state, commit=commit)
