"""Where tests keep compiled programs. All test processes of a machine share it, so equal programs compile once.

JAX's keys hold the program, its options and the version of jaxlib. Programs that call back into Python, as the
interpreters of kernels do, are never kept. Tests of compiling and of the cache use empty folders of their own.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = Path(tempfile.gettempdir()) / "jaxserve-test-programs"
# For child processes that compile, what `compile_quickly` is for this one.
QUICK_ENV = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}

# Linux gives a process 65,530 mappings of memory (`vm.max_map_count`), and each loaded program takes some. XLA does not
# survive a mapping that fails. The rest is for what one module loads.
MOST_MAPPINGS = 65_530 // 3
_MAPPINGS = Path("/proc/self/maps")


@contextmanager
def compile_quickly() -> Iterator[None]:
    """Lets LLVM leave out its optimizations, which take more time than steps of tiny models save by them.

    Fusions, layouts and the use of memory are those that users have: XLA decides these before.
    """
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def has_many_programs() -> bool:
    """Returns whether this process has so many mappings that a module of tests should not add its programs to them."""
    if not _MAPPINGS.exists():  # only Linux has this file, and this limit
        return False
    with _MAPPINGS.open("rb") as lines:
        return sum(1 for _ in lines) > MOST_MAPPINGS


def drop_programs() -> None:
    """Unloads the programs that no living object holds; those in `PROGRAMS` are read from there when wanted again."""
    import jax

    gc.collect()  # an engine and its parts refer to each other
    jax.clear_caches()
    gc.collect()
