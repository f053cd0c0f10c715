"""The compiled half of this room: its C++ files as a shared library, made once for a machine and a jaxlib.

jaxlib ships the headers of XLA's foreign functions. The library is made for the very processor that it runs on, so it
is compiled at the first start and kept, not shipped.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jaxlib

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / name for name in ("paged_attention.cc", "product.cc"))
COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-w")
_PRODUCT_DTYPES = "float32", "bfloat16"
ATTENTION, PRODUCT = "JaxservePagedAttention", "JaxserveProduct"  # the calls
_COMPILE_SECONDS = 120

_lock = threading.Lock()
_state: dict[str, Any] = {"obstacle": "its library is not loaded", "product_rows": {}}  # of this process


def find_obstacle() -> str | None:
    """Returns why the library cannot be called in this process, in words for users; None: it can."""
    obstacle: str | None = _state["obstacle"]
    return obstacle


def max_product_rows(dtype: str) -> int:
    """Returns the most rows with which the library's product is faster than XLA's here; 0 if it cannot be called."""
    rows: int = _state["product_rows"].get(dtype, 0)
    return rows


def load(directory: Path | None) -> str | None:
    """Loads the library, compiled first unless `directory` has it, and registers it with XLA once in a process.

    Args:
        directory: where compiled libraries are kept; None: nowhere.

    Returns:
        Why it cannot be called, in words for users; None if it can.
    """
    with _lock:
        if _state["obstacle"] is not None:
            _state["obstacle"] = _try_to_register(directory)
        return find_obstacle()


def _try_to_register(directory: Path | None) -> str | None:
    try:
        path = _find_library(directory)
    except (OSError, subprocess.SubprocessError, LookupError) as error:
        return f"its library cannot be built: {_explain(error)}"
    try:
        library = ctypes.CDLL(str(path))
        handlers = {call: getattr(library, call) for call in (ATTENTION, PRODUCT)}
        rows = (ctypes.c_int * len(_PRODUCT_DTYPES)).in_dll(library, "JaxserveProductRows")
        _state["product_rows"] = dict(zip(_PRODUCT_DTYPES, rows, strict=True))
    except (OSError, AttributeError, ValueError) as error:
        return f"its library cannot be loaded: {error}"
    for call, handler in handlers.items():
        jax.ffi.register_ffi_target(target_name(call), jax.ffi.pycapsule(handler), platform="cpu")
    return None


def target_name(call: str) -> str:
    """Returns the name of a call in programs. It changes with the source: another version's programs are not reused."""
    return f"{call}_{digest()[:12]}"


@lru_cache
def digest() -> str:
    """Returns what the library depends on: its source, jaxlib, and the instructions of this processor."""
    text = "\0".join(path.read_text() for path in sorted(FOLDER.glob("*.cc")) + sorted(FOLDER.glob("*.h")))
    parts = (text, jaxlib.__version__, " ".join(_FLAGS), platform.machine(), _describe_processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _describe_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _find_library(directory: Path | None) -> Path:
    """Returns the path of the library; it is compiled if it is not in `directory`."""
    if directory is None:
        with tempfile.TemporaryDirectory(delete=False) as folder:  # the process has it open to its end
            return _compile(Path(folder) / "cpu-kernels.so")
    path = directory / f"cpu-kernels-{digest()[:16]}.so"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as folder:  # others may do the same now
            os.replace(_compile(Path(folder) / path.name), path)
    return path


def _compile(output: Path) -> Path:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise LookupError(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    command = [compiler, *_FLAGS, "-isystem", jax.ffi.include_dir(), *map(str, SOURCES), "-o", str(output)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
    return output


def _explain(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in error.stderr.splitlines() if "error" in line] or [f"status {error.returncode}"]
        return f"{Path(error.cmd[0]).name}: {lines[0]}"
    return str(error)
