"""Plans are held against arrays that were really allocated, and against the published sizes of the 27B model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from qwen38_jax import decode, speculative
from qwen38_jax.checkpoint import load_checkpoint, load_drafter, synthetic
from qwen38_jax.checkpoint.drafter import drafter_account
from qwen38_jax.checkpoint.load import sound_account
from qwen38_jax.checkpoint.synthetic import account, recipe, stored_as, write
from qwen38_jax.drafters.dflash2 import DFlash2
from qwen38_jax.drafters.lookup import NoDrafter
from qwen38_jax.drafters.mtp import Mtp
from qwen38_jax.engine.memory import Budget, NotEnoughMemory
from qwen38_jax.engine.plan import Settings, Weights, alternatives, chunk_lengths, make_plan, require_fit
from qwen38_jax.params import tree_bytes
from qwen38_jax.sampling import sampler_state
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.spec_config import SpecConfig
from qwen38_jax.state import init_state

GIB = 2**30


@functools.cache
def full(like: str, drafter: str | None = None) -> Weights:
    return Weights.of_accounts(account(recipe(like)), account(recipe(drafter)) if drafter else None)


def sizes(plan, part=None) -> dict[str, int]:
    """Bytes by name, summed over formats."""
    names = [item.name for item in plan.items if part in (None, item.part)]
    return {name: sum(item.nbytes for item in plan.items if item.name == name) for name in names}


@pytest.mark.parametrize("like", ["qwen3.8-27b", "qwen3.8-27b-w4a16", "qwen3.8-27b-fast", "qwen3.8-27b-fp8"])
def test_weights_are_the_bytes_that_loading_allocates(tmp_path, like):
    write(tmp_path / "m", recipe(like, scale="small", layers=4))
    write(tmp_path / "d", recipe("qwen3.8-27b-dflash2-w4a16", scale="small"))
    found = sound_account(tmp_path / "m")[0]
    found = dataclasses.replace(found, cfg=dataclasses.replace(found.cfg, num_hidden_layers=8))  # the drafter's target
    weights = Weights.of_accounts(found, drafter_account(tmp_path / "d"))
    checkpoint, (drafter, cfg) = load_checkpoint(tmp_path / "m"), load_drafter(tmp_path / "d")
    assert weights.nbytes == tree_bytes((checkpoint.params, checkpoint.draft_head, drafter))
    assert weights.drafter == cfg and not weights.head_dequantised
    assert Weights.of_params(checkpoint.params, checkpoint.cfg).nbytes == tree_bytes(checkpoint.params)
    head_in_rows = like.endswith("fast") and jax.default_backend() != "gpu"
    assert Weights.of_params(checkpoint.params, checkpoint.cfg).head_dequantised == head_in_rows


@pytest.mark.parametrize(
    "settings, drafter",
    [
        (Settings(3, 700), None),
        (Settings(1, 40, None, "float16", ("mtp", "lookup"), 16), Mtp(None, 4)),
        (Settings(2, 40, None, "float32", ("mtp",), 5), Mtp(None, 4)),
        (Settings(1, 40, None, "float32", ("lookup",), 16), NoDrafter()),
        (Settings(1, 40, None, "float32", ("dflash2", "lookup"), 16), DFlash2(None, synthetic.dflash2.SMALL)),
    ],
)
def test_state_is_the_bytes_that_a_run_allocates(settings, drafter):
    cfg = synthetic.SMALL
    dflash2 = account(recipe("qwen3.8-27b-dflash2", scale="small")) if "dflash2" in settings.drafters else None
    weights = Weights.of_accounts(account(stored_as("w4a16", cfg)), dflash2)
    plan, set_up = make_plan(weights, settings, workspace=7), settings.sizes(cfg)
    n = set_up.batch
    sampler = sampler_state([SamplingParams(seed=0)] * n, [()] * n, vocab_size=512, real_vocab_size=500, eos_ids=(0,))
    model, active = init_state(cfg, set_up), jnp.ones(n, bool)
    if drafter is None:
        state = decode.start(cfg, model, sampler, active)
    else:
        spec = SpecConfig(settings.verify_rows - 1, lookup="lookup" in settings.drafters)
        state = speculative.start(cfg, drafter, spec, set_up, model, sampler, active, jnp.ones(n, jnp.int32))
    assert sum(sizes(plan, "state").values()) == tree_bytes(state)
    assert plan.nbytes == weights.nbytes + tree_bytes(state) + 7
    for name, part in (("mtp", "MTP cache"), ("dflash2", "DFlash2 cache")):
        assert (part in sizes(plan)) == (name in settings.drafters)
    assert (set_up.batch, set_up.capacity) == ((4, 1024) if settings.slots == 3 else (settings.slots, 512))


# Gigabytes of the published sizes, by format and part: bf16, int8 and int4 in groups of 128.
PARTS = {"MLP": 34.226, "attention": 3.355, "output head": 2.543, "embedding": 2.543}
INT4 = {"MLP": 8.824, "attention": 0.865, "output head": 0.656, "MTP head": 0.219}


def test_weights_of_the_27b_model():
    dense = sizes(make_plan(full("qwen3.8-27b"), Settings()))
    for name, gigabytes in PARTS.items():
        assert dense[name] == pytest.approx(gigabytes * 1e9, abs=6e5), name
    assert dense["Gated DeltaNet"] == pytest.approx((11.073 + 0.052) * 1e9, abs=2e6)
    assert dense["MTP head"] == pytest.approx(0.849 * 1e9, abs=6e5)
    assert full("qwen3.8-27b").nbytes == pytest.approx(55_562_855_904 - 0.921e9, abs=1e6)  # without the vision tower
    packed = {(item.name, item.detail): item.nbytes for item in full("qwen3.8-27b-fast").items}
    for name, gigabytes in INT4.items():
        assert packed[name, "int4 group 128 (compressed-tensors)"] == pytest.approx(gigabytes * 1e9, abs=6e5), name
    assert packed["embedding", "int8 group 128 (compressed-tensors)"] == pytest.approx(1.291e9, abs=6e5)
    body = sum(packed[n, "int4 group 128 (compressed-tensors)"] for n in ("MLP", "attention", "Gated DeltaNet"))
    assert body == pytest.approx(12.544e9, abs=1e6)
    assert full("qwen3.8-27b-fast").nbytes == pytest.approx(13.85 * GIB, abs=0.01 * GIB)
    assert full("qwen3.8-27b-w4a16").nbytes == pytest.approx(18.12 * GIB - 0.921e9, abs=0.02 * GIB)


def test_state_of_the_27b_model():
    weights = full("qwen3.8-27b-w4a16", "qwen3.8-27b-dflash2")
    settings = Settings(2, 32768, None, "float32", ("mtp", "lookup"), 16)
    parts = sizes(make_plan(weights, settings))
    assert parts["KV pages"] == 2 * 32768 * 65_536
    assert parts["MTP cache"] == parts["KV pages"] // 16
    assert parts["recurrent state"] == pytest.approx(2 * 150.99e6, rel=1e-4)
    assert parts["convolution windows"] == pytest.approx(2 * 2.95e6, rel=1e-3)
    assert parts["pending rows"] == pytest.approx(2 * 42.1e6, rel=1e-3)  # 41 MB, and keys and values of 16 layers
    other = sizes(make_plan(weights, dataclasses.replace(settings, drafters=("dflash2", "lookup"))))
    assert other["DFlash2 cache"] == 2 * 2048 * (5 * 4096 + 4)  # and the position of each row
    half = sizes(make_plan(weights, dataclasses.replace(settings, state_dtype="float16")))
    assert half["recurrent state"] == pytest.approx(2 * 75.50e6, rel=1e-4)


@pytest.mark.parametrize(
    "like, settings, measured",
    [
        ("qwen3.8-27b-w4a16", Settings(1, 8192), 641),
        ("qwen3.8-27b-w4a16", Settings(2, 8192), 759),
        ("qwen3.8-27b-w4a16", Settings(1, 8192, prompt=256), 609),
        ("qwen3.8-27b-fast", Settings(1, 8192), 641),
    ],
)
def test_the_workspace_estimate_holds_what_xla_takes(like, settings, measured):
    """MiB of the programs compiled for an RTX 3090 (jax 0.10.2)."""
    [workspace] = sizes(make_plan(full(like), settings), "workspace").values()
    assert measured <= workspace / 2**20 <= 1.7 * measured


def test_what_is_proposed_fits_and_no_more_than_needed_is_changed():
    weights, settings = full("qwen3.8-27b-fast", "qwen3.8-27b-dflash2-w4a16"), Settings(8, 16384)
    settings = dataclasses.replace(settings, drafters=("dflash2", "lookup"), verify_rows=16)

    def needs(**changes):
        return make_plan(weights, dataclasses.replace(settings, **changes)).nbytes

    budget = Budget(needs(context=4096), "it")
    found = dict(alternatives(weights, settings, budget))
    assert found["4,096 tokens a sequence"] == budget.nbytes and needs(context=8192) > budget.nbytes
    assert found["2 sequences at a time"] == needs(slots=2) and needs(slots=4) > budget.nbytes
    assert all(nbytes <= budget.nbytes for nbytes in found.values())
    # A little less than everything: each single change is enough.
    found = dict(alternatives(weights, settings, Budget(needs() - 1, "it")))
    assert found.keys() == {
        "8,192 tokens a sequence",
        "4 sequences at a time",
        "a float16 recurrent state",
        "verify blocks of 8 rows",
    }
    assert found["a float16 recurrent state"] == needs(state_dtype="float16")
    assert found["verify blocks of 8 rows"] == needs(verify_rows=8)
    found = dict(alternatives(weights, settings, Budget(needs(verify_rows=8) - 1, "it")))
    assert found["no drafts"] == needs(drafters=(), verify_rows=0)


def test_where_one_change_is_not_enough():
    weights, settings = full("qwen3.8-27b-fast"), Settings(8, 65536)
    least = make_plan(weights, Settings(1, 2048, state_dtype="float16")).nbytes
    [(words, nbytes)] = alternatives(weights, settings, Budget(least, "it"))
    assert words == "one sequence at a time, a float16 state, no drafts, 2,048 tokens a sequence" and nbytes == least
    assert alternatives(weights, settings, Budget(weights.nbytes, "it")) == []
    # Dense weights do not fit whatever is asked for, quantised ones do.
    card = Budget(23 * GIB, "a card")
    [(words, nbytes)] = alternatives(full("qwen3.8-27b"), Settings(), card)
    assert words == "a checkpoint with int4 layers" and nbytes < 20 * GIB
    changes = [words for words, _ in alternatives(full("qwen3.8-27b"), settings, card)]
    assert "a checkpoint with int4 layers, and 4,096 tokens a sequence" in changes
    # Whose columns are no whole groups, cannot be quantised like that.
    odd = Weights.of_accounts(account(stored_as("bf16", dataclasses.replace(synthetic.SMALL, intermediate_size=200))))
    assert alternatives(odd, Settings(), Budget(1000, "it")) == []


def test_a_refusal_has_both_numbers_and_the_remedy():
    weights, card = full("qwen3.8-27b-w4a16"), Budget(23 * GIB, "a memory of 24 GiB", GIB)
    require_fit(weights, Settings(), card, "this")
    require_fit(weights, Settings(1, 262144), None, "this")
    with pytest.raises(NotEnoughMemory) as refusal:
        require_fit(weights, Settings(8, 65536), card, "the run")
    message = str(refusal.value)
    assert message.startswith("the run needs 51.61 GiB (weights 17.26, state 33.16, workspace 1.20)")
    assert "a memory of 24 GiB leaves 23.00 GiB. What fits: 4,096 tokens a sequence (21.61 GiB); or" in message
    with pytest.raises(NotEnoughMemory, match="workspace 9.00"):
        require_fit(weights, Settings(), card, "it", workspace=9 * GIB)
    with pytest.raises(NotEnoughMemory, match="nothing of this model; free memory"):
        require_fit(weights, Settings(), Budget(GIB, "it"), "it")


def test_pieces_of_a_prompt():
    assert chunk_lengths(3000, 1) == [1024, 1024, 1024] and chunk_lengths(1025, 2) == [1024, 16]
    assert chunk_lengths(300, 1) == [1024] and chunk_lengths(300, 8) == [256, 64] and chunk_lengths(1, 1) == [16]
    assert set(chunk_lengths(100, 64)) == {16} and chunk_lengths(20, 1000) == [16, 16]
    for slots in (1, 2, 4, 8, 64):
        longest = chunk_lengths(10_000, slots)[0]
        assert sum(chunk_lengths(10_000, slots)) >= 10_000 and longest * slots <= 2048


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"slots": 0}, "slots must be at least 1"),
        ({"context": 0}, "context must be at least 1"),
        ({"drafters": ("eagle",), "verify_rows": 4}, "no drafter 'eagle'"),
        ({"drafters": ("mtp",)}, "go together"),
        ({"drafters": ("mtp", "dflash2"), "verify_rows": 8}, "do not draft together"),
        ({"verify_rows": 4}, "go together"),
        ({"drafters": ("mtp",), "verify_rows": 1}, "verify_rows must be 2"),
        ({"drafters": ("mtp",), "verify_rows": 65}, "to 64, got 65"),
    ],
)
def test_settings_that_make_no_run(fields, words):
    with pytest.raises(ValueError, match=words):
        Settings(**fields)


def test_a_draft_vocabulary_costs_its_rows_of_the_head():
    found = account(recipe("qwen3.8-27b"))
    cut = Weights.of_accounts(found, draft_vocab=40960)
    assert cut.nbytes - full("qwen3.8-27b").nbytes == 40960 * (2 * 5120 + 4)


def test_what_these_weights_have_not_is_an_error():
    without = dataclasses.replace(synthetic.SMALL, mtp_num_hidden_layers=0)
    weights = Weights.of_accounts(account(stored_as("bf16", without)))
    with pytest.raises(ValueError, match="no MTP head"):
        make_plan(weights, Settings(drafters=("mtp",), verify_rows=5))
    with pytest.raises(ValueError, match="needs a drafter"):
        make_plan(weights, Settings(drafters=("dflash2",), verify_rows=8))
    with pytest.raises(ValueError, match="state dtype"):
        make_plan(weights, Settings(state_dtype="int8"))
    with pytest.raises(ValueError, match="vocab_size = 248320, but the model has vocab_size = 512"):
        Weights.of_accounts(account(stored_as("bf16", without)), account(recipe("qwen3.8-27b-dflash2")))


def test_planning_allocates_nothing():
    before = len(jax.live_arrays())
    make_plan(full("qwen3.8-27b"), Settings(64, 262144))
    assert len(jax.live_arrays()) == before
