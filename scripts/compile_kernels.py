"""Compiles every kernel at its true shapes for GPUs that this machine does not have, and checks what came out.

    bash scripts/compile_kernels.sh            installs the compilers, then runs this
    bash scripts/compile_kernels.sh --only w4a16_down --all

For each kernel: registers a thread, bytes spilled, shared memory of a program, and how many programs that leaves room
for on a processor. Fails if a kernel spills, takes more shared memory than there is, or counts on all of its
programs running at once although they do not fit.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.cases import Case, all_cases
from pallas_kernels.device import H200, RTX_3090, Device

# Of a processor, by compute capability; of its shared memory CUDA takes one KB for itself from every program.
REGISTERS = 65_536
SHARED_MEMORY = {(8, 6): 102_400, (9, 0): 233_472}
THREADS = {(8, 6): 1536, (9, 0): 2048}
CUDA_SHARED_MEMORY = 1024

# What XLA asks a GPU for, in its own text form. JAX looks the kind of device up by name and does not know the 3090:
# an A10 has the same compute capability.
_TARGETS = {
    RTX_3090: ("NVIDIA A10", 6_291_456, 1.695, 25_438_126_080),
    H200: ("NVIDIA H200", 52_428_800, 1.98, 150_754_820_096),
}


def target_config(device: Device) -> str:
    name, l2, clock, memory = _TARGETS[device]
    major, minor = device.compute_capability
    extensions = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {THREADS[major, minor]}
          shared_memory_per_block: 49152 shared_memory_per_core: {SHARED_MEMORY[major, minor]}
          shared_memory_per_block_optin: {SHARED_MEMORY[major, minor] - CUDA_SHARED_MEMORY}
          core_count: {device.cores} fpus_per_core: 128 clock_rate_ghz: {clock}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          registers_per_core_limit: {REGISTERS} registers_per_block_limit: {REGISTERS}
          memory_bandwidth: {int(device.bandwidth)} l2_cache_size: {l2} device_memory_size: {memory}
          cuda_compute_capability {{ major: {major} minor: {minor} {extensions} }}
        }}
        platform_name: "CUDA" device_description_str: "{name}" dnn_version_info {{ major: 9 minor: 10 }}
    """


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the assembler made of one kernel."""

    case: str
    name: str
    device: Device
    registers: int  # of a thread
    spilled: int  # bytes
    shared_memory: int  # bytes
    threads: int
    grid: tuple[int, ...]
    together: bool  # see `Case`

    @property
    def resident(self) -> int:
        """Programs that fit on a processor; registers are given to a warp by the 256."""
        capability = self.device.compute_capability
        registers = -(-self.registers * 32 // 256) * 256 * (self.threads // 32)
        return min(
            REGISTERS // registers,
            SHARED_MEMORY[capability] // (self.shared_memory + CUDA_SHARED_MEMORY),
            THREADS[capability] // self.threads,
        )

    @property
    def faults(self) -> list[str]:
        faults = [f"spills {self.spilled} bytes"] if self.spilled else []
        if not self.resident:
            faults.append(f"takes {self.shared_memory} bytes of shared memory, more than there are")
        most = self.resident * self.device.cores
        if self.together and math.prod(self.grid) > most:
            faults.append(f"has {math.prod(self.grid)} programs, but only {most} run at once")
        return faults


def compile_case(case: Case, mesh: Mesh) -> None:
    """Leaves the program in XLA's dump, under the case's name."""
    replicated = NamedSharding(mesh, PartitionSpec())

    def program(*arguments):
        return case.function(*arguments)

    program.__name__ = case.name
    layer = jax.ShapeDtypeStruct((), "int32")
    arguments = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated), (*case.arguments, layer)
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(program, out_shardings=replicated).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()


def read_dump(dump: Path, case: Case, device: Device) -> list[Kernel]:
    """The custom kernels of a compiled case, assembled."""
    [sequence] = dump.glob(f"*.jit_{case.name}.thunk_sequence.txt")
    launches = {
        name: (tuple(int(n) for n in grid.split(",")), int(threads.split(",")[0]), int(shared))
        for name, grid, threads, shared in re.findall(
            r"kCustomKernel.*\] (\S+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\]\s+shared_memory: (\d+)",
            sequence.read_text(),
        )
    }
    kernels = []
    for ptx in sorted(dump.glob(f"*.jit_{case.name}.*ptx")):
        entries = re.findall(r"\.entry (\w+)", ptx.read_text())
        if len(entries) == 1 and entries[0] in launches and not re.search(r"fusion|^wrapped", entries[0]):
            registers, spilled = assemble(ptx, device.compute_capability)
            grid, threads, shared = launches[entries[0]]
            kernels.append(
                Kernel(case.name, entries[0], device, registers, spilled, shared, threads, grid, case.together)
            )
    if not kernels:
        raise RuntimeError(f"{case.name}: no kernel in {sequence}")
    return kernels


def assemble(ptx: Path, capability: tuple[int, int]) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills."""
    nvidia = next(iter(importlib.util.find_spec("nvidia").submodule_search_locations))
    architecture = "sm_{}{}{}".format(*capability, "a" if capability >= (9, 0) else "")
    command = [Path(nvidia) / "cu13/bin/ptxas", "-v", f"-arch={architecture}", ptx, "-o", os.devnull]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{ptx}: ptxas failed:\n{result.stderr}")
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", result.stderr)))
    return int(re.search(r"Used (\d+) registers", result.stderr)[1]), spilled


def choose(cases: Sequence[Case], only: str, everything: bool) -> list[Case]:
    """Cases with `only` in their name; of those that differ in their shape alone the first and the last.

    Shapes are constants in the code of a kernel and change little of it, but for stacks past 2^32 bytes, whose
    addresses take 64 bits: the first shapes have such stacks.
    """
    chosen = [case for case in cases if only in case.name]
    if everything:
        return chosen
    alike = {}
    for case in chosen:
        alike.setdefault((case.kernel, case.rows), []).append(case)
    return [case for group in alike.values() for case in dict.fromkeys((group[0], group[-1]))]


def compile_for(device: Device, only: str, everything: bool) -> list[Kernel]:
    """Everything for one device, in a process of its own: XLA reads its flags once."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={directory}"
        name = "sm_{}{}".format(*device.compute_capability)
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name=name, target_config=target_config(device), topology="1x1x1"
        )
        mesh = Mesh(np.array(topology.devices), ("x",))
        kernels = []
        for case in choose(list(all_cases(device)), only, everything):
            compile_case(case, mesh)
            kernels += read_dump(Path(directory), case, device)
            print(f"{case.name} for {device.name}", file=sys.stderr)
        return kernels


def table(kernels: Sequence[Kernel]) -> str:
    head = ("case", "kernel", "for", "registers", "spilled", "shared memory", "threads", "programs", "fit")
    rows = [head] + [
        (
            k.case,
            k.name,
            "{}.{}".format(*k.device.compute_capability),
            *map(str, (k.registers, k.spilled, k.shared_memory, k.threads)),
            " x ".join(str(n) for n in k.grid if n > 1) or "1",
            str(k.resident),
        )
        for k in kernels
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")
    parser.add_argument("--all", action="store_true", help="of cases that differ in their shape alone not just two")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(_TARGETS), mp_context=context) as pool:
        jobs = [pool.submit(compile_for, device, args.only, args.all) for device in _TARGETS]
        kernels = [kernel for job in jobs for kernel in job.result()]
    print(table(kernels))
    print(f"{len(kernels)} kernels in {time.perf_counter() - began:.0f} s")
    faults = [f"{k.case}: {k.name} for {k.device.name} {fault}" for k in kernels for fault in k.faults]
    if faults or not kernels:
        sys.exit("\n".join(["error: kernels that would not run well:", *faults]) if faults else "error: no such case")


if __name__ == "__main__":
    main()
