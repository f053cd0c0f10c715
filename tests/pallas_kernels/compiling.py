"""How programs of tests are compiled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax._src.pallas.mosaic.interpret import thread_map


@contextmanager
def compile_quickly() -> Iterator[None]:
    """Within it XLA optimizes little, and interpreters compile a kernel once: what runs once is ready sooner."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(thread_map, "_run_jaxpr", _Kernels().run)
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


class _Kernels:
    """The kernels of interpreters, compiled. JAX's own threads, one per warpgroup, all compile a kernel at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._programs: dict[Any, Any] = {}

    def run(self, jaxpr: Any, consts: Any, *args: Any) -> None:
        with self._lock:
            if jaxpr not in self._programs:
                traced = jax.jit(thread_map._run, static_argnums=0).trace(jaxpr, consts, *args)
                self._programs[jaxpr] = traced.lower().compile()
        self._programs[jaxpr](consts, *args)
