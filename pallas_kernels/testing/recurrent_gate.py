"""Compiles the recurrent rules of real models for a device that is not attached, as `compile_gate` does attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent.api import advance_states, choose_recurrent_impl
from pallas_kernels.recurrent.spec import RuleShape, RuleTokens, StateRows
from pallas_kernels.targets import Target
from pallas_kernels.testing.compile_gate import POOL_SHARE, Gate
from pallas_kernels.testing.gate_report import ProgramReport

NUM_LAYERS = 2
MIXED_TOKENS = 2048


@dataclass(frozen=True)
class RecurrentShape:
    """The heads of one device, of which `group` share a key head. `platforms` have a kernel for the shape; for the
    others `choose_recurrent_impl` must name an obstacle."""

    name: str
    keys: int
    group: int
    value_dim: int = 128
    state_dtype: str = "float32"
    rule: str = "delta"
    platforms: tuple[str, ...] = ("gpu", "tpu")

    def fill(self, num_tokens: int) -> RuleShape:
        """The shape of a step."""
        return RuleShape(self.keys, self.group, 128, self.value_dim, self.state_dtype, num_tokens, self.rule)


class RecurrentProgram(NamedTuple):
    """A step of a shape."""

    name: str
    shape: RecurrentShape
    num_tokens: int


SHAPES = (
    RecurrentShape("qwen3.6-35b-a3b", 16, 2),  # and Qwen3-Next
    RecurrentShape("qwen3.6-35b-a3b, bfloat16 states", 16, 2, state_dtype="bfloat16"),
    RecurrentShape("qwen3.6-27b", 16, 3),
    RecurrentShape("qwen3.6-35b-a3b, one of 8 devices", 2, 2),
    RecurrentShape("nemotron-3-nano-30b-a3b", 8, 8, 64, rule="space", platforms=("gpu",)),
    RecurrentShape("nemotron-nano-9b-v2", 8, 16, 80, rule="space", platforms=()),
    RecurrentShape("granite-4.0-h-tiny", 1, 48, 64, rule="space", platforms=("gpu",)),
)
_BASE, _SPACE = SHAPES[0].name, SHAPES[4].name
SAMPLES = {  # what each target that has a kernel compiles without `--full`
    "h200": (f"mixed: {_BASE}", f"decode: {_SPACE}"),
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
        RecurrentProgram(f"{bucket}: recurrence of {shape.name}", shape, tokens)
        for shape in SHAPES
        for bucket, tokens in steps.items()
        if target.platform in shape.platforms
    ]
    sample = {name.replace(": ", ": recurrence of ", 1) for name in SAMPLES.get(target.name, ())}
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
    # Tokens and answers in float32, twice, as blocks of heads: more would hold states.
    most = 2 * 4 * program.num_tokens * shape.heads * 2 * (shape.key_dim + shape.value_dim)
    report = replace(report, donated_bytes=NUM_LAYERS * slots * state_bytes, most_temp_bytes=most)
    sharding = jax.sharding.SingleDeviceSharding(gate.devices[0]) if gate.devices else None

    def describe(dims: tuple[int, ...], dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=sharding)

    tokens, rows = program.num_tokens, target.num_rows
    keys, values = describe((tokens, shape.keys, shape.key_dim)), describe((tokens, shape.heads, shape.value_dim))
    numbers = describe((tokens, shape.heads))
    arrays = (
        describe((NUM_LAYERS, slots, shape.heads, *shape.state), shape.state_dtype),
        RuleTokens(keys, keys, values, numbers, numbers if shape.rule == "delta" else None),
        StateRows(describe((rows + 1,), "int32"), describe((rows,), "int32"), describe((rows,), "int32")),
    )

    def apply(pool: jax.Array, tokens: RuleTokens, rows: StateRows) -> tuple[jax.Array, jax.Array]:
        return advance_states(tokens, pool, NUM_LAYERS - 1, rows, impl=chosen)

    jitted = jax.jit(apply, donate_argnames="pool")
    return gate.measure(report, lambda: jitted.trace(*arrays))
