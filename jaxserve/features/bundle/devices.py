"""Devices to compile for: those that are here, or a kind that is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from jaxserve.config import read_gpu_share, set_variables
from jaxserve.core.runtime.memory import device_memory_bytes
from jaxserve.core.sharding import make_mesh
from jaxserve.devices import find_version
from jaxserve.errors import ConfigError, DeviceError, shorten
from jaxserve.features.bundle.tuned.options import find_results
from pallas_kernels.targets import TARGETS, Target, open_devices, trace_for

# Chips of each slice, and their arrangement as the compiler knows it. A host has four or eight of them.
_SLICES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}
_SLICED = {"v5e": _SLICES, "v5p": _CUBES, "v6e": _SLICES}
_GPUS_PER_NODE = 8
_COMPILERS = {"tpu": ("libtpu", ".[tpu]"), "gpu": ("jax-cuda13-plugin", ".[cuda13]")}
# Of a target's variables, those by which its compiler is loaded where there is no device.
_LOADING = ("TPU_", "ALLOW_MULTIPLE_LIBTPU_LOAD")


@dataclass(frozen=True)
class BuildDevices:
    """Devices that programs are compiled for."""

    mesh: Mesh
    memory: int | None  # bytes that one of them hands out; None on CPU
    is_here: bool
    trace: Callable[[], AbstractContextManager[Any]]  # a context in which kernels see these devices
    target: Target | None = None  # that they are, if they are not here

    @property
    def first(self) -> jax.Device:
        """One of them; all are alike."""
        return self.mesh.devices.flat[0]


def open_build_devices(name: str | None, tensor_parallel_size: int) -> BuildDevices:
    """Returns the devices of a kind, such as "h200", "v5e", "v5e-16" or "cpu"; of this machine if it is None.

    For a kind that is not here, its compiler is loaded. It must be called before JAX has looked for devices.

    Raises:
        ConfigError: there is no such kind, or it does not have so many devices.
        DeviceError: its compiler is not installed, or JAX finds no devices.
    """
    if name in (None, "cpu"):
        if name == "cpu":
            jax.config.update("jax_platforms", "cpu")
        mesh = make_mesh(tensor_parallel_size)
        return BuildDevices(mesh, device_memory_bytes(mesh.local_devices[0]), True, nullcontext)
    assert name is not None
    target = find_build_target(name, tensor_parallel_size)
    package, extra = _COMPILERS[target.platform]
    if find_version(package) is None:
        message = f"the compiler for {name} is not installed ({package})"
        advice = f"pip install '{extra}' in a checkout; no {target.platform.upper()} is needed"
        raise DeviceError(message, advice, field="device")
    set_variables({name: text for name, text in target.environment.items() if name.startswith(_LOADING)})
    jax.config.update("jax_platforms", "cpu")
    mesh = make_mesh(tensor_parallel_size, open_devices(target))
    return BuildDevices(mesh, _count_memory(target), False, partial(trace_for, target), target)


def refuse_untuned(name: str | None, tensor_parallel_size: int) -> None:
    """Raises ConfigError for a GPU that is not here, if nothing was measured on one of its kind."""
    if name in (None, "cpu"):
        return
    assert name is not None
    target = find_build_target(name, tensor_parallel_size)
    if target.platform == "gpu" and find_results(target.device_kind) is None:
        message = (
            f"XLA measures products on the device to choose their kernels, and nothing was kept of what it measures on "
            f"{target.device_kind}; build on one of them without --device, or give --allow-untuned for estimates"
        )
        raise ConfigError(message, field="device", value=name)


def find_build_target(name: str, num_devices: int) -> Target:
    """Returns a kind of device, with a slice or nodes for that many; ConfigError if there is none."""
    kind, _, count = name.rpartition("-")
    if kind in _SLICED and count.isdecimal() and int(count) in _SLICED[kind]:
        return _take_slice(kind, int(count))
    if name in _SLICED:
        slices = _SLICED[name]
        return _take_slice(name, next((chips for chips in slices if chips >= num_devices), max(slices)))
    if name not in TARGETS:
        known = ", ".join(list_build_devices())
        raise ConfigError(f"{shorten(name)} is not known; known are {known}", field="device", value=name)
    target = TARGETS[name]
    if target.platform != "gpu":
        return target
    num_nodes = -(-num_devices // _GPUS_PER_NODE)
    if num_devices % num_nodes:
        message = f"{num_devices} GPUs are not nodes of {_GPUS_PER_NODE}; use a multiple of it"
        raise ConfigError(message, field="tensor_parallel_size", value=num_devices)
    return replace(target, topology=f"1x{num_nodes}x{num_devices // num_nodes}")


def list_build_devices() -> Iterator[str]:
    """Yields the names that `open_build_devices` knows."""
    yield "cpu"
    yield from TARGETS
    for kind, slices in _SLICED.items():
        yield f"{kind}-{{{','.join(map(str, slices))}}}"


def _take_slice(kind: str, chips: int) -> Target:
    return replace(TARGETS[kind], topology=f"{kind}:{_SLICED[kind][chips]}")


def _count_memory(target: Target) -> int:
    if target.platform != "gpu":
        return target.memory_bytes
    return int(target.memory_bytes * read_gpu_share())
