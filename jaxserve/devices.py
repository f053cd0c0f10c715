"""Imports JAX and finds its devices; explains what is wrong with an installation or a driver."""

from __future__ import annotations

import importlib.metadata
from types import ModuleType
from typing import TYPE_CHECKING

from jaxserve.errors import DeviceError, shorten

if TYPE_CHECKING:
    import jax

_CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_PLUGINS = {  # the packages that serve a platform
    "cuda": _CUDA_PLUGINS,
    "gpu": _CUDA_PLUGINS,
    "rocm": ("jax-rocm7-plugin", "jax-rocm60-plugin"),
    "tpu": ("libtpu",),
}
_SUPPORTED = ("cpu", *_PLUGINS)
_EXTRAS = {
    "cuda": "pip install '.[cuda13]' (driver 580 or newer) or '.[cuda12]', in a checkout",
    "rocm": "install jax[rocm7-local], for which jaxserve has no extra",
    "tpu": "pip install '.[tpu]' in a checkout",
}
_EXTRAS["gpu"] = _EXTRAS["cuda"]
_REPAIRS = {
    "cuda": "check whether nvidia-smi finds the GPU and its driver",
    "rocm": "check whether rocm-smi finds the GPU and its driver",
    "tpu": "check whether another process holds the TPU",
}
_REPAIRS["gpu"] = _REPAIRS["cuda"]
_MAX_REASON = 200  # characters of JAX's own message


def load_jax() -> ModuleType:
    """Returns the module jax; DeviceError when it is broken or missing."""
    try:
        import jax
    except Exception as error:  # a missing module, or versions of jax and jaxlib that refuse each other
        advice = "install it again: pip install --force-reinstall jax jaxlib, with the extra of your accelerator"
        raise DeviceError(f"cannot be imported ({first_line(error)})", advice, field="jax") from error
    return jax


def find_devices() -> list[jax.Device]:
    """Returns JAX's devices.

    Raises:
        DeviceError: JAX finds none, or those of a platform that nothing here was written for, such as Apple's; the
            message says what to install, check or set.
    """
    jax = load_jax()
    wanted = jax.config.jax_platforms
    try:
        devices = jax.devices()
    except Exception as error:  # an AssertionError without a message where no plugin serves the platform
        raise _explain(wanted, error) from error
    if devices[0].platform.lower() not in _SUPPORTED:
        raise _refuse(devices[0].platform)
    return devices


def find_version(package: str) -> str | None:
    """Returns the version of an installed package; None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, at most 200 characters; its type if it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= _MAX_REASON else lines[0][: _MAX_REASON - 3] + "..."


def _refuse(platform: str) -> DeviceError:
    return DeviceError(f"{platform.lower()} is not supported", "set JAX_PLATFORMS=cpu", field="devices")


def _explain(wanted: str | None, error: Exception) -> DeviceError:
    reason = first_line(error).partition(" (set JAX_PLATFORMS=")[0]
    if not wanted:
        advice = "repair the driver, or set JAX_PLATFORMS=cpu to run without the accelerator"
        return DeviceError(f"JAX finds none ({reason})", advice, field="devices")
    if "metal" in wanted.lower().split(","):
        return _refuse("metal")
    missing = [name for name in wanted.split(",") if not any(map(find_version, _PLUGINS.get(name, ("jaxlib",))))]
    unknown = [name for name in wanted.split(",") if name not in _SUPPORTED]
    if missing:
        reason, advice = "the plugin for it is not installed", _EXTRAS[missing[0]]
    elif unknown:
        reason, advice = f"{shorten(unknown[0])} is not known", "set it to cpu, cuda, rocm or tpu"
    else:
        advice = next((_REPAIRS[name] for name in wanted.split(",") if name in _REPAIRS), "set it to cpu")
    return DeviceError(
        f"JAX finds no devices of {shorten(wanted)}: {reason}",
        f"unset JAX_PLATFORMS to use what is there, or {advice}",
        field="JAX_PLATFORMS",
        value=wanted,
    )
