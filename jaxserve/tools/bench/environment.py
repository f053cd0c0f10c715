"""The environment of a benchmark: versions, machine, devices."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxserve import __version__


@dataclass(frozen=True)
class Environment:
    """Facts about a machine at a time."""

    date: str  # ISO 8601, UTC
    jaxserve: str
    python: str
    jax: str
    jaxlib: str
    numpy: str
    platform: str  # operating system and architecture
    cpu: str
    num_cores: int  # that this process may use
    memory_bytes: int  # that this process may use
    device: str | None  # as JAX calls it; None: this process has none
    num_devices: int


def describe_environment(*, has_devices: bool = True) -> dict[str, Any]:
    """Returns the facts of `Environment`.

    Args:
        has_devices: False in a process that only sends requests, which must not take a device.
    """
    from jaxserve.core.runtime.host_memory import host_memory_bytes

    device, count = None, 0
    if has_devices:
        import jax

        device, count = jax.devices()[0].device_kind, jax.device_count()
    found = Environment(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        jaxserve=__version__,
        python=platform.python_version(),
        jax=metadata.version("jax"),
        jaxlib=metadata.version("jaxlib"),
        numpy=metadata.version("numpy"),
        platform=f"{platform.system()} {platform.machine()}",
        cpu=read_cpu_model(),
        num_cores=count_cores(),
        memory_bytes=host_memory_bytes(),
        device=device,
        num_devices=count,
    )
    return asdict(found)


def count_cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the name of the CPU's model, or the architecture where the system does not tell."""
    try:
        found = re.search(r"^model name\s*: *(.+)$", path.read_text(), flags=re.M)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
