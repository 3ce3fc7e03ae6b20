"""How long does a decode step of the 27B model take with its kernels, and where does the time go?

    python -m experiments.full_size_step --memory-gib 24             64 layers, int4, on a GPU
    python -m experiments.full_size_step --scale small --rows 1 5 --contexts 64

Weights are random and made on the device: int4 in groups of 128, the embedding in int8. One row is a step of plain
decoding; more are a whole step with drafts (`--speculate`): propose, verify, accept, commit. What is accepted means
nothing here, and costs the same whatever it is.

The floor is the bytes that a step has to move at the rate at which this device, in this run, reads a large array:
weights once (a drafter's once a draft), the context's keys and values once, recurrent states in and out. Parts are
timed alone: every kind of matrix for all layers, and the forward pass; "other" is what a forward pass takes beside its
matrices, "around" what a step takes beside a forward pass and the head. On a GPU the compiled step is searched for
matrices that no kernel reads and for copies of weights or caches; there must be none. "copied" is what else it copies
(a step's code, not its run: a copy within a loop counts once).
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.harness import Compilation, Timing, append, compile_cold, measure_chain, new_record, table
from experiments.hlo import Copy, large_copies, packed_leaves, without_kernel
from experiments.kernel_speed import read_rate
from experiments.load_speed import pool_peak, process_bytes
from qwen38_jax.block import chain_block
from qwen38_jax.checkpoint import synthetic
from qwen38_jax.checkpoint.native import Spec
from qwen38_jax.config import ModelConfig
from qwen38_jax.drafters.modes import MTP_TOKENS, make_drafter
from qwen38_jax.engine.memory import cap_device_memory, device_budget
from qwen38_jax.engine.plan import Settings, Weights, require_fit
from qwen38_jax.engine.programs import Plain, Speculative
from qwen38_jax.layers.linear import linear
from qwen38_jax.model import forward
from qwen38_jax.params import ArrayInfo, Params, abstract, layer_at, tree_bytes
from qwen38_jax.quantization import QuantTensor
from qwen38_jax.sampling import sampler_state
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.state import State, StateConfig, abstract_state, capacity_for, init_state

Array = jax.Array

QUESTION = "full_size_step"
MODES = ("lookup", "mtp", "mtp+lookup")
STEPS = 8  # timed in a row
COPY_BYTES = 1 << 20  # smaller copies cost nothing: a layer of the full model has 3 MB of recurrent state
# Bits of the matrices; what is not named stays in floats.
BITS = dict.fromkeys(("qkv", "o", "qkvz", "out", "gate_up", "down", "fc", "lm_head"), 4) | {"embed": 8}
COLUMNS = (
    "rows",
    "context",
    "ms_per_step=ms/step",
    "ms_per_step_spread.q1=q1",
    "ms_per_step_spread.q3=q3",
    "moved_gb=GB moved",
    "floor_ms=floor, ms",
    "of_floor=floor / step",
    "compile_seconds=compiles, s",
    "workspace_mib=workspace, MiB",
    "copied_mb=copied, MB",
    "pool_peak_gib=pool peak, GiB",
    "process_gib=process, GiB",
)


def random_params(cfg: ModelConfig, key: Array) -> Params:
    """Parameters in the formats of `BITS`; activations keep their size through the layers."""
    infos, treedef = jax.tree_util.tree_flatten_with_path(abstract(cfg))
    leaves = []
    for (path, info), own in zip(infos, jax.random.split(key, len(infos)), strict=True):
        bits = BITS.get(path[-1].name)
        leaves.append(info.init(own, info.shape, jnp.dtype(info.dtype)) if bits is None else _integers(info, bits, own))
    return jax.tree.unflatten(treedef, leaves)


def _integers(info: ArrayInfo, bits: int, key: Array) -> QuantTensor:
    """Every code occurs and half of the scales are negative. Made a layer at a time: random numbers take several times
    their own memory on the way."""
    *stack, n, k = info.shape
    spec = Spec(bits, synthetic.GROUP, "float16", "rows" if bits == 8 else "mma")
    template = spec.template((n, k), ()).replace(dtype=info.dtype)
    size = 12**0.5 / (2**bits * k**0.5)

    def matrix(key):
        of_codes, of_sizes, of_signs = jax.random.split(key, 3)
        words = template.scales.dtype == jnp.int32  # of two scales
        shape = (*template.scales.shape, 2) if words else template.scales.shape
        scales = size * jnp.exp(0.2 * jax.random.normal(of_sizes, shape))
        scales = (scales * jax.random.rademacher(of_signs, shape)).astype(spec.scales)
        codes = jax.random.bits(of_codes, template.codes.shape, f"uint{8 * template.codes.dtype.itemsize}")
        return template.replace(
            codes=lax.bitcast_convert_type(codes, template.codes.dtype),
            scales=lax.bitcast_convert_type(scales, jnp.int32) if words else scales,
        )

    if not stack:
        return jax.jit(matrix)(key)
    return jax.jit(lambda keys: lax.map(matrix, keys))(jax.random.split(key, stack[0]))


@dataclasses.dataclass(frozen=True)
class Step:
    """Steps of `rows` rows.

    Attributes:
      way: how tokens are decoded. weights: what its programs take first.
      draft_bytes: that proposing and observing drafts read.
    """

    rows: int
    way: Plain | Speculative
    weights: Any
    draft_bytes: int

    @classmethod
    def make(cls, params: Params, cfg: ModelConfig, rows: int, mode: str) -> "Step":
        if rows == 1:
            return cls(rows, Plain(cfg), params, 0)
        own = None if mode == "lookup" else rows - 1 if mode == "mtp" else min(MTP_TOKENS, rows - 1)
        drafter, spec = make_drafter(mode, params, draft_tokens=own, verify_tokens=rows - 1)
        way = Speculative(cfg, drafter, spec)
        drafts = drafter.draft_tokens
        draft_bytes = drafts * tree_bytes((params.mtp, params.lm_head)) + tree_bytes(params.mtp) if drafts else 0
        return cls(rows, way, way.weights(params), draft_bytes)

    def start(self, cfg: ModelConfig, sizes: StateConfig, context: int) -> Any:
        """The state of one greedy sequence after `context` random tokens."""
        greedy, vocab = SamplingParams(temperature=0.0, seed=0), cfg.vocab_size
        sampler = sampler_state([greedy], [()], vocab_size=vocab, real_vocab_size=vocab, eos_ids=())
        room = jnp.full(1, sizes.capacity - context - self.rows, jnp.int32)
        model = random_state(cfg, sizes, context)
        state = self.way.start(sizes, self.weights, model, sampler, jnp.ones(1, bool), room)
        if self.rows == 1:
            return state
        return state.replace(history=jax.random.randint(jax.random.key(1), state.history.shape, 0, vocab, jnp.int32))


def random_state(cfg: ModelConfig, sizes: StateConfig, context: int) -> State:
    """A state in which `context` tokens have been read."""
    state = init_state(cfg, sizes)
    pools = jax.tree.map(lambda pool: jax.random.normal(jax.random.key(0), pool.shape, pool.dtype), state.kv)
    return state.replace(kv=pools, lengths=jnp.full_like(state.lengths, context))


def moved_bytes(params: Params, model: State, context: int, draft_bytes: int) -> int:
    """What a step has to read and write; `model` may be abstract."""
    weights = tree_bytes((params.linear, params.full, params.norm, params.lm_head))
    _, pages, page, *_ = model.kv.k.shape
    token = tree_bytes(model.kv) // (pages * page)
    return weights + context * token + 2 * tree_bytes((model.recurrent, model.conv)) + draft_bytes


def time_forward(params: Params, cfg: ModelConfig, rows: int, model: State, repeats: int) -> Timing:
    """The forward pass alone, of as many rows; uses `model` up."""
    tokens = jnp.zeros((1, rows), jnp.int32)

    def read(params, model):
        block = chain_block(tokens, model.lengths)
        hidden, _, model = forward(params, cfg, block, model, commit=rows == 1)
        return model, hidden

    program = jax.jit(read, donate_argnums=1)
    return measure_chain(lambda pair: program(params, pair[0]), (model, None), steps=STEPS, repeats=repeats)[0]


def time_matrices(params: Params, rows: int, repeats: int) -> dict[str, float]:
    """Milliseconds of all layers' products with each kind of matrix, and of the head's."""
    weights = packed_leaves({"linear": params.linear, "full": params.full, "lm_head": params.lm_head})
    found = {}
    for path, weight in weights.items():
        kind, _, rest = path.partition(".")
        name = f"{kind}_{rest.rpartition('.')[2]}" if rest else kind
        found[name] = 1000 * _time_matrix(weight, rows, repeats, None if rest else "float32").median
    return found


def _time_matrix(weight: QuantTensor, rows: int, repeats: int, out_dtype: str | None) -> Timing:
    *stack, n, k = weight.shape
    x = jnp.full((1, rows, k), 0.01, weight.dtype)

    @jax.jit
    def all_layers(x, weight):
        def one(i, _):
            return linear(x, layer_at(weight, i) if stack else weight, out_dtype)

        return lax.fori_loop(0, stack[0] if stack else 1, one, jnp.zeros((1, rows, n), out_dtype or x.dtype))

    return measure_chain(lambda _: all_layers(x, weight), None, steps=STEPS, repeats=repeats)[0]


def compile_step(step: Step, cfg: ModelConfig, sizes: StateConfig) -> Compilation:
    state = jax.eval_shape(lambda: step.start(cfg, sizes, 1))

    def run(weights, state):
        return step.way.step(step.rows - 1, 0, weights, state)

    return compile_cold(run, step.weights, state, donate_argnums=1)


def faults_of(step: Step, params: Params, model: State, copies: list[Copy], text: str) -> list[str]:
    """What an optimised program for a GPU should not do: take a matrix without a kernel, copy a weight or a cache.

    A copy is known by its size: that of an array, or of one layer of it.
    """
    used = (params.linear, params.full, params.lm_head, params.mtp if step.draft_bytes else None)
    sizes = {size for leaf in jax.tree.leaves((used, model)) for size in _sizes(leaf)}
    missing = [f"no kernel reads {shape}" for shape in without_kernel(text, packed_leaves(used).values())]
    return missing + [f"{copy.name} copies {copy.shape}" for copy in copies if copy.nbytes in sizes]


def _sizes(leaf: Array) -> tuple[int, int]:
    nbytes = leaf.size * leaf.dtype.itemsize
    return nbytes, nbytes // max(leaf.shape[0], 1)


def records_of(params: Params, cfg: ModelConfig, rows: int, rate: float, args: argparse.Namespace) -> list[dict]:
    """A record for every context; rate: bytes a second at which the device reads."""
    step = Step.make(params, cfg, rows, args.speculate)
    sizes = StateConfig(1, capacity(args), rows if rows > 1 else 0)
    matrices = time_matrices(params, rows, args.repeats)
    compiled = compile_step(step, cfg, sizes)
    program = compiled.program
    text, model = program.as_text(), abstract_state(cfg, sizes)
    copies = large_copies(text, COPY_BYTES)
    shared = {
        "read_gb_per_second": rate / 1e9,
        "lower_seconds": compiled.lower.median,
        "compile_seconds": compiled.compile.median,
        "workspace_mib": program.memory_analysis().temp_size_in_bytes / 2**20,
        "copied_mb": sum(copy.nbytes for copy in copies) / 1e6,
        "faults": faults_of(step, params, model, copies, text) if jax.default_backend() == "gpu" else None,
    }
    records = []
    for context in args.contexts:
        forward_time = time_forward(params, cfg, rows, random_state(cfg, sizes, context), args.repeats)
        first = (step.start(cfg, sizes, context), None)
        timing, _ = measure_chain(lambda pair: program(step.weights, pair[0]), first, steps=STEPS, repeats=args.repeats)
        del first
        nbytes = moved_bytes(params, model, context, step.draft_bytes)
        parts = parts_of(matrices, forward_time.median, timing.median)
        results = {
            "moved_gb": nbytes / 1e9,
            "floor_ms": 1000 * nbytes / rate,
            "of_floor": nbytes / rate / timing.median,
            "forward": forward_time,
            "parts_ms": parts,
            "pool_peak_gib": _gib(pool_peak()),
            "process_gib": _gib(process_bytes()),
            **shared,
        }
        settings = {
            "rows": rows,
            "context": context,
            "speculate": args.speculate if rows > 1 else "none",
            "layers": cfg.num_hidden_layers,
            "hidden_size": cfg.hidden_size,
            "format": "int4 in groups of 128, embedding int8",
            "capacity": sizes.capacity,
            "memory_gib": args.memory_gib,
        }
        records.append(
            new_record(QUESTION, weights="random", settings=settings, results=results, seconds_per_step=timing)
        )
    return records


def parts_of(matrices: dict[str, float], forward_seconds: float, step_seconds: float) -> dict[str, float]:
    """Milliseconds of a step, part by part; they add up to it."""
    forward_ms, head = 1000 * forward_seconds, matrices["lm_head"]
    other = forward_ms - (sum(matrices.values()) - head)
    return {**matrices, "other": other, "around": 1000 * step_seconds - forward_ms - head}


def capacity(args: argparse.Namespace) -> int:
    """Tokens that the state has room for: the longest context, and what all steps may emit."""
    return capacity_for(max(args.contexts) + max(args.rows) * (STEPS * (args.repeats + 1) + 1))


def _gib(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 2**30


def run(args: argparse.Namespace) -> list[dict]:
    """Raises NotEnoughMemory before anything is allocated, if it is too much."""
    cfg = synthetic.SMALL if args.scale == "small" else synthetic.FULL
    key = jax.random.key(0)
    weights = Weights.of_params(jax.eval_shape(lambda: random_params(cfg, key)), cfg)
    rows = max(args.rows)
    settings = Settings(
        context=capacity(args), prompt=1, drafters=("lookup",) if rows > 1 else (), verify_rows=rows if rows > 1 else 0
    )
    require_fit(weights, settings, device_budget(args.memory_gib), f"a step at {max(args.contexts)} tokens")
    params = random_params(cfg, key)
    rate = read_rate(args.read_mib << 20)
    return [record for rows in args.rows for record in records_of(params, cfg, rows, rate, args)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=("full", "small"), default="full", help="default: %(default)s")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 8, 16], metavar="N", help="default: 1 5 8 16")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192], metavar="N", help="default: 1024 8192")
    parser.add_argument("--speculate", choices=MODES, default="lookup", help="with more rows (default: %(default)s)")
    parser.add_argument("--memory-gib", type=float, metavar="G", help="do with so much of the GPU")
    parser.add_argument("--read-mib", type=int, default=2048, metavar="N", help="read to find the rate (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help=f"of {STEPS} steps (default: %(default)s)")
    args = parser.parse_args(argv)
    if min(*args.rows, *args.contexts, args.read_mib, args.repeats) < 1:
        parser.error("--rows, --contexts, --read-mib and --repeats must be at least 1")
    try:
        if args.memory_gib is not None:
            cap_device_memory(args.memory_gib)
        records = run(args)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    for record in records:
        append(record)
    print(table(records, COLUMNS))
    print()
    print(
        table(
            records, ("rows", "context", *(f"parts_ms.{part}={part}, ms" for part in records[0]["results"]["parts_ms"]))
        )
    )
    if faults := [f"{r['settings']['rows']} rows: {fault}" for r in records for fault in r["results"]["faults"] or ()]:
        sys.exit("\n".join(["error: a compiled step does what it should not:", *dict.fromkeys(faults)]))


if __name__ == "__main__":
    main()
