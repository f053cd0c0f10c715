"""Small programs for the gate itself, good and bad ones; run as a child process: `... gate_programs TARGET NAME`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.targets import TARGETS, open_devices
from pallas_kernels.testing.compile_gate import Gate, print_report
from pallas_kernels.testing.gate_report import ProgramReport

ROWS, COLUMNS = 128, 128
FAR = 1 << 32  # more elements than 32 bits number


def copy_through_smem(x: jax.Array, commit: Callable[[], None] = plgpu.commit_smem) -> jax.Array:
    """Double of x [ROWS, n], all of it in shared memory at once."""

    def copy_block(x_ref: jax.Ref, out_ref: jax.Ref, block: jax.Ref, barrier: jax.Ref) -> None:
        plgpu.copy_gmem_to_smem(x_ref, block, barrier)
        plgpu.barrier_wait(barrier)
        block[...] = block[...] * 2
        commit()
        plgpu.copy_smem_to_gmem(block, out_ref)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()]
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(copy_block, out_type=out, scratch_types=scratch)(x)


def hold_too_much(x: jax.Array) -> jax.Array:
    """Carries [ROWS, 2 * COLUMNS] of float32 through a loop: 256 registers in each of 128 threads, which have 255."""

    def hold_block(x_ref: jax.Ref, out_ref: jax.Ref, block: jax.Ref, barrier: jax.Ref) -> None:
        plgpu.copy_gmem_to_smem(x_ref, block, barrier)
        plgpu.barrier_wait(barrier)
        start = block[...].astype(jnp.float32)
        held = jax.lax.fori_loop(0, 9, lambda _, held: held * held + start, start)
        block[...] = held.astype(block.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(block, out_ref)
        plgpu.wait_smem_to_gmem(0)

    shape = (ROWS, 2 * COLUMNS)
    out = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    scratch = [plgpu.SMEM(shape, jnp.bfloat16), plgpu.Barrier()]
    x = jnp.tile(x, (1, 2)).astype(jnp.bfloat16)
    return plgpu.kernel(hold_block, out_type=out, scratch_types=scratch)(x)


def copy_element(flat: jax.Array) -> jax.Array:
    """COLUMNS times an element of a flat array, which is loaded by its number in 32 bits."""

    def copy(flat_ref: jax.Ref, out_ref: jax.Ref, block: jax.Ref) -> None:
        index = flat_ref[0].astype(jnp.int32) * COLUMNS
        block[...] = jnp.full((COLUMNS,), flat_ref[index], flat.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(block, out_ref)
        plgpu.wait_smem_to_gmem(0)

    out = jax.ShapeDtypeStruct((COLUMNS,), flat.dtype)
    return plgpu.kernel(copy, out_type=out, scratch_types=[plgpu.SMEM((COLUMNS,), flat.dtype)])(flat)


def copy_elements(flat: jax.Array) -> jax.Array:
    """COLUMNS elements of a flat array, which TMA copies from a place of 32 bits."""

    def copy(flat_ref: jax.Ref, out_ref: jax.Ref, block: jax.Ref, barrier: jax.Ref) -> None:
        start = flat_ref[0].astype(jnp.int32) * COLUMNS
        plgpu.copy_gmem_to_smem(flat_ref.at[pl.ds(start, COLUMNS)], block, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(block, out_ref)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((COLUMNS,), flat.dtype), plgpu.Barrier()]
    out = jax.ShapeDtypeStruct((COLUMNS,), flat.dtype)
    return plgpu.kernel(copy, out_type=out, scratch_types=scratch)(flat)


def double_blocks(x: jax.Array) -> jax.Array:
    """A TPU kernel that its compiler takes."""

    def run(x_ref: jax.Ref, out_ref: jax.Ref) -> None:
        out_ref[...] = x_ref[...] * 2

    return pl.pallas_call(run, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="double_blocks")(x)


def slice_lanes(x: jax.Array) -> jax.Array:
    """One that lowers and that the compiler refuses: a slice of lanes at an offset that nobody knows."""

    def run(x_ref: jax.Ref, out_ref: jax.Ref) -> None:
        start = x_ref[0, 0].astype(jnp.int32)
        out_ref[...] = x_ref[:, pl.ds(start, 64)]

    return pl.pallas_call(run, out_shape=jax.ShapeDtypeStruct((x.shape[0], 64), x.dtype), name="slice_lanes")(x)


def fill_vmem(x: jax.Array) -> jax.Array:
    """One whose scratch is larger than any VMEM."""

    def run(x_ref: jax.Ref, out_ref: jax.Ref, scratch: jax.Ref) -> None:
        scratch[...] = jnp.full(scratch.shape, x_ref[0, 0])
        out_ref[...] = scratch[: x_ref.shape[0], : x_ref.shape[1]]

    return pl.pallas_call(
        run,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((1 << 16, 1 << 10), jnp.float32)],
        name="fill_vmem",
    )(x)


def write_slot(pool: jax.Array) -> jax.Array:
    """In place, if the pool is donated."""
    return pool.at[3].set(1)


def add_rows(pool: jax.Array, count: jax.Array | int) -> jax.Array:
    """The sum of the pool's first `count` rows, in a loop."""
    start = jnp.zeros_like(pool[0])
    return jax.lax.fori_loop(0, count, lambda index, total: jnp.sin(total + pool[index]), start)


KERNELS: dict[str, tuple[Callable[[jax.Array], jax.Array], int]] = {  # and columns of the argument
    "copy_through_smem": (copy_through_smem, COLUMNS),
    "no fence": (functools.partial(copy_through_smem, commit=lambda: None), COLUMNS),
    "too much shared memory": (copy_through_smem, 4 * COLUMNS),
    "hold_too_much": (hold_too_much, COLUMNS),
    "double_blocks": (double_blocks, COLUMNS),
    "slice_lanes": (slice_lanes, COLUMNS),
    "fill_vmem": (fill_vmem, COLUMNS),
}

FLAT: dict[str, tuple[Callable[[jax.Array], jax.Array], int]] = {  # and elements of the argument
    "near element": (copy_element, FAR // 4),
    "far element": (copy_element, FAR),
    "near elements": (copy_elements, FAR // 4),
    "far elements": (copy_elements, FAR),
}

LOOPS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "fixed loop": lambda pool: add_rows(pool, 1024),
    "traced loop": lambda pool: add_rows(pool, pool[0, 0].astype(jnp.int32)),
}


def measure(gate: Gate, name: str) -> ProgramReport:
    """What the gate says of one of them."""
    sharding = jax.sharding.SingleDeviceSharding(gate.devices[0]) if gate.devices else None
    if name in KERNELS:
        function, columns = KERNELS[name]
        x = jax.ShapeDtypeStruct((ROWS, columns), jnp.float32, sharding=sharding)
        report = ProgramReport(name, gate.target.name, impl=gate.target.platform)
        return gate.measure(report, lambda: jax.jit(function).trace(x))
    if name in FLAT:
        function, size = FLAT[name]
        flat = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=sharding)
        report = ProgramReport(name, gate.target.name, impl=gate.target.platform)
        return gate.measure(report, lambda: jax.jit(function).trace(flat))
    pool = jax.ShapeDtypeStruct((1 << 12, 1 << 8), jnp.float32, sharding=sharding)
    if name in LOOPS:
        report = ProgramReport(name, gate.target.name, impl="xla", loops_follow_batch=True)
        return gate.measure(report, lambda: jax.jit(LOOPS[name]).trace(pool))
    report = ProgramReport(name, gate.target.name, impl="xla", donated_bytes=4 << 20)
    jitted = jax.jit(write_slot, donate_argnums=(0,) if name == "donated pool" else ())
    return gate.measure(report, functools.partial(jitted.trace, pool))


if __name__ == "__main__":
    chosen = TARGETS[sys.argv[1]]
    opened = Gate(chosen, open_devices(chosen))
    for wanted in sys.argv[2:]:
        print_report(measure(opened, wanted), as_json=True)
