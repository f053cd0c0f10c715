"""The devices that programs are compiled for without being attached.

A TPU's compiler is a library that knows each topology by name. A GPU's compiler takes a description of the device in
the text form of XLA's `GpuTargetConfigProto`; its figures here are the published limits of the part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh

MIB = 2**20

_GPU_LIMITS = {  # common to all GPUs here
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "shared_memory_per_block": 48 * 1024,
}
_H200_LIMITS = {
    **_GPU_LIMITS,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block_optin": 227 * 1024,
    "shared_memory_per_core": 228 * 1024,
    "core_count": 132,
    "fpus_per_core": 128,
    "clock_rate_ghz": 1.98,
    "l2_cache_size": 50 * MIB,
    "memory_bandwidth": 4_800_000_000_000,
    "device_memory_size": 143_771 * MIB,
}
_A100_LIMITS = {  # the part with 40 GB
    **_GPU_LIMITS,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block_optin": 163 * 1024,
    "shared_memory_per_core": 164 * 1024,
    "core_count": 108,
    "fpus_per_core": 64,
    "clock_rate_ghz": 1.41,
    "l2_cache_size": 40 * MIB,
    "memory_bandwidth": 1_555_000_000_000,
    "device_memory_size": 40_960 * MIB,
}
_L4_LIMITS = {
    **_GPU_LIMITS,
    "threads_per_core_limit": 1536,
    "shared_memory_per_block_optin": 99 * 1024,
    "shared_memory_per_core": 100 * 1024,
    "core_count": 58,
    "fpus_per_core": 128,
    "clock_rate_ghz": 2.04,
    "l2_cache_size": 48 * MIB,
    "memory_bandwidth": 300_000_000_000,
    "device_memory_size": 23_034 * MIB,
}
_B200_LIMITS = {
    **_GPU_LIMITS,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block_optin": 227 * 1024,
    "shared_memory_per_core": 228 * 1024,
    "core_count": 148,
    "fpus_per_core": 128,
    "clock_rate_ghz": 1.965,
    "l2_cache_size": 126 * MIB,
    "memory_bandwidth": 8_000_000_000_000,
    "device_memory_size": 183_359 * MIB,
}
_RTX_5090_LIMITS = {
    **_GPU_LIMITS,
    "threads_per_core_limit": 1536,
    "shared_memory_per_block_optin": 99 * 1024,
    "shared_memory_per_core": 100 * 1024,
    "core_count": 170,
    "fpus_per_core": 128,
    "clock_rate_ghz": 2.41,
    "l2_cache_size": 96 * MIB,
    "memory_bandwidth": 1_792_000_000_000,
    "device_memory_size": 32_607 * MIB,
}
_GPU_TEXT = {
    "device_vendor": "NVIDIA Corporation",
    "driver_version": "13.0.0",
    "runtime_version": "13.0.0",
    "compile_time_toolkit_version": "13.0.0",
    "dnn_version": "9.12.0",
}


def describe_gpu(name: str, capability: tuple[int, int], limits: Mapping[str, int | float]) -> str:
    """The text proto of a device of this compute capability.

    From 9.0 on it lists the accelerated features, without which there is no wgmma.
    """
    major, minor = capability
    features = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    lines = [f"  {key}: {value}" for key, value in limits.items()]
    lines += [f'  {key}: "{value}"' for key, value in {**_GPU_TEXT, "name": name}.items()]
    lines += [f"  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}"]
    dnn = "dnn_version_info { major: 9 minor: 12 patch: 0 }"
    tail = f'platform_name: "CUDA"\n{dnn}\ndevice_description_str: "{name}"\n'
    return "gpu_device_info {\n" + "\n".join(lines) + "\n}\n" + tail


def describe_figures(capability: tuple[int, int], limits: Mapping[str, int | float]) -> str:
    """The figures of a device by which XLA finds what it has tuned."""
    major, minor = capability
    return (
        f"CUDA: {major}.{minor}, Cores: {limits['core_count']}, GPU clock: {limits['clock_rate_ghz']:g} GHz, "
        f"Memory bandwidth: {limits['memory_bandwidth'] / 1e9:.0f} GB/s, "
        f"L2 cache: {limits['l2_cache_size'] / MIB:g} MB, DNN version: {_GPU_TEXT['dnn_version']}"
    )


@dataclass(frozen=True)
class GpuDevice(AbstractDevice):
    """A GPU with a compute capability, which Mosaic asks for; it takes a device without one for Hopper."""

    compute_capability: str


@dataclass(frozen=True)
class Target:
    """One kind of device. `topology` is what the compiler is asked for. It has two GPUs, or eight chips or cores of
    TPUs, so that one description serves a single device and tensor parallelism."""

    name: str
    platform: str  # "gpu" or "tpu"
    device_kind: str  # JAX's name for it, under which tuning tables are filed
    num_cores: int  # cores of one JAX device: multiprocessors of a GPU
    topology: str
    page_size: int
    num_rows: int  # S in the decode bucket
    memory_bytes: int  # device memory
    impl: str  # the implementation with its kernels
    vmem_bytes: int | None = None
    compute_capability: str | None = None  # a GPU's, e.g. "8.0"
    shared_memory_bytes: int | None = None  # the most that one block can have
    sm_memory_bytes: int | None = None  # shared memory of a multiprocessor
    sm_registers: int | None = None  # of a multiprocessor
    sm_threads: int | None = None  # of a multiprocessor
    target_config: str | None = None
    tuning_key: str | None = None  # of a GPU in XLA's files of tuned products
    spill_bytes: int = 0  # stores and loads of registers that a kernel may spill
    # Set by the parent before the compiler is loaded. Else several processes at once would wait for its lock.
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """The context in which traced code sees this device."""
        described = (self.device_kind, self.num_cores, self.platform)
        if self.compute_capability is None:
            return AbstractMesh((), (), abstract_device=AbstractDevice(*described))
        return AbstractMesh((), (), abstract_device=GpuDevice(*described, self.compute_capability))


# The processes run on the CPU. They never take a program from a cache, since its compiler would then say nothing.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
_TPU_ENVIRONMENT = {
    **_ENVIRONMENT,
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_GPU_ENVIRONMENT = {**_ENVIRONMENT, "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1"}


def _gpu(
    name: str,
    device_kind: str,
    capability: tuple[int, int],
    limits: Mapping[str, int | float],
    *,
    impl: str,
    spill_bytes: int = 0,
) -> Target:
    return Target(
        name,
        "gpu",
        device_kind,
        num_cores=int(limits["core_count"]),
        topology="1x1x2",
        page_size=64,
        num_rows=256,
        memory_bytes=int(limits["device_memory_size"]),
        impl=impl,
        compute_capability=f"{capability[0]}.{capability[1]}",
        shared_memory_bytes=int(limits["shared_memory_per_block_optin"]),
        sm_memory_bytes=int(limits["shared_memory_per_core"]),
        sm_registers=int(limits["registers_per_core_limit"]),
        sm_threads=int(limits["threads_per_core_limit"]),
        target_config=describe_gpu(device_kind, capability, limits),
        tuning_key=describe_figures(capability, limits),
        spill_bytes=spill_bytes,
        environment=_GPU_ENVIRONMENT,
    )


def _tpu(
    name: str, device_kind: str, topology: str, *, memory_bytes: int, vmem_bytes: int, num_cores: int = 1
) -> Target:
    return Target(
        name,
        "tpu",
        device_kind,
        num_cores=num_cores,
        topology=topology,
        page_size=128,
        num_rows=128,
        memory_bytes=memory_bytes,
        impl="tpu",
        vmem_bytes=vmem_bytes,
        environment=_TPU_ENVIRONMENT,
    )


TARGETS = {
    target.name: target
    for target in (
        _gpu("h200", "NVIDIA H200", (9, 0), _H200_LIMITS, impl="gpu"),
        _gpu("a100", "NVIDIA A100-SXM4-40GB", (8, 0), _A100_LIMITS, impl="ampere"),
        _gpu("l4", "NVIDIA L4", (8, 9), _L4_LIMITS, impl="ampere"),
        # Heads of 256 just fit the registers of the GPUs that the kernel was written for.
        _gpu("b200", "NVIDIA B200", (10, 0), _B200_LIMITS, impl="ampere", spill_bytes=256),
        _gpu("rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), _RTX_5090_LIMITS, impl="ampere", spill_bytes=256),
        _tpu("v5e", "TPU v5 lite", "v5e:2x4", memory_bytes=17_200_000_000, vmem_bytes=128 * MIB),
        _tpu("v5p", "TPU v5", "v5p:2x2x2", memory_bytes=103_000_000_000, vmem_bytes=64 * MIB, num_cores=2),
        _tpu("v6e", "TPU v6 lite", "v6e:2x4", memory_bytes=34_400_000_000, vmem_bytes=128 * MIB),
        _tpu("tpu7x", "TPU7x", "tpu7x:2x2x1", memory_bytes=103_000_000_000, vmem_bytes=64 * MIB),
    )
}


def find_target(name: str) -> Target:
    """The target with this name; ValueError lists all names."""
    if name not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]


def open_devices(target: Target) -> list[Any]:
    """Devices to compile for. Loads the target's compiler, which must be importable.

    Raises:
        ValueError: the compiler has another name for the device than the target.
    """
    if target.target_config is None:
        description = topologies.get_topology_desc(target.topology, "tpu")
    else:
        options = {"target_config": target.target_config, "topology": target.topology}
        description = topologies.get_topology_desc(platform="cuda", **options)
    devices = list(description.devices)
    if devices[0].device_kind != target.device_kind:
        raise ValueError(f"target.device_kind is {target.device_kind!r}, the compiler says {devices[0].device_kind!r}")
    return devices


def trace_for(target: Target) -> Any:
    """A context in which `resolve_impl` and kernels see the target instead of this process's device."""
    return jax.sharding.use_abstract_mesh(target.abstract_mesh)
