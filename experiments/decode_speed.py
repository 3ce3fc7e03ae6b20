"""How fast does a checkpoint decode on this machine, how long does it compile, and does that grow with its depth?

    python -m experiments.decode_speed

Decoding: one sequence, greedy, as `qwen38 generate` does it. Compiling: the decode step and a prefill chunk, from
shapes alone and without any cache, for the checkpoint and for its layers repeated in 1 to 16 groups.
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.harness import WEIGHTS, Compilation, Timing, append, compile_cold, new_record, table
from qwen38_jax.config import ModelConfig
from qwen38_jax.decode import DecodeState, decode_step, prefill, start
from qwen38_jax.engine import Engine, Request
from qwen38_jax.params import shapes
from qwen38_jax.sampling import sampler_state
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.state import StateConfig, abstract_state

QUESTION = "decode_speed"
GROUPS = (1, 2, 4, 8, 16)
CAPACITY = 512  # tokens that the state of the compiled programs has room for
CHUNK = 64  # tokens of the compiled prefill
PROMPT = "Write a Python function that returns the n-th Fibonacci number, and explain how it works."
COLUMNS = (
    "groups",
    "tokens_per_second=tok/s",
    "ms_per_step=ms/step",
    "tokens_per_step=tokens/step",
    "step_compile_seconds=step compiles, s",
    "prefill_compile_seconds=prefill compiles, s",
)


def decode_record(engine: Engine, checkpoint: str, weights: str, new_tokens: int, repeats: int) -> dict[str, Any]:
    """Speed of decoding `new_tokens` after `PROMPT`, beside the compile times of the same model."""
    messages = [{"role": "user", "content": PROMPT}]
    sampling = SamplingParams(temperature=0.0, seed=0, max_new_tokens=new_tokens, ignore_eos=True)
    request = Request(messages=messages, sampling=sampling, thinking=False)
    # The first one compiles.
    completions = [engine.generate([request])[0] for _ in range(1 + repeats)][1:]
    step = Timing(tuple(c.decode_seconds / c.steps for c in completions))
    return new_record(
        QUESTION,
        weights=weights,
        settings={
            **_settings(engine.cfg),
            "checkpoint": checkpoint,
            "prompt_tokens": completions[0].prompt_tokens,
        },
        results={
            "tokens_per_second": 1 / step.median,
            "prefill": Timing(tuple(c.prefill_seconds for c in completions)),
            **compile_results(engine.cfg, repeats),
        },
        tokens_per_step=1.0,
        seconds_per_step=step,
        prompts=[messages],
        output_tokens=len(completions[0].token_ids),
        thinking=False,
    )


def compile_record(cfg: ModelConfig, repeats: int) -> dict[str, Any]:
    """Compile times alone. No weights are involved, so they count as random."""
    results = compile_results(cfg, repeats)
    return new_record(QUESTION, weights="random", settings=_settings(cfg), results=results, repeats=repeats)


def compile_results(cfg: ModelConfig, repeats: int) -> dict[str, Any]:
    """Seconds from Python to machine code, and the two halves of it."""
    programs = {"step": compile_step(cfg, repeats), "prefill": compile_prefill(cfg, repeats)}
    results = {}
    for name, program in programs.items():
        results[f"{name}_compile_seconds"] = program.seconds
        results[f"{name}_lowering"] = program.lower
        results[f"{name}_xla"] = program.compile
    return results


def compile_step(cfg: ModelConfig, repeats: int) -> Compilation:
    def step(params, state):
        return decode_step(params, cfg, state, top=0)

    return compile_cold(step, shapes(cfg), decode_state(cfg), repeats=repeats, donate_argnums=1)


def compile_prefill(cfg: ModelConfig, repeats: int) -> Compilation:
    def read(params, tokens, valid, state):
        return prefill(params, cfg, tokens, valid, state)

    tokens, valid = (jax.ShapeDtypeStruct((1, CHUNK), dtype) for dtype in (jnp.int32, jnp.bool_))
    return compile_cold(read, shapes(cfg), tokens, valid, decode_state(cfg), repeats=repeats, donate_argnums=3)


def decode_state(cfg: ModelConfig) -> DecodeState:
    """The state of one greedy sequence, as shapes."""
    sampler = sampler_state(
        [SamplingParams(temperature=0.0, seed=0)],
        [()],
        vocab_size=cfg.vocab_size,
        real_vocab_size=cfg.vocab_size,
        eos_ids=cfg.eos_token_ids,
    )
    model = abstract_state(cfg, StateConfig(batch=1, capacity=CAPACITY))
    return jax.eval_shape(functools.partial(start, cfg), model, sampler, jnp.ones(1, bool))


def with_groups(cfg: ModelConfig, groups: int) -> ModelConfig:
    """The same layers, in another number of groups."""
    return dataclasses.replace(cfg, num_hidden_layers=groups * (cfg.linear_per_group + 1))


def _settings(cfg: ModelConfig) -> dict[str, Any]:
    return {
        "groups": cfg.num_groups,
        "layers": cfg.num_hidden_layers,
        "hidden_size": cfg.hidden_size,
        "vocab_size": cfg.vocab_size,
        "dtype": cfg.dtype,
        "batch": 1,
        "compiled_capacity": CAPACITY,
        "compiled_prefill_chunk": CHUNK,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="default: the one that ships")
    parser.add_argument("--weights", choices=WEIGHTS, help="what the checkpoint holds; needed with --checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU")
    parser.add_argument("--new-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of every measurement (%(default)s)")
    args = parser.parse_args(argv)
    if (args.checkpoint is None) != (args.weights is None):
        parser.error("--checkpoint and --weights go together: the checkpoint that ships is trained")
    if args.new_tokens < 2 or args.repeats < 1:
        parser.error("--new-tokens must be at least 2 (the first comes out of the prefill), --repeats at least 1")
    engine = Engine.from_checkpoint(args.checkpoint, dtype=args.dtype)
    name, weights = (args.checkpoint.name, args.weights) if args.checkpoint else ("tiny", "trained")
    records = [decode_record(engine, name, weights, args.new_tokens, args.repeats)]
    records += [compile_record(with_groups(engine.cfg, groups), args.repeats) for groups in GROUPS]
    for record in records:
        append(record)
    print(table(records, COLUMNS))


if __name__ == "__main__":
    main()
