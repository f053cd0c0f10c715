"""The CUDA compiler of this machine, and the versions that must not compile the kernels.

CUDA 12.8.0 to 12.9.0 miscompile causal loops of Mosaic GPU kernels; JAX's own Hopper attention
(`jax.experimental.pallas.ops.gpu.attention_mgpu`) refuses these versions.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import jax

Version = tuple[int, ...]

_LINKERS = ("nvidia-nvjitlink", "nvidia-nvjitlink-cu12")  # wheels
_ASSEMBLERS = ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_TOOL_VERSION = re.compile(r"\bV(\d+)\.(\d+)\.(\d+)\b")
_TOOL_SECONDS = 30
_FIRST_BAD, _FIRST_GOOD = (12, 8), (12, 9, 86)  # 12.8.0 has tools 12.8.61, 12.9.0 has 12.9.41, 12.9.1 has 12.9.86


def find_compiler_obstacle() -> str | None:
    """Why kernels must not be compiled on this machine, in words for users.

    None if nothing is wrong, and if JAX has no GPU: then the compiler is another machine's.
    """
    if jax.default_backend() != "gpu":
        return None
    for name, found in find_compilers():
        if _FIRST_BAD <= found < _FIRST_GOOD:
            text = ".".join(map(str, found))
            return (
                f"the compilers of CUDA 12.8.0 to 12.9.0 miscompile such kernels, and here {name} is {text}; those of "
                "12.9.1 (12.9.86) and of CUDA 13 would do"
            )
    return None


@cache
def find_compilers() -> tuple[tuple[str, Version], ...]:
    """The compilers of PTX that this process uses, with their versions, as far as they can be known.

    XLA takes the linker's library if it is installed, else ptxas on the PATH, else ptxas of a wheel, else the system's
    toolkit, whose release the runtime tells. The runtime of 12.9.1 calls itself 12.9.0.
    """
    if wheels := read_wheels(_LINKERS):
        return wheels
    if (found := read_ptxas()) is not None:
        return (("ptxas on the PATH", found),)
    if wheels := read_wheels(_ASSEMBLERS):
        return wheels
    if (found := read_runtime()) is not None:
        return (("the CUDA runtime", found),)
    return ()


def read_wheels(names: tuple[str, ...]) -> tuple[tuple[str, Version], ...]:
    """The installed ones among these wheels, with their versions."""
    found = []
    for name in names:
        try:
            found.append((name, tuple(int(part) for part in version(name).split(".") if part.isdecimal())))
        except PackageNotFoundError:
            continue
    return tuple(found)


def read_ptxas() -> Version | None:
    """The version of the ptxas on the PATH; None if there is none, or it does not say."""
    path = shutil.which("ptxas")
    if path is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=_TOOL_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    found = _TOOL_VERSION.search(done.stdout)
    return None if found is None else tuple(map(int, found.groups()))


def read_runtime() -> Version | None:
    """The release of the CUDA runtime, e.g. (12, 8, 1), as JAX's plugin sees it; None if there is none."""
    for plugin in _PLUGINS:
        try:
            number = import_module(f"{plugin}._versions").cuda_runtime_get_version()
        except (ImportError, AttributeError, RuntimeError):
            continue
        return number // 1000, number % 1000 // 10, number % 10
    return None
