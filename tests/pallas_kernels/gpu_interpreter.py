"""What tests ask of the interpreter of GPU kernels; JAX keeps it private."""

from __future__ import annotations

from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call


def found_races() -> bool:
    """Whether the interpreter saw a race in the kernel it ran last. (From JAX 0.12 on it raises, too.)"""
    return bool(interpret_pallas_call.get_races().races_found)


def reset_interpreter() -> None:
    """Makes the interpreter usable again after an exception in a kernel."""
    interpret_pallas_call.reset_gpu_interpret_mode_state()
