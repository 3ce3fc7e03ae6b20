"""The engine over a static batch: what ends a request, what a neighbour must not change, what is refused."""

import dataclasses

import jax
import numpy as np
import pytest

from qwen38_jax.engine import Engine, NotEnoughMemory, Request, plan
from qwen38_jax.engine import engine as engine_module
from qwen38_jax.engine import memory as engine_memory
from qwen38_jax.engine import programs as programs_module
from qwen38_jax.engine.stream import Stream
from qwen38_jax.model import logits
from qwen38_jax.params import init_params
from qwen38_jax.quantization import QuantTensor, dequantize, quantize
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.state import StateConfig, init_state
from qwen38_jax.tokenizer import Tokenizer
from tests.models import SMALL, extend, small_params
from tests.qwen_vocabulary import small_backend

CFG = dataclasses.replace(SMALL, vocab_size=320, max_position_embeddings=700)
GREEDY = SamplingParams(temperature=0, max_new_tokens=12)


@pytest.fixture(scope="module")
def engine():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}{% if enable_thinking %}<think>{% endif %}"
    )
    return Engine(small_params(CFG), CFG, Tokenizer(small_backend(), template), max_batch=4)


def ask(engine, ids, **fields):
    sampling = dataclasses.replace(GREEDY, **fields)
    return engine.generate([Request(prompt_ids=ids, sampling=sampling)])[0]


def test_greedy_tokens_equal_the_model_fed_one_by_one(engine):
    prompt = [5, 9, 200, 31, 7]
    completion = ask(engine, prompt)
    state = init_state(CFG, StateConfig(1, 64))
    tokens, fed = [], prompt
    for _ in range(12):
        for token in fed:
            hidden, state = extend(engine.params, CFG, state, np.array([[token]]))
        scores = np.asarray(logits(engine.params, hidden))[0, 0, : engine.tokenizer.vocab_size]
        tokens.append(int(scores.argmax()))
        fed = tokens[-1:]
    assert completion.token_ids == tuple(tokens)
    assert (completion.finish_reason, completion.prompt_tokens, completion.steps) == ("length", 5, 11)
    assert completion.prefill_seconds > 0 and completion.decode_seconds > 0
    assert completion.text == engine.tokenizer.decode(tokens)


def test_neighbours_and_order_change_nothing(engine):
    prompts = [[5, 9, 200], list(range(40)), [7]]
    settings = [
        GREEDY,
        SamplingParams(temperature=1, seed=3, max_new_tokens=12),
        SamplingParams(seed=4, top_k=5, max_new_tokens=6),
    ]
    requests = [Request(prompt_ids=p, sampling=s) for p, s in zip(prompts, settings, strict=True)]
    alone = [engine.generate([r])[0].token_ids for r in requests]
    together = [c.token_ids for c in engine.generate(requests)]
    reordered = [c.token_ids for c in engine.generate(requests[::-1])][::-1]
    split = [c.token_ids for c in engine.generate(requests + requests)][3:]
    assert alone == together == reordered == split


@pytest.mark.parametrize("chunks", [(8,), (64,), (128,), (512,)])
def test_padding_of_the_prompt_changes_no_token(engine, monkeypatch, chunks):
    """64 greedy tokens after the same five, whatever length they were padded to."""
    expected = ask(engine, [5, 9, 200, 31, 7], max_new_tokens=64).token_ids
    monkeypatch.setattr(plan, "PREFILL_CHUNKS", chunks)
    assert ask(engine, [5, 9, 200, 31, 7], max_new_tokens=64).token_ids == expected


def test_stop_id_ends_the_text_before_it(engine):
    """Declare a token that greedy decoding really emits to be the end: every stop case becomes certain."""
    tokens = ask(engine, [5, 9, 200]).token_ids
    stop = tokens[4]
    first = tokens.index(stop)
    completion = ask(engine, [5, 9, 200], stop_token_ids=(stop,))
    assert completion.token_ids == tokens[: first + 1]
    assert completion.text == engine.tokenizer.decode(tokens[:first])
    assert (completion.finish_reason, completion.steps) == ("stop", first)
    later = ask(engine, [5, 9, 200], stop_token_ids=(stop,), min_new_tokens=12)
    assert stop not in later.token_ids and later.finish_reason == "length"


def test_first_token_may_already_be_the_end(engine):
    first = ask(engine, [5, 9, 200]).token_ids[0]
    completion = ask(engine, [5, 9, 200], stop_token_ids=(first,))
    assert (completion.token_ids, completion.text, completion.steps) == ((first,), "", 0)
    assert completion.finish_reason == "stop"


def test_own_stop_ids_of_the_model(engine):
    tokens = ask(engine, [5, 9, 200]).token_ids
    ending = Engine(engine.params, dataclasses.replace(CFG, eos_token_ids=(tokens[3],)), engine.tokenizer)
    assert ask(ending, [5, 9, 200]).finish_reason == "stop"
    assert ask(ending, [5, 9, 200], ignore_eos=True).token_ids == tokens


def test_stop_string_cuts_the_text(engine):
    whole = ask(engine, [5, 9, 200], max_new_tokens=30).text
    stop = whole[3:6]
    completion = ask(engine, [5, 9, 200], max_new_tokens=30, stop=(stop,))
    assert completion.text == whole[: whole.index(stop)]
    assert completion.finish_reason == "stop"


def test_streamed_pieces_add_up_to_each_text(engine):
    pieces: dict[int, list[str]] = {0: [], 1: []}
    requests = [Request(prompt_ids=[i + 3], sampling=GREEDY) for i in range(2)]
    completions = engine.generate(requests, on_text=lambda i, text: pieces[i].append(text))
    assert ["".join(pieces[i]) for i in range(2)] == [c.text for c in completions]


def test_logprobs_are_the_models_own(engine):
    [completion] = engine.generate([Request(prompt_ids=[5, 9], sampling=dataclasses.replace(GREEDY, logprobs=3))])
    scored = engine.score([5, 9, *completion.token_ids])
    np.testing.assert_allclose([t.logprob for t in completion.logprobs], scored.logprobs[1:], atol=1e-4)
    for token in completion.logprobs:
        assert len(token.top) == 3 and token.top[0] == (token.token_id, token.logprob)
    assert ask(engine, [5, 9]).logprobs is None


def test_padded_ids_are_never_sampled_even_when_biased(engine):
    real = engine.tokenizer.vocab_size
    completion = ask(engine, [5], logit_bias=tuple((i, 100.0) for i in range(real, CFG.vocab_size)))
    assert all(token < real for token in completion.token_ids)


def test_generation_ends_where_the_context_does(engine):
    completion = ask(engine, [1] * (CFG.max_position_embeddings - 3), max_new_tokens=50)
    assert (len(completion.token_ids), completion.finish_reason) == (3, "length")


@pytest.mark.parametrize("ids", [[0], [319]])
def test_first_and_last_id_of_the_vocabulary_are_fine(engine, ids):
    assert len(ask(engine, ids, max_new_tokens=2).token_ids) == 2


@pytest.mark.parametrize(
    "request_fields,words",
    [
        ({"prompt_ids": [320]}, "320"),
        ({"prompt_ids": [5, -1]}, "-1"),
        ({"prompt_ids": [5, True]}, "True"),
        ({"prompt_ids": [5, "a"]}, "'a'"),
        ({"prompt_ids": []}, "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt_ids": [1] * 700}, "context is 700"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({}, "exactly one"),
        ({"prompt": "a", "prompt_ids": [1]}, "exactly one"),
        ({"prompt": "a", "sampling": SamplingParams(stop_token_ids=(320,))}, "320"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(engine, request_fields, words):
    shown = []
    with pytest.raises(ValueError, match=words):
        engine.generate([Request(prompt="ok"), Request(**request_fields)], on_text=lambda *a: shown.append(a))
    assert not shown


def test_half_precision_state_changes_little(engine):
    half = Engine(engine.params, CFG, engine.tokenizer, state_dtype="float16")
    assert ask(half, [5, 9, 200]).token_ids[:4] == ask(engine, [5, 9, 200]).token_ids[:4]
    with pytest.raises(ValueError, match="state dtype"):
        ask(Engine(engine.params, CFG, engine.tokenizer, state_dtype="int8"), [5])


def test_shortage_of_memory_is_found_before_allocation(engine, monkeypatch):
    monkeypatch.setattr(engine_memory, "available_bytes", lambda: 100_000)
    monkeypatch.setattr(programs_module, "_compile", lambda *args: pytest.fail("compiled"))
    with pytest.raises(NotEnoughMemory, match="a batch of 1 x 512 tokens needs .* leaves .* What fits"):
        ask(engine, [5, 9, 200])
    with pytest.raises(NotEnoughMemory, match="a score of 3 tokens needs"):
        engine.score([5, 9, 200])


def test_a_budget_is_kept_to(engine):
    small = Engine(engine.params, CFG, engine.tokenizer, memory_gib=0.001)
    with pytest.raises(NotEnoughMemory, match="a memory of 0.001 GiB leaves 0.00 GiB"):
        ask(small, [5, 9, 200])
    enough = Engine(engine.params, CFG, engine.tokenizer, memory_gib=1)
    enough._programs = engine._programs
    assert ask(enough, [5, 9, 200]).token_ids == ask(engine, [5, 9, 200]).token_ids


def test_weights_that_do_not_fit_are_not_loaded(monkeypatch):
    monkeypatch.setattr(engine_module, "load_checkpoint", lambda *args, **kwargs: pytest.fail("loaded"))
    with pytest.raises(NotEnoughMemory, match="tiny needs 0.0.* GiB .weights .* leaves 0.01 GiB"):
        Engine.from_checkpoint(memory_gib=0.01)


def test_compiled_programs_are_checked_as_well(engine, monkeypatch):
    ask(engine, [5, 9, 200])
    monkeypatch.setattr(engine_module.Programs, "workspace", property(lambda self: 2**50))
    with pytest.raises(NotEnoughMemory, match="workspace 1048576.00"):
        ask(engine, [5, 9, 200])


def test_tokenizer_of_another_model_is_refused(engine):
    small = dataclasses.replace(CFG, vocab_size=64)
    with pytest.raises(ValueError, match="tokenizer"):
        Engine(init_params(small, jax.random.key(0)), small, engine.tokenizer)


def test_programs_are_compiled_once(engine, monkeypatch):
    ask(engine, [5, 9, 200])
    monkeypatch.setattr(programs_module, "_compile", lambda *args: pytest.fail("compiled again"))
    ask(engine, [7, 7], seed=5, max_new_tokens=20)


def test_steps_give_their_buffers_away(engine):
    """The state's memory becomes the result's."""
    ask(engine, [5, 9, 200])
    for programs in engine._programs.values():
        for program in programs.all:
            analysis = program.memory_analysis()
            assert analysis.alias_size_in_bytes > 0.9 * analysis.output_size_in_bytes


def test_output_that_is_not_finite_is_an_error(engine):
    broken = engine.params.replace(norm=engine.params.norm.at[0].set(np.nan))
    with pytest.raises(ValueError, match="not finite"):
        ask(Engine(broken, CFG, engine.tokenizer), [5, 9])
    with pytest.raises(ValueError, match="not finite"):
        Engine(broken, CFG, engine.tokenizer).score([5, 9])


def test_perplexity_of_a_head_that_is_not_loaded(engine):
    empty = engine.params.replace(lm_head=np.zeros_like(engine.params.lm_head))
    with pytest.raises(ValueError, match="perplexity equals"):
        Engine(empty, CFG, engine.tokenizer).score(list(range(20)))


@pytest.mark.parametrize("ids,words", [([5], "2 to 700"), ([5, 319], "319"), ([5, 10**20], "1000"), ([5, -1], "-1")])
def test_scores_that_are_refused(engine, ids, words):
    with pytest.raises(ValueError, match=words):
        engine.score(ids)


def test_held_back_text_is_shown_at_the_end():
    """What could have begun a stop string, and a character that never completes, come out when the tokens end."""
    tokenizer = Tokenizer(small_backend())
    tokens = [*tokenizer.encode("az", parse_special=False), tokenizer.encode("é", parse_special=False)[0]]
    shown = []
    sampling = SamplingParams(max_new_tokens=len(tokens), stop=("zz",))
    stream = Stream(tokenizer, [1], sampling, eos_ids=(2,), on_text=shown.append)
    for token in tokens:
        assert not stream.finished
        stream.push(token, 0.0, (), context=100)
    assert stream.finish_reason == "length"
    assert "".join(shown) == stream.completion().text == "az\ufffd"


@pytest.mark.slow
def test_a_quantised_model_generates_and_scores_as_its_dequantised_weights_do():
    matrices = {"embed", "lm_head", "q", "k", "v", "o", "qkv", "z", "out", "gate", "up", "down"}

    def integers(path, leaf):
        return quantize(leaf, 8, 8, symmetric=False) if path[-1].name in matrices else leaf

    def floats(leaf):
        return dequantize(leaf) if isinstance(leaf, QuantTensor) else leaf

    quantised = jax.tree_util.tree_map_with_path(integers, small_params(CFG))
    dense = jax.tree.map(floats, quantised, is_leaf=lambda leaf: isinstance(leaf, QuantTensor))
    got, want = (Engine(params, CFG, Tokenizer(small_backend())) for params in (quantised, dense))
    prompt = [5, 9, 200, 31, 7]
    assert ask(got, prompt).token_ids == ask(want, prompt).token_ids
    np.testing.assert_allclose(got.score(prompt).logprobs, want.score(prompt).logprobs, atol=1e-5)
