"""Where tests keep compiled programs. All test processes of a machine share it, so equal programs compile once.

JAX's keys hold the program, its options and the version of jaxlib. Programs that call back into Python, as the
interpreters of kernels do, are never kept. Tests of compiling and of the cache use empty folders of their own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = Path(tempfile.gettempdir()) / "jaxserve-test-programs"
# For child processes that compile, what `compile_quickly` is for this one.
QUICK_ENV = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


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
