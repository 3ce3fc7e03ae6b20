"""The DFlash2 drafters of the golden files, and calls that tests share."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from qwen38_jax.checkpoint import load_drafter
from qwen38_jax.config import DFlash2Config
from qwen38_jax.drafters import dflash2
from qwen38_jax.drafters.dflash2 import DFlash2
from qwen38_jax.drafters.interface import DraftContext, Observed
from qwen38_jax.params import Params, abstract_dflash2
from qwen38_jax.sampling import SamplerState, sampler_state
from qwen38_jax.sampling_params import SamplingParams
from tests.golden import GOLDEN

CFG = DFlash2Config(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=24,
    rope_theta=1e7,
    rms_norm_eps=1e-6,
    max_position_embeddings=128,
    num_target_layers=4,
    target_layer_ids=(0, 2),
    block_size=8,
    mask_token_id=126,
    conv_kernel_size=2,
    conv_group_size=16,
    selector_rank=12,
    selector_top_k=16,
    initializer_range=0.02,
    dtype="float32",
)


def read(name: str, prefix: str, path) -> tuple[DFlash2, dict[str, np.ndarray]]:
    """The drafter whose tensors are under `prefix` in a golden file, by way of a checkpoint directory; all tensors."""
    with safe_open(GOLDEN / name, "numpy") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    weights = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
    save_file({k: t for k, t in weights.items() if not k.startswith("target_")}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CFG.to_hf()))
    params, cfg = load_drafter(path)
    assert cfg == CFG
    return DFlash2(params, cfg), tensors


def random_drafter(cfg: DFlash2Config) -> DFlash2:
    """Random weights: next to nothing that it drafts is accepted."""
    rng = np.random.default_rng(0)
    infos, treedef = jax.tree.flatten(abstract_dflash2(cfg))
    leaves = [jnp.asarray(rng.normal(size=info.shape) * 0.2, jnp.float32) for info in infos]
    return DFlash2(jax.tree.unflatten(treedef, leaves), cfg)


def target_of(embed, lm_head) -> Params:
    """A target of which a drafter reads the embedding and the head only."""
    return Params(embed=jnp.asarray(embed), linear=None, full=None, norm=None, lm_head=jnp.asarray(lm_head), mtp=None)


def sampler_of(*requests: SamplingParams, vocab: int = CFG.vocab_size) -> SamplerState:
    return sampler_state(requests, [()] * len(requests), vocab_size=vocab, real_vocab_size=vocab, eos_ids=())


GREEDY = SamplingParams(temperature=0, seed=0)


BATCH = 3  # of all tests, and
ROWS = 40  # of all calls of `observe`, so that few programs are compiled; more than the window has


def context_of(anchors, positions, *requests: SamplingParams) -> DraftContext:
    """What `DFlash2.propose` reads of a DraftContext."""
    return DraftContext(
        anchor=jnp.asarray(anchors, jnp.int32),
        position=jnp.asarray(positions, jnp.int32),
        hidden=None,
        history=None,
        active=None,
        sampler=sampler_of(*(requests or [GREEDY] * BATCH)),
        block_table=None,
    )


def rows_of(starts, sequences: list[np.ndarray], *, garbage: float = np.nan, left: bool = False) -> Observed:
    """What `DFlash2.observe` reads of Observed, padded to ROWS.

    Args:
      starts: `[B]` position of the first row of each sequence.
      sequences: of each sequence the taps `[n, L, H]` of the rows that stay; L may be 0.
      garbage: what the rows that do not stay hold; left: whether those are in front.
    """
    taps, width = sequences[0].shape[0], sequences[0].shape[2]
    values = np.full((taps, len(sequences), ROWS, width), garbage, np.float32)
    positions, valid = np.zeros((len(sequences), ROWS), np.int32), np.zeros((len(sequences), ROWS), bool)
    for b, rows in enumerate(sequences):
        n = rows.shape[1]
        first = ROWS - n if left else 0
        positions[b] = starts[b] + np.arange(ROWS) - first
        values[:, b, first : first + n], valid[b, first : first + n] = rows, True
    return Observed(
        tokens=None,
        positions=jnp.asarray(positions),
        valid=jnp.asarray(valid),
        hidden=None,
        taps=jnp.asarray(values),
        before=None,
        block_table=None,
    )


@jax.jit
def propose(drafter: DFlash2, target: Params, context: DraftContext, state):
    return drafter.propose(target, None, context, state)[0]


@jax.jit
def observe(drafter: DFlash2, rows: Observed, state):
    return drafter.observe(None, None, rows, state)


@jax.jit
def hidden_of(drafter: DFlash2, state, x, positions):
    return dflash2.block_hidden(drafter.params, drafter.cfg, state, x, positions)
