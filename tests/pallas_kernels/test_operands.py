"""An operand that a TPU kernel never reads is found, and the kernels here have none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped.tpu import multiply
from pallas_kernels.targets import TARGETS, find_target
from pallas_kernels.testing.compile_gate import Gate, measure_attention, trace_for
from pallas_kernels.testing.gate_report import ProgramReport, find_faults
from pallas_kernels.testing.gate_shapes import list_programs
from pallas_kernels.testing.operands import list_unread_operands

V5E = find_target("v5e")
TPUS = [target for target in TARGETS.values() if target.platform == "tpu"]
SAMPLES = {program.name for target in TPUS for program in list_programs(target, full=False)}
PROGRAMS = {program.name: program for program in list_programs(V5E) if program.name in SAMPLES}


def copy_first(source: jax.Array, *, reads_all: bool) -> jax.Array:
    """A kernel with an operand made in the program, as in jax's issue, which it may read."""

    def kernel(source: jax.Ref, other: jax.Ref, out: jax.Ref) -> None:
        @pl.when(pl.program_id(0) == 0)
        def _copy() -> None:
            out[...] = source[...] + other[...] if reads_all else source[...]

    spec = pl.BlockSpec((8, 128), lambda step: (step, 0))
    call = pl.pallas_call(
        kernel,
        grid=(2,),
        in_specs=[spec, spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(source.shape, source.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="copy_first",
    )
    return call(source, jnp.ones_like(source))


@pytest.mark.parametrize("reads_all", [True, False])
def test_an_operand_that_is_not_read_is_found(reads_all: bool) -> None:
    traced = jax.jit(lambda source: copy_first(source, reads_all=reads_all)).trace(jnp.ones((16, 128)))
    found = list_unread_operands(traced.jaxpr.jaxpr)
    assert len(found) == (0 if reads_all else 1) and all(text.startswith("operand 1 of copy_first, ") for text in found)


def test_the_gate_refuses_it() -> None:
    report = ProgramReport("decode", "v5e", impl="xla", unread_operands=("operand 1 of decode_attention",))
    assert find_faults(report, V5E) == ["a kernel never reads operand 1 of decode_attention: others may read zeros"]


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_attention_reads_all_its_operands(name: str) -> None:
    report = measure_attention(Gate(V5E), PROGRAMS[name], impl="tpu")
    assert report.error == "" and report.unread_operands == ()
    assert report.kernels or report.impl == "xla"


def test_grouped_products_read_all_their_operands() -> None:
    arrays = jnp.ones((16, 128), jnp.bfloat16), jnp.ones((4, 128, 256), jnp.bfloat16), jnp.full(4, 4, jnp.int32)
    with trace_for(V5E):
        traced = jax.jit(multiply, static_argnums=4).trace(*arrays, jnp.asarray(0), 1)
    assert list_unread_operands(traced.jaxpr.jaxpr) == []
