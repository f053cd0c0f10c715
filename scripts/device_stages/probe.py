"""The machine: its GPU, versions, compilers, and the rates that all results are compared with."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from device_stages.clocks import query_gpu
from device_stages.items import Context, Item, NotHereError
from device_stages.predictions import predict
from device_stages.results import Line
from pallas_kernels.targets import TARGETS
from pallas_kernels.testing.gate_report import BLOCK_RESERVE

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "numpy", "ml_dtypes", "flax")
OTHERS = ("torch", "triton", "rich", "jaxtyping", "tokenizers", "safetensors", "llguidance", "nvidia-cuda-nvcc")
STATE = (
    *("name", "driver_version", "memory.total", "memory.used", "pstate", "clocks.sm", "clocks.mem", "clocks.max.sm"),
    *("clocks.max.mem", "power.draw", "power.limit", "temperature.gpu", "clocks_throttle_reasons.active"),
)
# CUDA's numbers of what `Target` knows of a device, which the gate compiles and counts blocks by.
LIMITS = {"num_cores": 16, "sm_threads": 39, "sm_memory_bytes": 81, "sm_registers": 82, "shared_memory_bytes": 97}
RESERVE = 111  # and of BLOCK_RESERVE
TOOLS = ("ptxas", "nvcc", "compute-sanitizer", "ncu", "nvdisasm")


def list_items(context: Context) -> Iterator[Item]:
    yield Item("gpu", describe_gpu)
    yield Item("versions", describe_versions)
    yield Item("tools", find_tools)
    yield Item("device", describe_device)
    yield Item("limits", compare_limits)
    yield Item("rates", lambda: measure_rates(context), predict("probe", "rates"))


def describe_gpu() -> Line:
    """Returns the output of nvidia-smi before anything runs."""
    found = query_gpu(*STATE)
    if not found:
        raise NotHereError("no nvidia-smi")
    return found


def describe_versions() -> Line:
    versions = {}
    for name in (*PACKAGES, *OTHERS):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "-"
    return {"python": sys.version.split()[0], "cores": os.cpu_count(), "host": platform.platform(), **versions}


def find_tools() -> Line:
    """Returns where this process and XLA look for CUDA's tools, and the last line of ptxas' version."""
    found = {name: shutil.which(name) or "-" for name in TOOLS}
    wheels = [path for folder in sys.path for path in Path(folder).glob("nvidia/*/bin/ptxas")]
    found["ptxas in wheels"] = str(wheels[0]) if wheels else "-"
    for tool in (found["ptxas"], found["ptxas in wheels"]):
        if tool != "-":
            said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
            return {**found, "version": said.strip().splitlines()[-1:]}
    return found


def describe_device() -> Line:
    """Returns the device as jax sees it."""
    import jax

    device = jax.devices()[0]
    memory = device.memory_stats() or {}
    return {
        "device": device.device_kind,
        "devices": len(jax.devices()),
        "cores": getattr(device, "core_count", None),
        "bytes_limit": memory.get("bytes_limit"),
        "runtime": device.client.platform_version,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def compare_limits() -> Line:
    """Returns the limits of the device as its driver tells them, which are wrong if the gate has others."""
    import jax

    kind = jax.devices()[0].device_kind
    found = read_limits([*LIMITS.values(), RESERVE])
    limits = dict(zip((*LIMITS, "block_reserve"), found, strict=True))
    target = next((each for each in TARGETS.values() if each.device_kind == kind), None)
    if target is None:
        return limits
    expected = {name: getattr(target, name) for name in LIMITS} | {"block_reserve": BLOCK_RESERVE}
    wrong = [f"{name}: {expected[name]} in the gate" for name in limits if limits[name] != expected[name]]
    return {**limits, "ok": not wrong, **({"error": ", ".join(wrong)} if wrong else {})}


def read_limits(attributes: Iterable[int]) -> list[int]:
    """Returns attributes of the first GPU by their numbers in CUDA's driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NotHereError("no libcuda") from error
    value, found = ctypes.c_int(), []
    for attribute in attributes:
        if driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0):
            raise NotHereError(f"CUDA's driver does not tell attribute {attribute}")
        found.append(value.value)
    return found


def measure_rates(context: Context) -> Line:
    from jaxserve.tools.bench.limits import measure_limits

    with context.clocks.watch() as clocks:
        limits = measure_limits()
    return {**limits.asdict(), "clocks": clocks}
