"""The kinds of devices that need not be here: the names that `plan`, `simulate` and `build` share."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from jaxserve.errors import ConfigError, shorten

_GB, _GIB = 10**9, 2**30


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device that can be planned for without being attached."""

    platform: str
    name: str  # as JAX calls it
    memory: int  # bytes
    target: str | None = None  # name of the compiler's target; None: programs are compiled on such a device only


DEVICE_KINDS = {
    "h200": DeviceKind("gpu", "NVIDIA H200", 141 * _GB, "h200"),
    "h100": DeviceKind("gpu", "NVIDIA H100 80GB HBM3", 80 * _GB),
    "a100-80g": DeviceKind("gpu", "NVIDIA A100-SXM4-80GB", 80 * _GB),
    "a100-40g": DeviceKind("gpu", "NVIDIA A100-SXM4-40GB", 40 * _GB, "a100"),
    "l4": DeviceKind("gpu", "NVIDIA L4", 24 * _GB, "l4"),
    "t4": DeviceKind("gpu", "Tesla T4", 16 * _GB),
    "b200": DeviceKind("gpu", "NVIDIA B200", 180 * _GB, "b200"),
    "rtx5090": DeviceKind("gpu", "NVIDIA GeForce RTX 5090", 32 * _GB, "rtx5090"),
    "v5e": DeviceKind("tpu", "TPU v5 lite", 16 * _GIB, "v5e"),
    "v5p": DeviceKind("tpu", "TPU v5", 95 * _GIB, "v5p"),
    "v6e": DeviceKind("tpu", "TPU v6 lite", 32 * _GIB, "v6e"),
    "v7x": DeviceKind("tpu", "TPU7x", 96 * _GIB, "tpu7x"),  # a chip is two devices
}
KNOWN = ", ".join(DEVICE_KINDS)
KNOWN_TARGETS = ", ".join(name for name, kind in DEVICE_KINDS.items() if kind.target is not None)


def find_kind(device: str) -> DeviceKind:
    """Returns the kind of that name; ConfigError, with what to give instead, if there is none."""
    if device in DEVICE_KINDS:
        return DEVICE_KINDS[device]
    kind, _, count = device.rpartition("-")
    if kind in DEVICE_KINDS and count.isdecimal():
        hint = f"give {kind}, and tensor_parallel_size={count}"
    elif device == "cpu":
        hint = "of CPUs only this machine's can be had; leave it out"
    else:
        near = [name for name in DEVICE_KINDS if name.startswith(device.lower())] if device else []
        near = near or difflib.get_close_matches(device.lower(), DEVICE_KINDS, n=1)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {KNOWN}"
    raise ConfigError(f"{shorten(device)} is not known; {hint}", field="device", value=device)


def find_target(device: str) -> str:
    """Returns the name by which the compiler knows a kind; other names, as of slices and of CPUs, stay as they are.

    Raises:
        ConfigError: programs for this kind cannot be compiled where there is no such device.
    """
    kind = DEVICE_KINDS.get(device)
    if kind is None:
        return device
    if kind.target is None:
        message = f"programs for {device} are compiled on one only: run build there, without --device"
        message += f"; those of {KNOWN_TARGETS} can be compiled anywhere"
        raise ConfigError(message, field="device", value=device)
    return kind.target
