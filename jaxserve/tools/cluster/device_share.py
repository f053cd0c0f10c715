"""The share of a machine's devices that each replica gets, by the variables that JAX's plugins read.

Nothing here starts JAX: a process that has opened a device keeps others from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from jaxserve.errors import ConfigError

_GPU_NAME = re.compile(r"nvidia\d+")
_CHIP_NAME = re.compile(r"(accel)?\d+")
# Chips of one process, and how they lie in a host: x,y,z.
_CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


def share_devices(
    num_replicas: int, devices_each: int, environment: Mapping[str, str], *, root: Path = Path("/dev")
) -> list[dict[str, str]]:
    """Returns for each replica the variables that show it its own devices; none on a CPU, which all share.

    Args:
        devices_each: `tensor_parallel_size`.
        environment: this process's. What is hidden from it stays hidden.
        root: where the system lists devices.

    Raises:
        ConfigError: the machine has too few devices, or a TPU's chips cannot be shared so.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms.split(",")[0] == "cpu":
        return [{} for _ in range(num_replicas)]
    if gpus := find_gpus(environment, root):
        shares = _split(gpus, num_replicas, devices_each, "GPUs")
        return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]
    if chips := find_chips(environment, root):
        shares = _split(chips, num_replicas, devices_each, "TPU chips")
        return [_show_chips(share) for share in shares]
    return [{} for _ in range(num_replicas)]


def find_gpus(environment: Mapping[str, str], root: Path) -> list[str]:
    """Returns the indices or names of the GPUs that this process may use."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip() not in ("", "-1")]
    return _list_numbers(root, _GPU_NAME)


def find_chips(environment: Mapping[str, str], root: Path) -> list[str]:
    """Returns the indices of the TPU chips that this process may use."""
    given = environment.get("TPU_VISIBLE_CHIPS")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    return _list_numbers(root, re.compile(r"accel\d+")) or _list_numbers(root / "vfio", _CHIP_NAME)


def _list_numbers(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [str(number) for number in sorted(int(re.sub(r"\D", "", n)) for n in names if pattern.fullmatch(n))]


def _split(names: list[str], num_replicas: int, devices_each: int, kind: str) -> list[list[str]]:
    needed = num_replicas * devices_each
    if needed > len(names):
        fits = len(names) // devices_each
        remedy = f"use at most {fits}" if fits else f"lower tensor_parallel_size to {len(names) // num_replicas or 1}"
        message = (
            f"{num_replicas} replicas of {devices_each} need {needed} {kind}, and there are {len(names)}; {remedy}"
        )
        raise ConfigError(message, field="data_parallel_size", value=num_replicas)
    return [names[first : first + devices_each] for first in range(0, needed, devices_each)]


def _show_chips(chips: list[str]) -> dict[str, str]:
    if len(chips) not in _CHIP_BOUNDS:
        sizes = ", ".join(map(str, _CHIP_BOUNDS))
        message = f"a host's TPU chips can be shared by {sizes}, got {len(chips)}"
        raise ConfigError(message, field="tensor_parallel_size", value=len(chips))
    return {
        "TPU_VISIBLE_CHIPS": ",".join(chips),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _CHIP_BOUNDS[len(chips)],
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
