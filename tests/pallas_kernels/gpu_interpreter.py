"""What tests ask of the interpreter of GPU kernels; JAX keeps it private."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call


@contextmanager
def watch_races() -> Iterator[Callable[[], bool]]:
    """Yields what says whether the interpreter has seen a race since.

    From JAX 0.12 on it raises, too. Before, it goes on, and forgets a kernel's races when it runs the next one. So what
    it prints is read.
    """
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield lambda: "RACE DETECTED" in printed.getvalue()
    finally:
        sys.stdout.write(printed.getvalue())


def reset_interpreter() -> None:
    """Makes the interpreter usable again after an exception in a kernel."""
    interpret_pallas_call.reset_gpu_interpret_mode_state()
