"""Files of outputs: killed at any byte and begun again, a run neither loses nor repeats a record."""

import json
import types

import pytest

from qwen38_jax.engine.request import Completion, Request
from qwen38_jax.lab.generation import Prompt, generate_outputs, read_prompts
from qwen38_jax.lab.outputs import open_outputs, read_header, read_outputs
from qwen38_jax.sampling_params import SamplingParams


class Echo:
    """An engine whose answer to a prompt depends on the prompt and its seed alone."""

    cfg = types.SimpleNamespace(vocab_size=50, dtype="float32")

    def __init__(self, batches_until_death=1000):
        self.left = batches_until_death

    def encode(self, request):
        return list(request.prompt_ids)

    def generate(self, requests):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        answers = [(*r.prompt_ids, r.sampling.seed % 50)[: r.sampling.max_new_tokens] for r in requests]
        return [Completion(ids, "", "length", len(ids), 1, 0.0, 0.0, 0.0) for ids in answers]


PROMPTS = [Prompt(Request(prompt_ids=[i, *range(i % 3)]), f"s{i % 2}", 4 if i == 3 else None) for i in range(7)]
SAMPLING = SamplingParams(seed=40)


def run(path, engine=None, **changes):
    options = {"sampling": SAMPLING, "checkpoint": "a", "batch": 2, **changes}
    return generate_outputs(engine or Echo(), PROMPTS, path, **options)


def test_outputs_are_recorded_with_prompt_seed_and_source(tmp_path):
    figures = run(tmp_path / "o.jsonl")
    outputs = {o.index: o for o in read_outputs(tmp_path / "o.jsonl")}
    assert sorted(outputs) == list(range(7))
    assert outputs[5].prompt_ids == (5, 0, 1) and outputs[5].output_ids == (5, 0, 1, 45) and outputs[5].source == "s1"
    assert read_header(tmp_path / "o.jsonl")["sampling"]["seed"] == 40
    assert figures["outputs"] == 7 and figures["output_tokens"] == sum(len(o.output_ids) for o in outputs.values())


def test_killed_at_any_byte_it_goes_on_without_loss_or_repetition(tmp_path):
    path = tmp_path / "o.jsonl"
    run(path)
    whole = path.read_bytes()
    expected = sorted(whole.splitlines())
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        run(path)
        assert sorted(path.read_bytes().splitlines()) == expected, size


def test_a_run_that_is_interrupted_goes_on(tmp_path):
    path = tmp_path / "o.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(path, Echo(2))
    assert len(list(read_outputs(path))) == 4
    engine = Echo()
    run(path, engine)
    assert 1000 - engine.left == 2 and len(list(read_outputs(path))) == 7


def test_another_run_is_not_mixed_in(tmp_path):
    run(tmp_path / "o.jsonl")
    with pytest.raises(ValueError, match="begun with another checkpoint"):
        run(tmp_path / "o.jsonl", checkpoint="b")
    with pytest.raises(ValueError, match="another sampling"):
        run(tmp_path / "o.jsonl", sampling=SamplingParams(seed=41))


def test_two_runs_at_once_are_refused(tmp_path):
    with open_outputs(tmp_path / "o.jsonl", {}), pytest.raises(ValueError, match="in use"):
        with open_outputs(tmp_path / "o.jsonl", {}):
            pass


def test_damage_is_named(tmp_path):
    path = tmp_path / "o.jsonl"
    run(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1], b'{"index": 1}\n', *lines[2:]]))
    with pytest.raises(ValueError, match="o.jsonl:3"):
        list(read_outputs(path))
    path.write_bytes(b"".join(lines[1:]))
    with pytest.raises(ValueError, match="no file of outputs"):
        list(read_outputs(path))


def test_prompts_are_checked(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt_ids": [1], "source": "x", "max_new_tokens": 3}) + "\n\n")
    assert read_prompts(path) == [Prompt(Request(prompt_ids=[1]), "x", 3)]
    for bad, message in (("{}", "exactly one of"), ('{"prompt": "a", "heat": 1}', "heat"), ("[1]", "object")):
        path.write_text(bad + "\n")
        with pytest.raises(ValueError, match=f"p.jsonl:1.*{message}"):
            read_prompts(path)
    path.write_text("")
    with pytest.raises(ValueError, match="no prompts"):
        read_prompts(path)
