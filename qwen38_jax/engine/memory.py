"""How much memory there is, and a refusal before anything is allocated."""

from pathlib import Path

import jax

_CGROUP = Path("/sys/fs/cgroup")


class NotEnoughMemory(ValueError):
    """What a call needs does not fit; the message has both numbers."""


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
