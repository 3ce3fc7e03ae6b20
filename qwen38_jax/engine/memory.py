"""How much memory there is, how to use less of it, and a refusal before anything is allocated."""

import dataclasses
import math
import os
import subprocess
from pathlib import Path

import jax

# What a process takes of a GPU beside XLA's pool, and what the driver keeps: CUDA context, libraries, graphs.
RUNTIME_RESERVE = 1 << 30

_CGROUP = Path("/sys/fs/cgroup")


class NotEnoughMemory(ValueError):
    """What a call needs does not fit; the message has both numbers."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Memory for arrays and programs.

    Attributes:
      nbytes: what they may take in all.
      source: who says so, for a message: "`source` leaves `nbytes`".
      reserve: what lies beside `nbytes` for the runtime.
    """

    nbytes: int
    source: str
    reserve: int = 0


def card_budget(memory_gib: float, reserve: int = RUNTIME_RESERVE) -> Budget:
    """What a GPU of `memory_gib` leaves; ValueError if that is nothing beside the `reserve` for the runtime."""
    nbytes = memory_gib * 2**30 - reserve
    if not 0 < nbytes < math.inf:
        raise ValueError(
            f"a memory of {memory_gib:g} GiB leaves nothing: the runtime takes {reserve / 2**30:g} GiB of it"
        )
    return Budget(int(nbytes), f"a memory of {memory_gib:g} GiB", reserve)


def device_budget(memory_gib: float | None = None, held: int = 0) -> Budget | None:
    """What the default device leaves, at most `memory_gib` of it; None where nothing tells.

    Args:
      held: bytes of arrays that are part of what is planned and are there already.
    """
    device = jax.local_devices()[0]
    available = available_bytes()
    budgets = [] if available is None else [Budget(available + held, f"the free memory of {device.device_kind}")]
    if memory_gib is not None:
        budgets.append(card_budget(memory_gib, reserve=0 if device.platform == "cpu" else RUNTIME_RESERVE))
    return min(budgets, key=lambda budget: budget.nbytes, default=None)


def cap_device_memory(memory_gib: float) -> None:
    """Makes XLA's pool on an NVIDIA GPU so small that this process, CUDA context included, stays within `memory_gib`.

    It holds for the whole process and must come before JAX looks at its devices. Where there is no such GPU, or a
    smaller one, it changes nothing.

    Raises:
      ValueError: as `card_budget`.
    """
    total = [float(mib) * 2**20 for [mib] in nvidia_smi("--query-gpu=memory.total")]
    if total and not memory_gib * 2**30 > total[0]:
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # the older name; both at once are an error
        os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{card_budget(memory_gib).nbytes / total[0]:.5f}"


def nvidia_smi(query: str) -> list[list[str]]:
    """Rows of a query about the first visible NVIDIA GPU, in MiB and without units; none where nvidia-smi fails."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    command = ("nvidia-smi", "-i", gpu, query, "--format=csv,noheader,nounits")
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [line.split(", ") for line in output.splitlines()]


def available_bytes() -> int | None:
    """Bytes that can still be allocated on the default device; None where nothing tells."""
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    meminfo = Path("/proc/meminfo")
    if device.platform != "cpu" or not meminfo.exists():
        return None
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:  # a container's own limit may be lower
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no control group, or its limit is "max"
        return available
    return min(available, limit - used)
