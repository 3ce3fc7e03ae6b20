"""How fast does a checkpoint load, and how much memory of host and device does that take at most?

    python -m experiments.load_speed --checkpoint DIR --weights random --memory-gib 24

`--memory-gib` has the process do with that much of a larger GPU, CUDA context and graphs included. After loading, a
prefill and some decode steps show that the model runs in what is left.
"""

import argparse
import os
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import WEIGHTS, Timing, append, measure_chain, new_record, table
from qwen38_jax.checkpoint.load import Checkpoint, load_checkpoint, packs_on_load, sound_account
from qwen38_jax.decode import decode_step, prefill, start
from qwen38_jax.engine.memory import cap_device_memory, device_budget, nvidia_smi
from qwen38_jax.engine.plan import Settings, Weights, make_plan, require_fit
from qwen38_jax.params import tree_bytes
from qwen38_jax.sampling import sampler_state
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.state import StateConfig, init_state

QUESTION = "load_speed"
COLUMNS = (
    "checkpoint",
    "quantised=stored as",
    "packed_on_load=packed while loading",
    "read_gb=GB read",
    "load_seconds=s",
    "gb_per_second=GB/s",
    "host_peak_gb=host peak, GB",
    "host_peak_anonymous_gb=of it anonymous",
    "planned_gib=planned, GiB",
    "pool_peak_gib=pool peak, GiB",
    "process_gib=process, GiB",
    "ms_per_step=ms/step",
)
CACHE = ("warm", "cold", "as-is")


def load_record(
    directory: Path, weights: str, *, dtype: str | None, cache: str, memory_gib: float | None, prompt: int, steps: int
) -> dict[str, Any]:
    """Loads a checkpoint, then reads a prompt of random ids and decodes a few tokens with it."""
    account, _, _ = sound_account(directory, dtype=dtype)
    resident, settings = Weights.of_accounts(account), Settings(context=prompt + 4 * steps + 1, prompt=prompt)
    require_fit(resident, settings, device_budget(memory_gib), f"{directory} with {prompt} tokens")
    parts = [tensor for stored in account.stored.values() for tensor in stored.parts.values()]
    read_bytes = sum(tensor.nbytes for tensor in parts)
    prepare_cache({tensor.path for tensor in parts}, cache)
    jnp.zeros(1).block_until_ready()  # or the first array would pay for setting up the device
    process = [process_bytes()]
    with HostMemory() as host:
        began = time.perf_counter()
        checkpoint = load_checkpoint(directory, dtype=dtype)
        jax.block_until_ready(checkpoint.params)
        seconds = time.perf_counter() - began
    pool = pool_peak()
    process.append(process_bytes())
    prefill_seconds, step = run(checkpoint, settings.sizes(account.cfg), prompt, steps)
    process.append(process_bytes())
    return new_record(
        QUESTION,
        weights=weights,
        settings={
            "checkpoint": directory.name,
            "quantised": account.quantised,
            "packed_on_load": account.quantised is not None and packs_on_load(),
            "dtype": account.cfg.dtype,
            "layers": account.cfg.num_hidden_layers,
            "file_cache": cache,
            "memory_gib": memory_gib,
            "pool_gib": _gib((jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")),
            "memory_fraction": os.environ.get("XLA_CLIENT_MEM_FRACTION"),
            "prompt_tokens": prompt,
        },
        results={
            "read_gb": read_bytes / 1e9,
            "params_gib": tree_bytes((checkpoint.params, checkpoint.draft_head)) / 2**30,
            "planned_gib": make_plan(resident, settings).nbytes / 2**30,
            "load_seconds": seconds,
            "gb_per_second": read_bytes / seconds / 1e9,
            "host_peak_gb": host.peak / 1e9,
            "host_peak_anonymous_gb": host.anonymous / 1e9,
            "load_pool_peak_gib": _gib(pool),
            "pool_peak_gib": _gib(pool_peak()),
            "process_gib": _gib(max((n for n in process if n is not None), default=None)),
            "prefill_seconds": prefill_seconds,
        },
        tokens_per_step=1.0,
        seconds_per_step=step,
        output_tokens=steps,
        repeats=1,
    )


def prepare_cache(paths: set[Path], state: str) -> None:
    """Has the system hold files in its cache (`warm`), or none of them (`cold`; only what has reached the disk)."""

    def read(path: Path) -> None:
        block = bytearray(1 << 20)
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass

    def forget(path: Path) -> None:
        with path.open("rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    if state != "as-is":
        with ThreadPoolExecutor() as pool:
            list(pool.map({"warm": read, "cold": forget}[state], paths))


def run(checkpoint: Checkpoint, sizes: StateConfig, prompt: int, steps: int) -> tuple[float, Timing]:
    """Reads `prompt` random ids and decodes greedily; seconds of the first, after its compilation, and of a step."""
    params, cfg = checkpoint.params, checkpoint.cfg
    greedy = SamplingParams(temperature=0.0, seed=0)
    vocab = cfg.vocab_size
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, vocab, (1, prompt), dtype=np.int32))
    read = jax.jit(lambda p, t, v, s: prefill(p, cfg, t, v, s), donate_argnums=3)
    step = jax.jit(lambda p, s: decode_step(p, cfg, s, top=0), donate_argnums=1)

    def empty():
        sampler = sampler_state([greedy], [()], vocab_size=vocab, real_vocab_size=vocab, eos_ids=())
        return start(cfg, init_state(cfg, sizes), sampler, jnp.ones(1, bool))

    valid = jnp.ones((1, prompt), bool)
    jax.block_until_ready(read(params, tokens, valid, empty()))
    state = jax.block_until_ready(empty())
    began = time.perf_counter()
    state = jax.block_until_ready(read(params, tokens, valid, state))
    seconds = time.perf_counter() - began
    timing, (_, output) = measure_chain(lambda pair: step(params, pair[0]), (state, None), steps=steps, repeats=3)
    if not np.isfinite(output.logprobs).all():
        raise ValueError("the model's output is not finite: the checkpoint is broken")
    return seconds, timing


class HostMemory:
    """How much this process's memory grows while it is watched, in bytes: `peak`, and `anonymous`, without files.

    The first is exact, the second sampled.
    """

    def __enter__(self) -> "HostMemory":
        self._before, self.anonymous = (_status("VmRSS"), _status("RssAnon")), 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.anonymous = max(self.anonymous, _status("RssAnon") - self._before[1])

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()
        self.peak = _status("VmHWM") - self._before[0]


def _status(key: str) -> int:
    """A field of Linux's /proc/self/status in bytes; VmHWM is what getrusage calls ru_maxrss."""
    return 1024 * int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def pool_peak() -> int | None:
    """Most bytes of XLA's pool that were in use at once; None on a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def process_bytes() -> int | None:
    """What this process holds of the GPU, CUDA context included; of all processes where nvidia-smi tells no more."""
    own = [mib for pid, mib in nvidia_smi("--query-compute-apps=pid,used_memory") if pid == str(os.getpid())]
    found = [mib for mib in (*own, *sum(nvidia_smi("--query-gpu=memory.used"), [])) if mib.isdigit()]
    return int(found[0]) * 2**20 if found else None


def _gib(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 2**30


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", required=True)
    parser.add_argument("--weights", choices=WEIGHTS, required=True, help="what the checkpoint holds")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's")
    parser.add_argument("--memory-gib", type=float, metavar="G", help="do with so much of the GPU")
    parser.add_argument("--file-cache", choices=CACHE, default="warm", help="of the system (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="decode steps in a row (%(default)s)")
    args = parser.parse_args(argv)
    if min(args.prompt_tokens, args.steps) < 1:
        parser.error("--prompt-tokens and --steps must be at least 1")
    try:
        if args.memory_gib is not None:
            cap_device_memory(args.memory_gib)
        record = load_record(
            args.checkpoint,
            args.weights,
            dtype=args.dtype,
            cache=args.file_cache,
            memory_gib=args.memory_gib,
            prompt=args.prompt_tokens,
            steps=args.steps,
        )
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    append(record)
    print(table([record], COLUMNS))


if __name__ == "__main__":
    main()
