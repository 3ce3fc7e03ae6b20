"""A training loop for any loss: AdamW or Muon with fp32 masters, data-parallel over all devices, exact resume."""

import dataclasses
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
from flax import struct
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Array = jax.Array
Batch = tuple[np.ndarray, ...]  # arrays with a leading batch axis
LossFunction = Callable[..., tuple[Array, dict[str, Array]]]  # (params, *frozen, *batch) -> loss, parts


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Optimiser settings. The learning rate warms up linearly and falls along a cosine to `final_rate`.

    A batch is worked through in `accumulate` pieces of equal size, whose gradients (and losses) are averaged.
    """

    steps: int
    peak_rate: float
    final_rate: float
    warmup_steps: int
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    clip_norm: float = 1.0
    accumulate: int = 1
    log_every: int = 20
    save_every: int = 1000

    def __post_init__(self):
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(f"warmup_steps must be in [0, steps), got {self.warmup_steps} of {self.steps} steps")
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {self.accumulate}")


@struct.dataclass
class TrainState:
    params: Any
    optimizer: Any
    step: Array  # int32 scalar: updates done


def make_optimizer(config: TrainConfig, decays: Any = None, muon: Any = None) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm, or Muon for some of the parameters.

    Args:
      decays: for each leaf whether AdamW's weight decay applies; None: to all.
      muon: for each leaf its `optax.contrib.MuonDimensionNumbers`, or None for a leaf that AdamW keeps (then without
        weight decay); None: AdamW throughout. Updates are scaled to the size of AdamW's, so that one learning rate
        serves both (Liu et al., "Muon is scalable for LLM training", 2025).
    """
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.peak_rate, config.warmup_steps, config.steps, config.final_rate
    )
    if muon is None:
        optimizer = optax.adamw(rate, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=decays)
    else:
        optimizer = optax.contrib.muon(
            rate,
            weight_decay=config.weight_decay,
            adam_b1=config.b1,
            adam_b2=config.b2,
            muon_weight_dimension_numbers=muon,
            consistent_rms=0.2,
        )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)


def fit(
    loss: LossFunction,
    init: Callable[[], Any],
    batch_at: Callable[[int], Batch],
    config: TrainConfig,
    directory: Path,
    *,
    frozen: tuple[Any, ...] = (),
    decays: Any = None,
    muon: Any = None,
    seconds: float = float("inf"),
) -> TrainState:
    """Trains until `config.steps` or until about `seconds` have passed, resuming from `directory` if it holds a run.

    Args:
      loss: `(params, *frozen, *batch) -> (scalar, named parts)`, differentiated in its first argument.
      init: makes the fp32 parameters of a new run.
      batch_at: the batch of a step, a function of the step alone: a resumed run sees what an unbroken one would.
      frozen: arrays (or pytrees of them) that stay as they are; every device gets them whole.
      decays, muon: as in `make_optimizer`.
      directory: gets `state/` (orbax, the last two saves) and `log.jsonl`, one line every `log_every` steps. A run
        that dies goes on from its last save, at most `save_every` steps back.

    Returns:
      The state reached, saved. A run that was stopped and resumed equals one that was not: bit for bit on a CPU; on a
      GPU as nearly as two runs of the same steps do, since scattered sums have no fixed order there.
    """
    optimizer = make_optimizer(config, decays, muon)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data") if config.accumulate == 1 else PartitionSpec(None, "data"))
    frozen = jax.device_put(frozen, replicated)

    def new_state() -> TrainState:
        params = init()
        return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))

    def fetch(step: int) -> Batch:
        batch = batch_at(step)
        if config.accumulate > 1:
            batch = tuple(t.reshape(config.accumulate, -1, *t.shape[1:]) for t in batch)
        return jax.device_put(batch, split)

    directory.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with ocp.CheckpointManager((directory / "state").resolve(), options=_KEEP_TWO) as saves:
        state = _restore(saves, new_state, replicated)
        log = Log(directory / "log.jsonl", int(state.step))
        update = jax.jit(_make_update(loss, optimizer, config.accumulate), donate_argnums=0)
        with ThreadPoolExecutor(1) as reader:  # the next batch is read while the device works
            upcoming = reader.submit(fetch, int(state.step))
            logged = int(state.step)
            for step in range(int(state.step), config.steps):
                batch, upcoming = upcoming.result(), reader.submit(fetch, min(step + 1, config.steps - 1))
                state, parts = update(state, frozen, batch)
                if (step + 1) % config.log_every == 0 or step + 1 == config.steps:
                    log.write(step + 1, parts, batch[0].size * (step + 1 - logged))
                    logged = step + 1
                    if time.perf_counter() - began > seconds:
                        break
                if (step + 1) % config.save_every == 0:
                    _save(saves, state)
        if saves.latest_step() != int(state.step):
            _save(saves, state)
    return state


def _save(saves: ocp.CheckpointManager, state: TrainState) -> None:
    saves.save(int(state.step), args=ocp.args.StandardSave(state))
    saves.wait_until_finished()  # before the next update takes the buffers away


_KEEP_TWO = ocp.CheckpointManagerOptions(max_to_keep=2)


def _make_update(loss: LossFunction, optimizer: optax.GradientTransformation, accumulate: int):
    def gradient(params, frozen, batch):
        return jax.grad(loss, has_aux=True)(params, *frozen, *batch)

    def mean_gradient(params, frozen, batch):  # the batch has a leading axis of pieces
        def add(total, piece):
            return jax.tree.map(jnp.add, total, gradient(params, frozen, piece)), None

        shapes = jax.eval_shape(gradient, params, frozen, jax.tree.map(lambda t: t[0], batch))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.tree.map(lambda t: t / accumulate, lax.scan(add, zeros, batch)[0])

    def update(state: TrainState, frozen: tuple[Any, ...], batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        grads, parts = (gradient if accumulate == 1 else mean_gradient)(state.params, frozen, batch)
        changes, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        parts = {**parts, "grad_norm": optax.tree.norm(grads)}
        return TrainState(optax.apply_updates(state.params, changes), optimizer_state, state.step + 1), parts

    return update


def _restore(saves: ocp.CheckpointManager, new_state: Callable[[], TrainState], sharding: NamedSharding) -> TrainState:
    if saves.latest_step() is None:
        return jax.device_put(new_state(), sharding)
    target = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), jax.eval_shape(new_state)
    )
    return saves.restore(saves.latest_step(), args=ocp.args.StandardRestore(target))


class Log:
    """Curves of a run as JSON lines. What a stopped run wrote past its last save is cut off on resume."""

    def __init__(self, path: Path, step: int):
        lines = read_log(path) if path.exists() else []
        kept = [json.dumps(line) for line in lines if line["step"] <= step]
        path.write_text("".join(line + "\n" for line in kept))
        self._path, self._since = path, time.perf_counter()

    def write(self, step: int, parts: dict[str, Array], tokens: int) -> None:
        """Waits for `parts` and appends them with the throughput since the last call."""
        values = {name: float(value) for name, value in jax.device_get(parts).items()}
        if not all(np.isfinite(value) for value in values.values()):
            raise FloatingPointError(f"step {step}: {values}: lower the learning rate, or look for broken data")
        now = time.perf_counter()
        record = {"step": step, **values, "tokens_per_second": round(tokens / (now - self._since))}
        self._since = now
        with open(self._path, "a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)


def read_log(path: Path) -> list[dict[str, float]]:
    """The records of a `log.jsonl`; a last line that was cut short is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
