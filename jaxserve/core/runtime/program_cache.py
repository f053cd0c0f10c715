"""JAX's persistent cache of compiled programs, made safe against full disks and killed processes.

JAX's own store writes entries in place and never overwrites one. So an entry that was cut short stays, and its program
is compiled at every start from then on. JAX also warns of each entry that it cannot read or write.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

_log = logging.getLogger(__name__)
_SCRATCH = ".writing-"
_SCRATCH_SECONDS = 3600.0  # an older scratch directory was left by a killed process
_PROBE = bytes(4096)
_OpenStore = Callable[[str], "tuple[Any, str] | None"]


def enable_persistent_cache(directory: Path | None) -> None:
    """Lets JAX keep compiled programs in `directory` between starts; None leaves JAX's settings alone.

    Several processes may use one directory. An unreadable entry is written anew. If the directory cannot be written,
    programs are still read, and the first one that is not kept costs one warning.
    """
    if directory is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory)
    if not _can_write(directory):
        # XLA keeps tuned GPU kernels there, too, and fails to compile a program whose results it cannot write.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    if _replace_store() or jax.config.jax_compilation_cache_dir != str(directory):
        jax_cache.reset_cache()  # JAX may have opened one already, and opens one only once
    # JAX warns for each program; `ProgramStore` warns once.
    warnings.filterwarnings("ignore", message="Error reading persistent compilation cache entry", category=UserWarning)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def disable_persistent_cache() -> None:
    """Makes this process compile every program itself.

    On a CPU, a program that was read from a cache can be serialized again, but not run where that is loaded.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    jax_cache.reset_cache()


def keep_programs_of_this_host() -> None:
    """Lets a process that is not JAX's first keep its programs as well; call it before anything is compiled.

    JAX leaves the writing to the first process, as others may have the same directory. Their programs have other keys,
    and a `ProgramStore` writes whole entries. Without this, every other node would compile at each start. The only
    private name used is `_cache_write`; a JAX without it behaves as before.
    """
    from jax._src import compilation_cache, compiler

    if getattr(compiler, "_cache_write", None) is None:
        return

    def write(key: str, seconds: float, name: str, backend: Any, executable: Any) -> None:
        compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))

    compiler._cache_write = write


class ProgramStore:
    """A cache for JAX: `get` and `put`. Entries keep JAX's format and names.

    JAX puts a program only if it got none that it can use, so `put` replaces an existing entry.
    """

    def __init__(self, store: Any, path: str, open_store: _OpenStore) -> None:
        self._store = store
        self._path = Path(path)  # by this name JAX logs it
        self._open_store = open_store
        self._lock = threading.Lock()  # programs are compiled in several threads
        self._found: set[str] = set()
        self._told: set[str] = set()

    def get(self, key: str) -> bytes | None:
        """Returns the entry as it is on disk, None if there is none."""
        value = self._store.get(key)
        if value is not None:
            with self._lock:
                self._found.add(key)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Writes the entry to a scratch directory and moves it into place; logs one warning if the disk refuses."""
        try:
            with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=self._path) as scratch:
                opened = self._open_store(scratch)
                assert opened is not None  # JAX opens every local directory
                opened[0].put(key, value)
                for file in Path(scratch).iterdir():
                    os.replace(file, self._path / file.name)
        except OSError as error:
            self._tell_once(
                "unwritten",
                f"compiled programs are not kept: {self._path} cannot be written ({error.strerror}); every start "
                "compiles them again until there is room and permission there, or compilation_cache_dir names "
                "another directory",
            )
            return
        if key in self._found:
            self._tell_once("unreadable", f"a compiled program in {self._path} could not be read: it is written anew")

    def _tell_once(self, subject: str, text: str) -> None:
        with self._lock:
            is_new = subject not in self._told
            self._told.add(subject)
        if is_new:
            _log.warning("%s", text)


def _replace_store() -> bool:
    """Lets JAX open a `ProgramStore` from now on; returns False if it does so already, or cannot.

    JAX has no public way to set a store. The only private name used is `get_file_cache`, which opens JAX's own; a JAX
    without it keeps its own store.
    """
    from jax._src import compilation_cache

    original = getattr(compilation_cache, "get_file_cache", None)
    if original is None or isinstance(original, functools.partial):
        return False
    compilation_cache.get_file_cache = functools.partial(_open_store, original)
    return True


def _open_store(original: _OpenStore, path: str) -> tuple[Any, str] | None:
    opened = original(path)
    settings = jax.config
    # A cache that evicts or verifies must write its entries itself.
    is_plain = settings.jax_compilation_cache_max_size == -1 and not settings.jax_compilation_cache_check_contents
    if opened is None or not is_plain or "://" in path:
        return opened
    return ProgramStore(opened[0], path, original), opened[1]


def _can_write(directory: Path) -> bool:
    """Whether a small file can be written to `directory` and to XLA's directories in it."""
    try:
        for folder in (directory, *directory.glob("xla_gpu_*/"), *directory.glob("xla_gpu_*/tmp/")):
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                file.write(_PROBE)
    except OSError:
        return False
    return True


def _remove_leftovers(directory: Path) -> None:
    for folder in directory.glob(f"{_SCRATCH}*"):
        try:
            is_old = time.time() - folder.stat().st_mtime > _SCRATCH_SECONDS
        except OSError:  # its own process has just removed it
            continue
        if is_old:
            shutil.rmtree(folder, ignore_errors=True)
