"""Captured rows are the model's, whole, checked, and read in place."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.block import chain_block
from qwen38_jax.checkpoint.files import CheckpointError
from qwen38_jax.lab.capture import MANIFEST, Layout, capture, default_taps, open_captured, plan_capture
from qwen38_jax.lab.outputs import Output
from qwen38_jax.model import forward, logits
from qwen38_jax.state import StateConfig, init_state
from tests.models import SMALL, small_params

LAYOUT = Layout(tap_layers=(1, 3), top=3, shard_rows=30, batch=2)


def outputs(lengths=((5, 20), (3, 9), (11, 2), (4, 30))):
    rng = np.random.default_rng(0)
    draw = lambda n: tuple(rng.integers(0, SMALL.vocab_size, n).tolist())  # noqa: E731
    return [Output(i, "ab"[i % 2], draw(p), draw(n), "length", i) for i, (p, n) in enumerate(lengths)]


def run(directory, params=None, made=None, **options):
    plan = plan_capture(made or outputs(), SMALL, LAYOUT, most_tokens=100)
    settings = {"real_vocab_size": 60, "identity": {"checkpoint": "x"}, **options}
    return capture(params or small_params(), SMALL, plan, directory, LAYOUT, **settings)


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lab") / "states"
    run(directory)
    return open_captured(directory)


def test_rows_are_the_models(captured):
    assert [t.index for t in captured.texts] == [0, 1, 2, 3] and len(captured.manifest["shards"]) == 2
    made = outputs()[3]
    text = captured.texts[3]
    ids = np.array([*made.prompt_ids, *made.output_ids], np.int32)
    np.testing.assert_array_equal(captured.rows(text, "tokens"), ids)
    np.testing.assert_array_equal(captured.rows(text, "response"), np.arange(34) >= 4)
    state = init_state(SMALL, StateConfig(1, 64))
    hidden, taps, _ = jax.jit(forward, static_argnames=("cfg", "commit", "tap_layers"))(
        small_params(), SMALL, chain_block(jnp.asarray(ids)[None], state.lengths), state, commit=True, tap_layers=(1, 3)
    )
    np.testing.assert_allclose(captured.rows(text, "hidden"), hidden[0], atol=1e-4)
    np.testing.assert_allclose(captured.rows(text, "taps", 7, 12), jnp.moveaxis(taps[:, 0], 0, 1)[7:12], atol=1e-4)
    scores = np.array(logits(small_params(), hidden))[0, :, :60]
    np.testing.assert_array_equal(captured.rows(text, "top_ids")[:, 0], scores.argmax(axis=-1))
    np.testing.assert_allclose(captured.rows(text, "top_logits"), -np.sort(-scores)[:, :3], atol=1e-3)
    np.testing.assert_allclose(captured.rows(text, "logsumexp"), jax.nn.logsumexp(scores, axis=-1), atol=1e-3)


def test_rows_are_mapped_not_loaded(captured):
    assert isinstance(captured.rows(captured.texts[0], "taps").base, np.memmap)


def test_a_stopped_run_goes_on_to_the_same_bytes(captured, tmp_path):
    done = []

    def stop(nbytes):
        done.append(nbytes)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "states", advance=stop)
    assert not (tmp_path / "states").exists() and len(done) == 1
    run(tmp_path / "states", advance=done.append)
    for path in captured.directory.iterdir():
        assert path.read_bytes() == (tmp_path / "states" / path.name).read_bytes()


def test_a_text_that_is_not_finite_is_left_out_and_listed(tmp_path):
    made = outputs()
    poison = SMALL.vocab_size - 1  # in the first text alone
    made = [
        Output(o.index, o.source, tuple(i % 60 for i in o.prompt_ids), tuple(i % 60 for i in o.output_ids), "stop", 0)
        for o in made
    ]
    made[0] = Output(0, "a", (1, 2, poison), made[0].output_ids, "stop", 0)
    params = small_params()
    params = params.replace(embed=params.embed.at[poison].set(jnp.nan))
    manifest = run(tmp_path / "states", params, made)
    assert list(manifest["left_out"]) == [0] and "of 23 is not finite" in manifest["left_out"][0]
    assert [t.index for t in open_captured(tmp_path / "states").texts] == [1, 2, 3]


def test_what_does_not_fit_is_left_out_and_said(tmp_path):
    plan = plan_capture([*outputs(), Output(9, "", (1,), (), "stop", 0)], SMALL, LAYOUT, most_tokens=30)
    assert plan.left_out == {3: "34 tokens, more than 30", 9: "empty"}
    assert plan.nbytes == (25 + 12 + 13) * LAYOUT.row_bytes(SMALL)
    with pytest.raises(ValueError, match="twice"):
        plan_capture(outputs() + outputs(), SMALL, LAYOUT, most_tokens=100)
    with pytest.raises(ValueError, match="no output is left"):
        plan_capture(outputs(), SMALL, LAYOUT, most_tokens=3)


def test_changed_bytes_and_files_are_noticed(captured, tmp_path):
    run(tmp_path / "states")
    path = sorted((tmp_path / "states").glob("*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="has changed"):
        open_captured(tmp_path / "states").check_sums()
    path.write_bytes(data[:-8])
    with pytest.raises(CheckpointError, match="truncated"):
        open_captured(tmp_path / "states")
    (tmp_path / "states" / MANIFEST).write_text(json.dumps({"format": "other"}))
    with pytest.raises(CheckpointError, match="no captured states"):
        open_captured(tmp_path / "states")


def test_rows_of_another_model_do_not_pass(tmp_path, monkeypatch):
    """The rows that are computed again at the end must be those that were written."""
    import qwen38_jax.lab.capture as module

    read = module._read_texts

    def off_by_one(*args):
        for index, rows in read(*args):
            yield index, {**rows, "hidden": np.roll(rows["hidden"], 1, axis=0)}

    monkeypatch.setattr(module, "_read_texts", off_by_one)
    with pytest.raises(CheckpointError, match="differ"):
        run(tmp_path / "states")


def test_default_taps():
    assert default_taps(12) == (1, 4, 6, 8, 11) and default_taps(2) == (1,) and default_taps(64)[-1] == 63
