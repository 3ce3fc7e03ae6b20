"""Trains the small checkpoint that ships: corpus, tokenizer, data, trunk and MTP head together, export.

    python scripts/train_tiny.py --run runs/tiny --export qwen38_jax/checkpoints/tiny

Everything is kept in the run directory and nothing is done twice: `--seconds` ends a stretch early, and the same
command again goes on from there, to the same result. `--smoke` runs all of it on a CPU in a few minutes.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax.checkpoint import export_checkpoint
from qwen38_jax.config import ModelConfig
from qwen38_jax.params import Params, abstract, cast, init_params
from qwen38_jax.training import dataset
from qwen38_jax.training.bpe import VOCAB_SIZE, save_tokenizer, train_tokenizer
from qwen38_jax.training.corpus import Corpus, load_corpus
from qwen38_jax.training.forward import language_model_loss
from qwen38_jax.training.loop import Batch, TrainConfig, fit, read_log

SHARD_BYTES = 15_000_000

# About 12 M parameters, 8 M of them outside the embeddings; every part of the 27B model at a small size.
MODEL = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=8,
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
    """A stretch of training: `steps` batches of `rows` rows, out of a data set of `tokens` tokens."""

    sequence_length: int
    rows: int
    steps: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run. Short rows first, long ones at the end of the schedule."""

    model: ModelConfig
    stages: tuple[Stage, ...]
    peak_rate: float = 3e-3
    final_rate: float = 1e-4
    warmup_steps: int = 200
    mtp_weight: float = 0.3
    seed: int = 0
    max_code_bytes: int | None = None

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)


# 17 minutes on one H200, where it reads 415k tokens a second in short rows and 300k in long ones.
FULL = Plan(MODEL, (Stage(2048, 32, 6460, 200_000_000), Stage(8192, 8, 1120, 66_000_000)))
SMOKE = Plan(
    dataclasses.replace(MODEL, hidden_size=64, intermediate_size=96, dtype="float32"),
    (Stage(256, 4, 30, 60_000), Stage(512, 2, 10, 30_000)),
    warmup_steps=5,
    max_code_bytes=1_500_000,
)


def prepare(run: Path, plan: Plan, stdlib: Path | None, workers: int) -> None:
    """Makes the tokenizer and the data sets that the run directory lacks."""
    corpus: Corpus | None = None
    if not (run / "tokenizer" / "tokenizer.json").exists():
        corpus = load_corpus(plan.max_code_bytes, root=stdlib)
        save_tokenizer(train_tokenizer(corpus.train), run / "tokenizer", plan.model.max_position_embeddings)
    for stage in plan.stages:
        if _is_built(_data(run, stage), stage, plan.seed):
            continue
        corpus = corpus or load_corpus(plan.max_code_bytes, root=stdlib)
        began = time.perf_counter()
        dataset.build(
            _data(run, stage),
            run / "tokenizer",
            tokens=stage.tokens,
            sequence_length=stage.sequence_length,
            seed=plan.seed,
            workers=workers,
            corpus=corpus,
        )
        print(f"{_data(run, stage)}: {stage.tokens:,} tokens in {time.perf_counter() - began:.0f} s", flush=True)


def _is_built(directory: Path, stage: Stage, seed: int) -> bool:
    """Whether the data set is there; an error if it was built for another plan."""
    if not (directory / "manifest.json").exists():
        return False
    manifest = json.loads((directory / "manifest.json").read_text())
    found = manifest["splits"]["train"]["rows"], manifest["seed"]
    if found != (stage.tokens // stage.sequence_length, seed):
        raise ValueError(f"{directory} holds {found[0]} rows of seed {found[1]}, made for another plan: remove it")
    return True


def _data(run: Path, stage: Stage) -> Path:
    return run / f"data-{stage.sequence_length}"


class Batches:
    """The batch of any step: rows of the stage's data set in an order of their own for each pass over it."""

    def __init__(self, run: Path, plan: Plan, split: str = "train"):
        self._plan = plan
        self._sets = [dataset.load(_data(run, stage), split, run / "tokenizer")[:2] for stage in plan.stages]

    def __call__(self, step: int) -> Batch:
        """Tokens int32 and loss weights fp32, both `[rows, sequence_length]`."""
        for stage, (tokens, weights) in zip(self._plan.stages, self._sets, strict=True):
            if step < stage.steps:
                rows = self._rows(step, stage.rows, len(tokens))
                return tokens[rows].astype(np.int32), weights[rows].astype(np.float32)
            step -= stage.steps
        raise ValueError(f"the plan ends {step + 1} steps earlier")

    def _rows(self, step: int, count: int, total: int) -> np.ndarray:
        if total < count:
            raise ValueError(f"a batch of {count} rows needs at least as many in the data set, which has {total}")
        passes, at = divmod(step, total // count)
        order = np.random.default_rng((self._plan.seed, passes)).permutation(total)
        return np.sort(order[at * count : (at + 1) * count])


def train(run: Path, plan: Plan, seconds: float):
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

    decays = jax.tree.map(lambda info: _decays(info.axes), abstract(plan.model))
    return fit(loss, init, Batches(run, plan), config, run, decays=decays, seconds=seconds)


def _decays(axes: tuple[str, ...]) -> bool:
    """Matrices do; norms, the short filters and the per-head constants of the recurrence do not."""
    return len([axis for axis in axes if axis != "layer"]) == 2 and "width" not in axes


def held_out_loss(run: Path, plan: Plan, params: Params) -> dict[str, float]:
    """Mean loss of the trunk and of the MTP head over the held-out rows of every sequence length."""
    call = jax.jit(lambda p, t, w: language_model_loss(p, plan.model, t, w, 0.0)[1])
    results = {}
    for stage in plan.stages:
        tokens, weights, _ = dataset.load(_data(run, stage), "held_out", run / "tokenizer")
        parts = []
        count = min(stage.rows, len(tokens))
        for at in range(0, len(tokens) - count + 1, count):
            rows = slice(at, at + count)
            batch = jnp.asarray(tokens[rows], jnp.int32), jnp.asarray(weights[rows], jnp.float32)
            parts.append(jax.device_get(call(params, *batch)))
        for name in parts[0]:
            results[f"{name}_{stage.sequence_length}"] = float(np.mean([part[name] for part in parts]))
    return results


def export(run: Path, plan: Plan, params: Params, directory: Path) -> None:
    """Writes the Hugging Face directory, in shards of at most 15 MB."""
    tokenizer = dataset.load_tokenizer(run / "tokenizer")
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
    parser.add_argument("--steps", type=int, nargs=2, metavar="N", help="steps with short and with long rows")
    parser.add_argument("--stdlib", type=Path, help="library directory of another Python installation to learn from")
    parser.add_argument("--workers", type=int, default=1, help="processes that build the data")
    parser.add_argument("--prepare-only", action="store_true", help="stop before training")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the loss curves")
    args = parser.parse_args()
    plan = SMOKE if args.smoke else FULL
    if args.steps:
        stages = tuple(dataclasses.replace(s, steps=n) for s, n in zip(plan.stages, args.steps, strict=True))
        plan = dataclasses.replace(plan, stages=stages)
    prepare(args.run, plan, args.stdlib, args.workers)
    if args.prepare_only:
        return
    state = train(args.run, plan, args.seconds)
    if args.plot:
        plot(args.run, args.plot)
    if int(state.step) < plan.steps:
        print(f"stopped at step {int(state.step)} of {plan.steps}; the same command goes on from there")
        return
    losses = held_out_loss(args.run, plan, state.params)
    (args.run / "held_out.json").write_text(json.dumps(losses, indent=1) + "\n")
    print(json.dumps(losses))
    if args.export:
        export(args.run, plan, state.params, args.export)
        print(f"wrote {args.export}")


if __name__ == "__main__":
    main()
