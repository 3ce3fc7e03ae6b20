"""The whole greedy loop through the compiled step against the reference's, whose target is a small dense Qwen3.

This model computes what that does if its Gated DeltaNet layers add nothing and its attention gates are all one half.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qwen38_jax.config import ModelConfig
from qwen38_jax.drafters.dflash2 import DFlash2
from qwen38_jax.params import Attention, DecoderLayer, Mlp, Params, shapes
from qwen38_jax.spec_config import SpecConfig
from tests.drafters.dflash2_golden import CFG, read
from tests.golden import needs_golden
from tests.speculation import GREEDY, begin, step

LAYERS, HEADS, DIM = CFG.num_target_layers, CFG.num_attention_heads, CFG.head_dim
TARGET = ModelConfig(
    vocab_size=CFG.vocab_size,
    hidden_size=CFG.hidden_size,
    intermediate_size=96,
    num_hidden_layers=2 * LAYERS,
    linear_per_group=1,
    num_attention_heads=HEADS,
    num_key_value_heads=CFG.num_key_value_heads,
    head_dim=DIM,
    rotary_dim=DIM,
    rope_theta=1e4,
    mrope_section=(DIM // 2, 0, 0),
    linear_num_key_heads=1,
    linear_num_value_heads=1,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
    linear_conv_kernel_dim=4,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    mtp_num_hidden_layers=0,
    max_position_embeddings=4096,
    initializer_range=0.0,
    eos_token_ids=(),
    dtype="float32",
)
DRAFTER = dataclasses.replace(
    CFG, num_target_layers=2 * LAYERS, target_layer_ids=tuple(2 * i + 1 for i in CFG.target_layer_ids)
)
NEW = 48


def qwen3(weights) -> Params:
    """The parameters that make the model a Qwen3 of these weights."""

    def stacked(name):
        return np.stack([weights[f"model.layers.{i}.{name}.weight"] for i in range(LAYERS)])

    def projections(*names):
        return [stacked(f"self_attn.{name}_proj") for name in names]

    q, k, v, o = projections("q", "k", "v", "o")
    q = q.reshape(LAYERS, HEADS, DIM, -1)
    q_gate = np.concatenate([q, np.zeros_like(q)], axis=2).reshape(LAYERS, 2 * HEADS * DIM, -1)
    full = DecoderLayer(
        input_norm=stacked("input_layernorm") - 1,  # zero-centred here
        mixer=Attention(
            qkv=np.concatenate([q_gate, k, v], axis=1),
            o=2 * o,  # sigmoid(0) = 1/2
            q_norm=stacked("self_attn.q_norm") - 1,
            k_norm=stacked("self_attn.k_norm") - 1,
        ),
        post_norm=stacked("post_attention_layernorm") - 1,
        mlp=Mlp(np.concatenate([stacked("mlp.gate_proj"), stacked("mlp.up_proj")], axis=1), stacked("mlp.down_proj")),
    )
    params = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes(TARGET)).replace(
        embed=weights["model.embed_tokens.weight"],
        full=full,
        norm=weights["model.norm.weight"] - 1,
        lm_head=weights["lm_head.weight"],
    )
    return jax.device_put(params)


@struct.dataclass
class Recorder:
    """A drafter whose state also holds what it proposed last."""

    drafter: DFlash2

    name, draft_tokens, tap_layers = "dflash2", DRAFTER.block_size - 1, DRAFTER.target_layer_ids

    def init(self, cfg, sizes):
        return self.drafter.init(cfg, sizes), jnp.zeros((sizes.batch, self.draft_tokens), jnp.int32)

    def propose(self, params, cfg, context, state):
        proposal, inner = self.drafter.propose(params, cfg, context, state[0])
        return proposal, (inner, proposal.tokens)

    def observe(self, params, cfg, rows, state):
        return self.drafter.observe(params, cfg, rows, state[0]), state[1]


@needs_golden
def test_greedy_texts_and_blocks(tmp_path):
    drafter, tensors = read("golden_e2e.safetensors", "draft/", tmp_path)
    drafter = Recorder(dataclasses.replace(drafter, cfg=DRAFTER))
    params = qwen3({k.removeprefix("target/"): t for k, t in tensors.items() if k.startswith("target/")})
    prompts, outputs = ([tensors[f"e2e/{i}/{key}"][0].tolist() for i in range(5)] for key in ("prompt", "output_ids"))
    requests = [dataclasses.replace(GREEDY, max_new_tokens=NEW)] * 5
    spec = SpecConfig(verify_tokens=drafter.draft_tokens)
    state, output = begin(params, TARGET, drafter, spec, prompts, requests)
    texts, blocks = [list(ids) for ids in prompts], [[] for _ in prompts]
    drafting = [False] * 5  # the first token comes without
    while True:
        output, drafts, active = jax.device_get((output, state.drafter[1], state.decode.active))
        for row, text in enumerate(texts):
            if drafting[row]:
                blocks[row].append([text[-1], *drafts[row].tolist()])
            text += output.tokens[row, : output.emitted[row]].tolist()
        if not active.any():
            break
        drafting = active
        state, output = step(params, TARGET, drafter, spec, state, verify_tokens=drafter.draft_tokens, top=0)
    assert texts == outputs
    for i, drafted in enumerate(blocks):
        theirs = tensors[f"e2e/{i}/blocks_anchor_plus_drafts"]
        # At the end the reference shortens its blocks, which changes every draft; here they are cut afterwards.
        whole = (theirs >= 0).all(axis=1)
        assert len(drafted) == len(theirs) and whole.sum() >= len(theirs) - 7
        np.testing.assert_array_equal(np.array(drafted)[whole], theirs[whole])
