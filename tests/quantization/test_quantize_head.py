"""The head of the checkpoint that ships, quantised by the script on what the model itself writes and reads."""

import dataclasses
import inspect
import json
import textwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.checkpoint import load_checkpoint
from qwen38_jax.engine import Engine, Request
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.engine.memory import Budget
from qwen38_jax.evaluation.head import compare_heads
from qwen38_jax.model import logits
from qwen38_jax.quantization import quantize
from scripts import quantize_head
from scripts.quantize_head import (
    Prompt,
    Settings,
    Text,
    answer,
    answer_rows,
    calibrate,
    check,
    collect,
    default_prompts,
    file_prompts,
    main,
    run,
    write,
)

INT4 = Settings(bits=4, group=128, symmetric=True, act_order=False, clip_search=True, damping=0.01)


@pytest.fixture(scope="module")
def engine():
    return Engine.from_checkpoint(dtype="float32", max_batch=2)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Twelve prompts, most of them answered."""
    functions = [f for f in vars(textwrap).values() if inspect.isfunction(f)]
    functions += [f for _, f in inspect.getmembers(json.JSONDecoder, inspect.isfunction)]
    functions += [f for _, f in inspect.getmembers(inspect, inspect.isfunction)]
    lines = []
    for function in sorted(functions, key=lambda f: f.__qualname__):
        source = inspect.getsource(function)
        if 600 < len(source) < 1500:
            lines.append({"prompt": f"# {function.__name__}\n", "output": source + "<|endoftext|>"})
    lines = lines[:12]
    for i in (0, 4):
        lines[i] = {"messages": [{"role": "user", "content": "Say hello."}]}
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_gptq_beats_round_to_nearest_on_held_out_answers(prompts, monkeypatch):
    monkeypatch.setattr(quantize_head, "NEW_TOKENS", 16)
    records, head = run(SHIPPED_CHECKPOINT, [INT4], prompts, 100_000, weights="trained", dtype="float32")
    nearest, gptq = (record["results"] for record in records)
    assert [record["settings"]["method"] for record in records] == ["rtn", "gptq"]
    assert gptq["output_error"] < nearest["output_error"] < 0.15
    assert gptq["kl"] < nearest["kl"] < 0.15
    assert gptq["top1_agreement"] > 0.9
    assert records[1]["settings"]["calibration_rows"] > 1000 and records[1]["settings"]["held_out_rows"] > 150
    assert (head.shape, head.bits, head.group) == ((8192, 256), 4, 128)


def test_rows_are_those_that_chose_the_answer(engine):
    ids = engine.tokenizer.encode(inspect.getsource(textwrap), False)[:250]
    sampling = engine.sampling(temperature=0, max_new_tokens=12, ignore_eos=True)
    [completion] = engine.generate([Request(prompt_ids=ids, sampling=sampling)])
    texts = [Text((*ids, *completion.token_ids), len(ids)), Text((1, 2), 2)]  # the second has no answer
    chunks = [chunk for text in texts for chunk in answer_rows(engine, text)]
    assert [int(valid.sum()) for _, valid in chunks] == [256 - 249, 12 - 7, 0]
    rows = collect(engine, texts)
    assert rows.shape == (12, 256)
    assert tuple(jnp.argmax(logits(engine.params, rows), axis=-1).tolist()) == completion.token_ids
    hessian = calibrate(engine, texts)
    assert int(hessian.rows) == 12
    np.testing.assert_allclose(hessian.matrix, rows.T @ rows / 12, rtol=1e-4, atol=1e-4)


def test_answers_are_asked_for_until_there_are_enough(engine, prompts, monkeypatch):
    monkeypatch.setattr(quantize_head, "NEW_TOKENS", 16)
    monkeypatch.setattr(quantize_head, "BATCH", 2)
    calibration, _ = file_prompts(prompts, engine)
    texts = answer(engine, calibration, 100)
    assert len(texts) == 2
    for text, prompt in zip(texts, calibration, strict=False):
        assert text.ids[: text.start] == tuple(engine.encode(prompt.request))
    assert texts[1].ids[texts[1].start :] == calibration[1].answer
    assert calibration[0].answer is None and 0 < len(texts[0].ids) - texts[0].start <= 16
    with pytest.raises(ValueError, match="answers to 1 prompts are empty"):
        answer(engine, [Prompt(Request(prompt="x"), ())], 100)


def test_a_text_that_breaks_the_model_is_named(engine):
    broken = SimpleNamespace(
        params=engine.params.replace(norm=engine.params.norm.at[3].set(jnp.nan)),
        cfg=engine.cfg,
        tokenizer=engine.tokenizer,
    )
    text = Text(tuple(engine.tokenizer.encode("def f(x): return x", False)), 2)
    with pytest.raises(ValueError, match="text 1, which begins 'def f.*activation rows hold NaN"):
        calibrate(broken, [text])


# ---- prompts ----


def test_every_fifth_prompt_of_a_file_is_held_out(engine, prompts):
    calibration, held_out = file_prompts(prompts, engine)
    lines = [json.loads(line) for line in prompts.read_text().splitlines() if line]
    assert (len(calibration), len(held_out)) == (10, 2)
    assert held_out[0].request.messages == lines[4]["messages"] and held_out[0].answer is None
    assert held_out[1].request.prompt == lines[9]["prompt"]
    assert engine.tokenizer.decode(held_out[1].answer, skip_special=False) == lines[9]["output"]


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "prompts.jsonl:3: "),
        ("[1]", "prompts.jsonl:3: expected a JSON object, got list"),
        ('{"output": "x"}', "prompts.jsonl:3: a request needs exactly one of prompt"),
        ('{"prompt": "x", "prompt_ids": [1]}', "prompts.jsonl:3: a request needs exactly one of prompt"),
        ('{"prompt_ids": [99999]}', "prompts.jsonl:3: prompt id 99999"),
        ('{"prompt": ""}', "prompts.jsonl:3: the prompt is empty"),
        ('{"prompt": "x", "output": 3}', "prompts.jsonl:3: output must be a string, got int"),
        (json.dumps({"prompt": "x", "output": "a b " * 9000}), "the model's context is 16384"),
        ('{"prompt": "x"}', "prompts.jsonl has 2 prompts"),
    ],
)
def test_a_bad_line_is_named(engine, tmp_path, line, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n\n{line}\n')
    with pytest.raises(ValueError) as raised:
        file_prompts(path, engine)
    assert words in str(raised.value)


def test_default_prompts_for_calibration_and_held_out_share_no_document(monkeypatch):
    monkeypatch.setattr(quantize_head, "CORPUS_BYTES", 600_000)
    calibration, held_out = default_prompts(SHIPPED_CHECKPOINT, 600)
    asked, held = ([prompt.request.messages[-1]["content"] for prompt in side] for side in (calibration, held_out))
    assert len(asked) >= 20 and len(held) >= 20
    lines = [{line for text in side for line in text.splitlines() if len(line) > 50} for side in (asked, held)]
    assert len(lines[0]) > 50 and len(lines[1]) > 50 and len(lines[0] & lines[1]) < 0.1 * len(lines[1])


# ---- the comparison of heads ----


def test_heads_are_compared_on_real_ids():
    rng = np.random.default_rng(0)
    exact, other = rng.normal(size=(2, 50, 16)).astype(np.float32)
    other = exact + 0.1 * other
    other[40:] = 1e6  # padding
    hidden = rng.normal(size=(300, 16)).astype(np.float32)
    got = compare_heads(jnp.asarray(exact), jnp.asarray(other), jnp.asarray(hidden), real_vocab_size=40)
    a, b = (hidden.astype(np.float64) @ head[:40].T for head in (exact, other))
    p, q = (np.exp(t) / np.exp(t).sum(1, keepdims=True) for t in (a, b))
    assert got.output_error == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-5)
    assert got.kl == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-4)
    assert got.top1_agreement == pytest.approx((a.argmax(1) == b.argmax(1)).mean())
    assert 0 < got.kl and got.top1_agreement < 1
    same = compare_heads(jnp.asarray(exact), jnp.asarray(exact), jnp.asarray(hidden), real_vocab_size=40)
    assert dataclasses.astuple(same) == (0, 0, 1)
    with pytest.raises(ValueError, match="no hidden row"):
        compare_heads(jnp.asarray(exact), jnp.asarray(other), jnp.zeros((0, 16)), real_vocab_size=40)


# ---- the new checkpoint ----


def test_only_the_head_differs_in_the_new_checkpoint(tmp_path):
    before = {path: path.read_bytes() for path in SHIPPED_CHECKPOINT.iterdir()}
    source = load_checkpoint(SHIPPED_CHECKPOINT)
    head = quantize(source.params.lm_head.astype(jnp.float32), 4, 128)
    write(SHIPPED_CHECKPOINT, head, tmp_path / "new")
    assert {path: path.read_bytes() for path in SHIPPED_CHECKPOINT.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    new = load_checkpoint(tmp_path / "new")
    assert new.cfg == source.cfg and new.params.lm_head.dtype == "bfloat16"
    expected = source.params.replace(lm_head=head.astype("bfloat16"))
    assert jax.tree.structure(new.params) == jax.tree.structure(expected)
    for got, leaf in zip(jax.tree.leaves(new.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, leaf)
    with pytest.raises(SystemExit, match="new exists and is not an empty directory"):
        main(["--out", str(tmp_path / "new")])


# ---- what is refused before the long part ----


@pytest.mark.parametrize(
    "change, group, words",
    [
        (lambda p: p.replace(lm_head=None), 128, "has no head of its own"),
        (lambda p: p.replace(lm_head=quantize(p.lm_head, 8, 128)), 128, "is in integers already"),
        (lambda p: p, 100, "groups of 100 at 4 bits do not divide rows of 256"),
    ],
)
def test_a_head_that_cannot_be_quantised(engine, change, group, words):
    model = SimpleNamespace(params=change(engine.params))
    with pytest.raises(ValueError, match=words):
        check(model, SHIPPED_CHECKPOINT, [INT4, dataclasses.replace(INT4, group=group)])


def test_a_checkpoint_that_could_not_be_loaded_again(tmp_path, monkeypatch):
    monkeypatch.setattr(quantize_head, "device_budget", lambda: Budget(1 << 20, "the free memory of a toy"))
    with pytest.raises(SystemExit, match=r"takes 0\.02 GiB, but the free memory of a toy leaves 0\.00 GiB"):
        main(["--out", str(tmp_path / "new")])


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--checkpoint", "x"], "--checkpoint and --weights go together"),
        (["--group", "64", "128", "--out", "x"], "--out writes one head"),
        (["--checkpoint", "nowhere", "--weights", "random"], "nowhere"),
    ],
)
def test_arguments(arguments, words, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert words in capsys.readouterr().err + str(raised.value)
