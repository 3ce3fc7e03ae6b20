"""What a heuristic or a roofline needs to know about a GPU."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU. bandwidth is the data sheet's, in bytes per second; None where it is not known."""

    name: str
    compute_capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    bandwidth: float | None = None


RTX_3090 = Device("NVIDIA GeForce RTX 3090", (8, 6), 82, 936e9)
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132, 3.35e12)
H200 = Device("NVIDIA H200", (9, 0), 132, 4.8e12)

KNOWN = (RTX_3090, H100, H200)


def current_device() -> Device:
    """The device that JAX runs on; without a GPU the RTX 3090, which interpreted kernels then imitate."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return RTX_3090
    major, minor = map(int, str(device.compute_capability).split("."))
    bandwidth = next((known.bandwidth for known in KNOWN if known.name == device.device_kind), None)
    return Device(device.device_kind, (major, minor), device.core_count, bandwidth)
