"""The whole greedy loop (draft, verify, accept, observe) against the reference's, with its small Qwen3 target."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax.drafters import dflash2
from qwen38_jax.layers.norm import plain_rms_norm
from qwen38_jax.layers.rope import apply_rope, text_rope_table
from tests.drafters.dflash2_golden import BATCH, CFG, context_of, observe, propose, read, rows_of, target_of
from tests.golden import needs_golden

HEADS, KV_HEADS, DIM = 4, 2, 16
CAPACITY = 96


@jax.jit
def qwen3(weights, tokens):
    """A dense Qwen3 (4 layers, theta 10^4) over whole texts `[B, L]`: argmax of each row; what the drafter taps."""
    norm = functools.partial(plain_rms_norm, eps=1e-6)
    batch, n = tokens.shape
    rope = text_rope_table(jnp.broadcast_to(jnp.arange(n), tokens.shape), DIM, 1e4)
    layers = [
        {name.split(".", 3)[3]: w for name, w in weights.items() if name.startswith(f"model.layers.{i}.")}
        for i in range(CFG.num_target_layers)
    ]

    def layer(x, w):
        h = norm(x, w["input_layernorm.weight"])
        q, k, v = (
            (h @ w[f"self_attn.{name}_proj.weight"].T).reshape(batch, n, heads, DIM)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        q, k = (apply_rope(norm(t, w[f"self_attn.{name}_norm.weight"]), rope) for t, name in ((q, "q"), (k, "k")))
        o = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, n, -1)
        x = x + o @ w["self_attn.o_proj.weight"].T
        h = norm(x, w["post_attention_layernorm.weight"])
        gate, up = (h @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (jax.nn.silu(gate) * up) @ w["mlp.down_proj.weight"].T
        return x, x

    stacked = {name: jnp.stack([w[name] for w in layers]) for name in layers[0]}
    x, outputs = jax.lax.scan(layer, weights["model.embed_tokens.weight"][tokens], stacked)
    scores = norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T
    return jnp.argmax(scores, axis=-1), outputs[jnp.array(CFG.target_layer_ids)]


def run(drafter, weights, prompts, ends):
    """Texts of length `ends`, and the blocks of each step of each sequence. Sequences that have ended stay idle."""
    target = target_of(weights["model.embed_tokens.weight"], weights["lm_head.weight"])

    def read_text(drafts=()):
        tokens = np.zeros((BATCH, CAPACITY), np.int32)
        for row, ids in enumerate(texts):
            ids = [*ids, *(drafts[row] if len(drafts) else ())][:CAPACITY]
            tokens[row, : len(ids)] = ids
        best, taps = qwen3(weights, tokens)
        return np.asarray(best), np.asarray(taps)

    texts, blocks = [list(ids) for ids in prompts], [[] for _ in prompts]
    best, taps = read_text()
    state = observe(
        drafter,
        rows_of([0] * BATCH, [taps[:, row, : len(ids)] for row, ids in enumerate(texts)]),
        dflash2.init_context(CFG, BATCH),
    )
    for row, ids in enumerate(texts):
        ids.append(int(best[row, len(ids) - 1]))
    while any(len(ids) < end for ids, end in zip(texts, ends, strict=True)):
        at = [len(ids) - 1 for ids in texts]
        drafts = np.asarray(propose(drafter, target, context_of([ids[-1] for ids in texts], at), state).tokens)
        best, taps = read_text(drafts)
        stay = []
        for row, (ids, end) in enumerate(zip(texts, ends, strict=True)):
            right = best[row, at[row] : at[row] + 8]
            accepted = int(np.cumprod(drafts[row, : CAPACITY - len(ids)] == right[:-1][: CAPACITY - len(ids)]).sum())
            kept = accepted + 1 if len(ids) < end else 0
            stay.append(taps[:, row, at[row] : at[row] + kept])
            if kept:
                blocks[row].append([ids[-1], *drafts[row].tolist()])
                ids += right[:kept].tolist()
        state = observe(drafter, rows_of(at, stay), state)
    return [ids[:end] for ids, end in zip(texts, ends, strict=True)], blocks


@needs_golden
def test_greedy_texts_and_blocks(tmp_path):
    drafter, tensors = read("golden_e2e.safetensors", "draft/", tmp_path)
    weights = {key.removeprefix("target/"): jnp.asarray(t) for key, t in tensors.items() if key.startswith("target/")}
    for group in ([0, 1, 2], [3, 4, 4]):
        prompts, outputs = ([tensors[f"e2e/{i}/{key}"][0] for i in group] for key in ("prompt", "output_ids"))
        texts, blocks = run(drafter, weights, prompts, [len(ids) for ids in outputs])
        for i, text, output, drafted in zip(group, texts, outputs, blocks, strict=True):
            assert text == output.tolist()
            theirs = tensors[f"e2e/{i}/blocks_anchor_plus_drafts"]
            # At the end the reference shortens its blocks, which changes every draft; here they are cut afterwards.
            whole = (theirs >= 0).all(axis=1)
            assert len(drafted) == len(theirs) and whole.sum() >= len(theirs) - 7
            np.testing.assert_array_equal(np.array(drafted)[whole], theirs[whole])
