"""Compiles the recurrent rules of real models for a device that is not attached, as `compile_gate` does attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent.api import apply_delta_rule, choose_recurrent_impl
from pallas_kernels.recurrent.spec import DeltaShape, DeltaTokens, StateRows
from pallas_kernels.targets import Target
from pallas_kernels.testing.compile_gate import POOL_SHARE, Gate
from pallas_kernels.testing.gate_report import ProgramReport

NUM_LAYERS = 2
MIXED_TOKENS = 2048


@dataclass(frozen=True)
class RecurrentShape:
    """The heads of one device, 128 x 128 each. `group` value heads share a key head."""

    name: str
    keys: int
    group: int
    state_dtype: str = "float32"

    def fill(self, num_tokens: int) -> DeltaShape:
        """The shape of a step."""
        return DeltaShape(self.keys, self.group, 128, 128, self.state_dtype, num_tokens)


class RecurrentProgram(NamedTuple):
    """A step of a shape."""

    name: str
    shape: RecurrentShape
    num_tokens: int


SHAPES = (
    RecurrentShape("qwen3.6-35b-a3b", 16, 2),  # and Qwen3-Next
    RecurrentShape("qwen3.6-35b-a3b, bfloat16 states", 16, 2, "bfloat16"),
    RecurrentShape("qwen3.6-27b", 16, 3),
    RecurrentShape("qwen3.6-35b-a3b, one of 8 devices", 2, 2),
)
_BASE = SHAPES[0].name
SAMPLES = {  # what each target that has a kernel compiles without `--full`
    "h200": (f"mixed: {_BASE}",),
    "v5e": (f"mixed: {_BASE}",),
    "tpu7x": (f"decode: {_BASE}",),
}


def list_programs(target: Target, *, full: bool) -> list[RecurrentProgram]:
    """The programs of a target; none without a kernel."""
    chosen, _ = choose_recurrent_impl(
        SHAPES[0].fill(MIXED_TOKENS), platform=target.platform, device_kind=target.device_kind
    )
    if chosen == "xla":
        return []
    steps = {"decode": target.num_rows, "mixed": MIXED_TOKENS}
    programs = [
        RecurrentProgram(f"{bucket}: delta rule of {shape.name}", shape, tokens)
        for shape in SHAPES
        for bucket, tokens in steps.items()
    ]
    sample = {name.replace(": ", ": delta rule of ", 1) for name in SAMPLES.get(target.name, ())}
    return programs if full else [program for program in programs if program.name in sample]


def measure_recurrent(gate: Gate, program: RecurrentProgram, *, impl: str) -> ProgramReport:
    """Compiles one layer's rule, with its states in a pool that takes half of the device."""
    target, shape = gate.target, program.shape.fill(program.num_tokens)
    chosen, reason = choose_recurrent_impl(shape, platform=target.platform, device_kind=target.device_kind)
    report = ProgramReport(program.name, target.name, impl=chosen, reason=reason)
    if chosen != target.impl or impl != target.impl:
        return replace(report, error=f"the kernel of {target.impl} is gated, {chosen} is chosen: {reason}")
    state_bytes = shape.heads * shape.key_dim * shape.value_dim * jnp.dtype(shape.state_dtype).itemsize
    slots = int(target.memory_bytes * POOL_SHARE) // (NUM_LAYERS * state_bytes)
    # The tokens in float32, twice, as blocks of heads: more would hold states.
    most = 4 * program.num_tokens * shape.heads * 4 * shape.value_dim * 2
    report = replace(report, donated_bytes=NUM_LAYERS * slots * state_bytes, most_temp_bytes=most)
    sharding = jax.sharding.SingleDeviceSharding(gate.devices[0]) if gate.devices else None

    def describe(dims: tuple[int, ...], dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=sharding)

    tokens, rows = program.num_tokens, target.num_rows
    keys, values = describe((tokens, shape.keys, shape.key_dim)), describe((tokens, shape.heads, shape.value_dim))
    numbers = describe((tokens, shape.heads))
    arrays = (
        describe((NUM_LAYERS, slots, shape.heads, shape.key_dim, shape.value_dim), shape.state_dtype),
        DeltaTokens(keys, keys, values, numbers, numbers),
        StateRows(describe((rows + 1,), "int32"), describe((rows,), "int32"), describe((rows,), "int32")),
    )

    def apply(pool: jax.Array, tokens: DeltaTokens, rows: StateRows) -> tuple[jax.Array, jax.Array]:
        return apply_delta_rule(tokens, pool, NUM_LAYERS - 1, rows, impl=chosen)

    jitted = jax.jit(apply, donate_argnames="pool")
    return gate.measure(report, lambda: jitted.trace(*arrays))
