"""Programmatic dependent launch: a kernel is launched while the one before it still runs, and waits for its results.

So its launch costs no time of its own. The interpreter runs kernels one after the other and has no such operations.
"""

from __future__ import annotations

from jax.experimental.pallas import mosaic_gpu as plgpu


def await_earlier_kernel(*, interpret: bool) -> None:
    """Waits until all that earlier kernels write is in memory. Nothing of it may be read before.

    It also has the runtime launch this kernel early: when all blocks of the one before have begun and say so, or end.
    """
    if not interpret:
        plgpu.griddepcontrol_wait()


def launch_next_kernel(*, interpret: bool) -> None:
    """Says that the next kernel may be launched once all blocks have begun, if it waits for this one's results."""
    if not interpret:
        plgpu.griddepcontrol_launch_dependents()
