"""Trains the small checkpoint that ships: corpus, tokenizer, data, trunk and MTP head together, export.

    python scripts/train_tiny.py --run runs/tiny --export qwen38_jax/checkpoints/tiny

Everything is kept in the run directory and nothing is done twice: `--seconds` ends a stretch early, and the same
command again goes on from there, to the same result. The data are drawn by `--workers` processes while the model
trains. `--smoke` runs all of it on a CPU in a few minutes.
"""

import argparse
import dataclasses
import json
import os
import pickle
import platform
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import provenance
from qwen38_jax.checkpoint import export_checkpoint
from qwen38_jax.checkpoint.write import write_json
from qwen38_jax.config import ModelConfig
from qwen38_jax.params import Params, abstract, cast, init_params
from qwen38_jax.training.bpe import VOCAB_SIZE, save_tokenizer, train_tokenizer
from qwen38_jax.training.corpus import load_corpus
from qwen38_jax.training.dataset import (
    MIXTURE,
    BlockReader,
    LineEncoder,
    Source,
    draw_block,
    load_tokenizer,
    make_source,
    rows_per_block,
)
from qwen38_jax.training.forward import language_model_loss
from qwen38_jax.training.loop import Batch, TrainConfig, TrainState, fit, read_log
from qwen38_jax.training.matrices import decayed, muon_dimensions

SHARD_BYTES = 15_000_000

# About 12 M parameters, 8 M of them outside the embeddings; every part of the 27B model at a small size. Rather three
# groups of layers than two with a wider MLP: what the model is for, following a text while changing it, takes depth.
MODEL = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=448,
    num_hidden_layers=12,
    linear_per_group=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    rotary_dim=16,
    rope_theta=1e7,
    mrope_section=(3, 3, 2),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_conv_kernel_dim=4,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    mtp_num_hidden_layers=1,
    max_position_embeddings=16384,
    initializer_range=0.03,
    eos_token_ids=(),
    dtype="bfloat16",
)
# A small model wanders at temperature 1, at which the real one is used.
GENERATION = {"do_sample": True, "temperature": 0.4, "top_k": 20, "top_p": 0.95}


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stretch of training: `steps` batches of `rows` rows of `length` tokens."""

    length: int
    rows: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run. Short rows first, long ones at the end of the schedule."""

    model: ModelConfig
    stages: tuple[Stage, ...]
    peak_rate: float = 3e-3
    final_rate: float = 1e-4
    warmup_steps: int = 200
    mtp_weight: float = 0.5
    optimizer: str = "muon"
    seed: int = 0
    max_code_bytes: int | None = None

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)


# 22 minutes on one H200: 590k tokens a second in rows of 2048, 440k in the longest; 8 workers draw faster than that.
# No shorter rows at first: a source file of 100 lines and its changed copy must fit.
FULL = Plan(MODEL, (Stage(4096, 16, 8000), Stage(8192, 8, 1200), Stage(16384, 4, 800)))
SMOKE = Plan(
    dataclasses.replace(MODEL, hidden_size=64, intermediate_size=96, num_hidden_layers=8, dtype="float32"),
    (Stage(256, 4, 30), Stage(512, 2, 10)),
    warmup_steps=5,
    max_code_bytes=1_500_000,
)


def prepare(run: Path, plan: Plan, stdlib: Path | None) -> dict[str, Source]:
    """Tokenizer and documents of both splits, made or as the run directory has them from an earlier stretch."""
    kept = run / "sources.pickle"
    made_for = {"seed": plan.seed, "max_code_bytes": plan.max_code_bytes, "stdlib": str(stdlib)}
    if kept.exists():
        found, sources = pickle.loads(kept.read_bytes())
        if found != made_for:
            raise ValueError(f"{run} was begun with {found}, not with {made_for}: take another directory")
        return sources
    run.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(plan.max_code_bytes, root=stdlib)
    tokenizer = train_tokenizer(corpus.train)
    save_tokenizer(tokenizer, run / "tokenizer", plan.model.max_position_embeddings)
    splits = {"train": corpus.train, "held_out": corpus.held_out}
    sources = {name: make_source(documents, tokenizer, f"{plan.seed}/{name}") for name, documents in splits.items()}
    description = {
        "python": platform.python_version(),
        "mixture": MIXTURE,
        "corpus": corpus.counts,
        "held_out": sorted({document.group for document in corpus.held_out}),
    }
    write_json(run / "data.json", description)
    temporary = kept.with_suffix(".partial")
    temporary.write_bytes(pickle.dumps((made_for, sources)))
    temporary.replace(kept)
    return sources


class Batches:
    """The batch of any step, as a function of the step alone. Tokens int32 and loss weights fp32, `[rows, length]`."""

    def __init__(self, plan: Plan, blocks: BlockReader):
        for stage in plan.stages:
            if rows_per_block(stage.length) % stage.rows:
                raise ValueError(f"{stage}: batches must divide the {rows_per_block(stage.length)} rows of a block")
        self._plan, self._blocks = plan, blocks

    def __call__(self, step: int) -> Batch:
        for stage in self._plan.stages:
            if step < stage.steps:
                index, at = divmod(step * stage.rows, rows_per_block(stage.length))
                block = self._blocks(stage.length, index)
                rows = slice(at, at + stage.rows)
                return block.tokens[rows].astype(np.int32), block.weights[rows].astype(np.float32)
            step -= stage.steps
        raise ValueError(f"the plan ends {step + 1} steps earlier")


def train(run: Path, plan: Plan, blocks: BlockReader, seconds: float) -> TrainState:
    """Trains, for at most about `seconds`. Returns the state reached."""
    config = TrainConfig(
        steps=plan.steps,
        peak_rate=plan.peak_rate,
        final_rate=plan.final_rate,
        warmup_steps=plan.warmup_steps,
    )

    def loss(params: Params, tokens: jax.Array, weights: jax.Array):
        return language_model_loss(params, plan.model, tokens, weights, plan.mtp_weight)

    def init() -> Params:
        return init_params(dataclasses.replace(plan.model, dtype="float32"), jax.random.key(plan.seed))

    infos = abstract(plan.model)
    decays, muon = decayed(infos), muon_dimensions(infos) if plan.optimizer == "muon" else None
    return fit(loss, init, Batches(plan, blocks), config, run, decays=decays, muon=muon, seconds=seconds)


def held_out_loss(plan: Plan, source: Source, params: Params) -> dict[str, float]:
    """Mean loss of the trunk and of the MTP head over four batches of held-out rows, the shortest of the plan."""
    call = jax.jit(lambda p, t, w: language_model_loss(p, plan.model, t, w, 0.0)[1])
    stage = plan.stages[0]
    block = draw_block(source, LineEncoder(source.tokenizer), stage.length, index=0)
    parts = []
    for at in range(0, 4 * stage.rows, stage.rows):
        rows = slice(at, at + stage.rows)
        batch = jnp.asarray(block.tokens[rows], jnp.int32), jnp.asarray(block.weights[rows], jnp.float32)
        parts.append(jax.device_get(call(params, *batch)))
    return {name: float(np.mean([part[name] for part in parts])) for name in parts[0]}


def export(run: Path, plan: Plan, params: Params, directory: Path) -> None:
    """Writes the Hugging Face directory, in shards of at most 15 MB."""
    tokenizer = load_tokenizer(run / "tokenizer")
    stop_ids = tuple(tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>"))
    cfg = dataclasses.replace(plan.model, eos_token_ids=stop_ids)
    export_checkpoint(
        directory,
        cast(params, cfg),
        cfg,
        generation_config={**GENERATION, "eos_token_id": list(stop_ids), "pad_token_id": stop_ids[1]},
        shard_bytes=SHARD_BYTES,
        copy_from=run / "tokenizer",
    )


def plot(run: Path, path: Path) -> None:
    """Loss curves as a picture; needs the `plots` extra."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    log = read_log(run / "log.jsonl")
    figure, axes = plt.subplots(figsize=(7, 4))
    for name in ("loss", "mtp_loss"):
        axes.plot([line["step"] for line in log], [line[name] for line in log], label=name)
    axes.set(xlabel="step", ylabel="cross-entropy (nats)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="directory of the run, made or resumed")
    parser.add_argument("--export", type=Path, help="where to write the checkpoint when the last step is done")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop training after about so long")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a smaller model")
    parser.add_argument("--steps", type=int, nargs="+", metavar="N", help="steps with rows of each length")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), help="instead of the plan's")
    parser.add_argument("--stdlib", type=Path, help="library directory of another Python installation to learn from")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="that draw the data")
    parser.add_argument("--prepare-only", action="store_true", help="stop before training")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the loss curves")
    args = parser.parse_args()
    plan = SMOKE if args.smoke else FULL
    if args.steps:
        if len(args.steps) != len(plan.stages):
            parser.error(f"--steps takes {len(plan.stages)} numbers, one for each of {[s.length for s in plan.stages]}")
        stages = tuple(dataclasses.replace(s, steps=n) for s, n in zip(plan.stages, args.steps, strict=True))
        plan = dataclasses.replace(plan, stages=stages)
    if args.optimizer:
        plan = dataclasses.replace(plan, optimizer=args.optimizer)
    sources = prepare(args.run, plan, args.stdlib)
    if args.prepare_only:
        return
    here = provenance()
    machine = {"commit": here["commit"], "device": here["device"], "devices": jax.device_count()}
    write_json(args.run / "plan.json", {**dataclasses.asdict(plan), **machine})
    with BlockReader(sources["train"], args.workers) as blocks:
        state = train(args.run, plan, blocks, args.seconds)
    if args.plot:
        plot(args.run, args.plot)
    if int(state.step) < plan.steps:
        print(f"stopped at step {int(state.step)} of {plan.steps}; the same command goes on from there")
        return
    losses = held_out_loss(plan, sources["held_out"], state.params)
    write_json(args.run / "held_out.json", losses)
    print(json.dumps(losses))
    if args.export:
        export(args.run, plan, state.params, args.export)
        print(f"wrote {args.export}")


if __name__ == "__main__":
    main()
