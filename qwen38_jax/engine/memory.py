"""How much memory there is, how to use less of it, and a refusal before anything is allocated."""

import os
import subprocess
from pathlib import Path

import jax

# What a process takes of a GPU beside XLA's pool, and what the driver keeps: CUDA context, libraries, graphs.
RUNTIME_RESERVE = 1 << 30

_CGROUP = Path("/sys/fs/cgroup")


class NotEnoughMemory(ValueError):
    """What a call needs does not fit; the message has both numbers."""


def cap_device_memory(memory_gib: float) -> None:
    """Makes XLA's pool on an NVIDIA GPU so small that this process, CUDA context included, stays within `memory_gib`.

    It holds for the whole process and must come before JAX looks at its devices. Where there is no such GPU, or a
    smaller one, it changes nothing.

    Raises:
      ValueError: `memory_gib` leaves nothing beside what the runtime itself takes.
    """
    pool = memory_gib * 2**30 - RUNTIME_RESERVE
    if not pool > 0:
        raise ValueError(
            f"{memory_gib:g} GiB are not more than the {RUNTIME_RESERVE / 2**30:g} GiB of the runtime itself"
        )
    total = [float(mib) * 2**20 for [mib] in nvidia_smi("--query-gpu=memory.total")]
    if total and pool < total[0]:
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # the older name; both at once are an error
        os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{pool / total[0]:.5f}"


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


def require(needed: int, what: str, remedy: str) -> None:
    """Raises NotEnoughMemory if `needed` bytes for `what` are more than there are."""
    available = available_bytes()
    if available is not None and needed > available:
        raise NotEnoughMemory(
            f"{what} needs {needed / 2**30:.2f} GiB, but only {available / 2**30:.2f} GiB are free: {remedy}"
        )
