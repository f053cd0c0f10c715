"""The compiled half of this room: its C++ files as a shared library, made once for a machine and a jaxlib.

jaxlib ships the headers of XLA's foreign functions. The library is made for the very processor that it runs on, so it
is compiled at the first start and kept, not shipped. Its file's name ends in the digest of its content: a file that was
cut or altered is compiled again, because a process that loads one may die.
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
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jaxlib

FOLDER = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-w")
_PRODUCT_DTYPES = "float32", "bfloat16"
ATTENTION = "JaxservePagedAttention"
PRODUCT, TABLE_PRODUCT, GROUPED = "JaxserveProduct", "JaxserveTableProduct", "JaxserveGroupedProduct"
PACKED = "JaxservePackedProduct"
LOOKUP, REMEMBER = "JaxserveLookup", "JaxserveRemember"
_CALLS = ATTENTION, PRODUCT, TABLE_PRODUCT, GROUPED, PACKED, LOOKUP, REMEMBER
_COMPILE_SECONDS = 120
_STEM = "cpu-kernels"  # of the file's name

_lock = threading.Lock()
_state: dict[str, Any] = {
    "obstacle": "its library is not loaded",
    "product_rows": {},
    "table_rows": {},
    "has_tiles": False,
    "content": None,
}  # of this process


def find_obstacle() -> str | None:
    """Returns why the library cannot be called in this process, in words for users; None: it can."""
    obstacle: str | None = _state["obstacle"]
    return obstacle


def max_product_rows(dtype: str) -> int:
    """Returns the most rows with which the library's product is faster than XLA's here; 0 if it cannot be called."""
    rows: int = _state["product_rows"].get(dtype, 0)
    return rows


def max_table_rows(dtype: str) -> int:
    """The same of its product with a matrix [out, in]."""
    rows: int = _state["table_rows"].get(dtype, 0)
    return rows


def has_tiles() -> bool:
    """Whether the library can be called, and multiplies in the processor's tiles (AMX)."""
    has_them: bool = _state["has_tiles"]
    return has_them


def read_content() -> bytes | None:
    """Returns the file of the library that this process has loaded; None if it has none."""
    content: bytes | None = _state["content"]
    return content


def load_content(content: bytes) -> str | None:
    """Loads a library of `read_content`, made for this `digest`, as `load` does."""
    with _lock, tempfile.TemporaryDirectory() as folder:
        if _state["obstacle"] is not None:
            path = Path(folder) / f"{_STEM}.so"
            path.write_bytes(content)
            _state["obstacle"] = _register(path)
        return find_obstacle()


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
        if directory is not None:
            return _register(_find_kept(directory) or _compile_into(directory))
        with tempfile.TemporaryDirectory() as folder:  # once it is loaded, its file is not needed any more
            return _register(_compile_into(Path(folder)))
    except (OSError, subprocess.SubprocessError, LookupError) as error:
        return f"its library cannot be built: {_explain(error)}"


def _register(path: Path) -> str | None:
    try:
        library = ctypes.CDLL(str(path))
        handlers = {call: getattr(library, call) for call in _CALLS}
        product_rows, table_rows = (
            dict(zip(_PRODUCT_DTYPES, (ctypes.c_int * len(_PRODUCT_DTYPES)).in_dll(library, name), strict=True))
            for name in ("JaxserveProductRows", "JaxserveTableRows")
        )
    except (OSError, AttributeError, ValueError) as error:
        return f"its library cannot be loaded: {error}"
    _state["content"] = path.read_bytes()
    _state["product_rows"], _state["table_rows"] = product_rows, table_rows
    _state["has_tiles"] = bool(library.JaxserveRequestTiles())
    for call, handler in handlers.items():
        jax.ffi.register_ffi_target(target_name(call), jax.ffi.pycapsule(handler), platform="cpu")
    return None


def target_name(call: str) -> str:
    """Returns the name of a call in programs. It changes with the source: another version's programs are not reused."""
    return f"{call}_{digest()[:12]}"


@lru_cache
def digest() -> str:
    """Returns what the library depends on: its source, jaxlib, and the instructions of this processor."""
    text = "\0".join(path.read_text() for path in (*_list_sources(), *sorted(FOLDER.glob("*.h"))))
    parts = (text, jaxlib.__version__, " ".join(_FLAGS), platform.machine(), _describe_processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _describe_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _list_sources() -> list[Path]:
    return sorted(FOLDER.glob("*.cc"))


def _find_kept(directory: Path) -> Path | None:
    """Returns the library that the directory has; None if it has none that is whole. One that is not is removed."""
    for path in directory.glob(f"{_STEM}-{digest()[:16]}-*.so"):
        if path.stem.endswith(_digest_content(path)):
            return path
        path.unlink(missing_ok=True)
    return None


def _compile_into(directory: Path) -> Path:
    """Returns the path of the new library in the directory, where it appears whole: others may look for it now."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise LookupError(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        made = _compile(compiler, Path(folder))
        path = directory / f"{_STEM}-{digest()[:16]}-{_digest_content(made)}.so"
        os.replace(made, path)
    return path


def _compile(compiler: str, folder: Path) -> Path:
    """Returns the path of the new library in the folder, one file on each core, the longest first: the user is
    waiting."""
    sources = sorted(_list_sources(), key=lambda source: source.stat().st_size, reverse=True)
    objects = [folder / f"{source.stem}.o" for source in sources]

    def compile_one(source: Path, made: Path) -> None:
        _run_compiler(compiler, *_FLAGS, "-isystem", jax.ffi.include_dir(), "-c", source, "-o", made)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources, objects))
    library = folder / "new.so"
    _run_compiler(compiler, "-shared", *objects, "-o", library)
    return library


def _run_compiler(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)


def _digest_content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _explain(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"compiling takes more than {_COMPILE_SECONDS} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in error.stderr.splitlines() if "error" in line] or [f"status {error.returncode}"]
        return f"{Path(error.cmd[0]).name}: {lines[0]}"
    return str(error)
