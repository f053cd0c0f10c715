"""Compiled programs on disk, in JAX's persistent cache, made safe against disks and processes that fail.

JAX's own store writes an entry in place and never over another: one that was cut, because the disk was full or the
process was killed, stays, and its program is compiled at every start from then on. It also warns of each entry that it
cannot read or write.
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
_SCRATCH_SECONDS = 3600.0  # what is older was left by a process that was killed
_PROBE = bytes(4096)
_OpenStore = Callable[[str], "tuple[Any, str] | None"]


def enable_persistent_cache(directory: Path | None) -> None:
    """Lets JAX keep compiled programs in `directory` between starts; None leaves its settings alone.

    Several processes may use one directory. An entry that cannot be read is written anew. Where nothing can be
    written, programs are still read, and one warning says what to do once there is one to write.
    """
    if directory is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory)
    if not _can_write(directory):
        # XLA's own cache of tuned GPU kernels is in there, too, and a program whose result it cannot write fails.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    if _replace_store() or jax.config.jax_compilation_cache_dir != str(directory):
        jax_cache.reset_cache()  # JAX may have opened one already, and opens one only once
    # JAX says it of each program; the store says it once, of all.
    warnings.filterwarnings("ignore", message="Error reading persistent compilation cache entry", category=UserWarning)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class ProgramStore:
    """What JAX asks of a cache: `get` and `put`. Entries are JAX's own, in format and name.

    JAX puts a program only when it did not get one that it can use. So whatever is there under its key is replaced.
    """

    def __init__(self, store: Any, path: str, open_store: _OpenStore) -> None:
        self._store = store
        self._path = Path(path)  # JAX names it in its log
        self._open_store = open_store
        self._lock = threading.Lock()  # programs are compiled in several threads
        self._found: set[str] = set()
        self._told: set[str] = set()

    def get(self, key: str) -> bytes | None:
        """Returns the entry as it is on disk, None where there is none."""
        value = self._store.get(key)
        if value is not None:
            with self._lock:
                self._found.add(key)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Writes the entry elsewhere and moves it into place whole; a disk that takes none costs one warning."""
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
    """Lets JAX open a `ProgramStore` from now on; False where it does so already, or cannot.

    JAX has no public way to give it a store. `get_file_cache`, which opens the one it has, is the only private name
    that is used; a JAX without it keeps its own.
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
    # A cache that evicts or verifies has to write its entries itself.
    is_plain = settings.jax_compilation_cache_max_size == -1 and not settings.jax_compilation_cache_check_contents
    if opened is None or not is_plain or "://" in path:
        return opened
    return ProgramStore(opened[0], path, original), opened[1]


def _can_write(directory: Path) -> bool:
    """Whether there is permission and room for a small file in `directory`, and where XLA writes below it."""
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
        except OSError:  # its process has just removed it
            continue
        if is_old:
            shutil.rmtree(folder, ignore_errors=True)
