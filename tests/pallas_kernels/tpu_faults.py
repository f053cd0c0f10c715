"""Helpers of the tests of the TPU kernels: the interpreter's verdict, and faults to put into the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import pages
from tests.pallas_kernels.compiling import compile_quickly


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Kernels run once in tests: less code and less optimization compile faster."""
    unroll = pages.UNROLL
    pages.UNROLL = 1
    try:
        with compile_quickly():
            yield
    finally:
        pages.UNROLL = unroll


def find_race() -> bool:
    """Whether the last kernel had one. Before jax 0.12 the interpreter printed it and went on; now it raises."""
    races = interpret_pallas_call.races
    return races is not None and races.races_found


def forget_failure() -> None:
    """The interpreter keeps the state of a kernel that failed in the middle."""
    pltpu.reset_tpu_interpret_mode_state()
    jax.clear_caches()
