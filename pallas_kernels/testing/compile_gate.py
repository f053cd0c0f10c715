"""Compiles programs for a device that is not attached, and reads what its compiler says; attention, for one.

It does so in a child process, because a compiler may abort it and a process holds only one target's compiler. The
parent, `scripts/test_kernels.py`, puts the compiler's wheels on the path and sets the target's environment.
`--lower-only` needs neither: it lowers programs to the kernels' own language, which finds less.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir
from jaxlib.mlir import ir

from pallas_kernels import attend_with_update, choose_layout, page_bytes, pool_shape, prepare_batch, resolve_impl
from pallas_kernels.backends import find_backend
from pallas_kernels.spec import AttnLayer, AttnShape, HeadParams
from pallas_kernels.targets import TARGETS, Target, trace_for
from pallas_kernels.testing.gate_descriptors import list_descriptors
from pallas_kernels.testing.gate_offsets import list_short_indices, list_short_offsets
from pallas_kernels.testing.gate_report import (
    KernelUse,
    ProgramReport,
    count_collectives,
    count_headed_products,
    count_launches,
    count_layer_launches,
    count_repeated,
    list_complaints,
    list_copied_params,
    list_fixed_turns,
    list_small_tiles,
    merge_uses,
    parse_ptxas,
    parse_tpu_kernels,
)
from pallas_kernels.testing.gate_shapes import GateProgram
from pallas_kernels.testing.operands import list_unread_operands

POOL_SHARE = 0.5  # of a device's memory: no copy of it hides among temporaries, and its offsets are those of a server
NUM_LAYERS = 2
PLATFORMS = {"gpu": "cuda", "tpu": "tpu"}  # the names that lowering has for them
_DUMP_NAME = "mosaic_gpu.dump_basename"  # of a kernel's files, numbered anew by jax 0.11.2 each time it is lowered


@contextlib.contextmanager
def capture_output() -> Iterator[Callable[[], str]]:
    """Collects what C++ code writes to standard output. Yields a function that returns it after the context ends."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        text: list[str] = []

        def read() -> str:
            return text[0]

        try:
            yield read
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))


def list_launches(lowered: Any) -> list[KernelUse]:
    """The Pallas kernels in a lowered program, with the figures in their own code."""
    launches: list[KernelUse] = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target.startswith("mosaic_gpu"):
                launches.extend(_read_gpu_kernel(operation))
            elif target == "tpu_custom_call":
                launches.append(KernelUse(ir.StringAttr(operation.attributes["kernel_name"]).value))
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return list(dict.fromkeys(launches))  # one kernel however many layers launch it


def _read_gpu_kernel(call: Any) -> list[KernelUse]:
    """Reads the module that Mosaic keeps inside the call: a launch has the sizes of its block and shared memory."""
    from jax.experimental.mosaic import gpu as mosaic_gpu

    code = ir.StringAttr(ir.DictAttr(call.attributes["mhlo.backend_config"])["module"]).value_bytes
    found: list[KernelUse] = []
    context = mlir.make_ir_context()
    mosaic_gpu.dialect.register_dialect(context)
    context.allow_unregistered_dialects = True
    with context:
        module = ir.Module.parse(code)
        name = ir.StringAttr(module.operation.attributes["sym_name"]).value
        if _DUMP_NAME in module.operation.attributes:
            del module.operation.attributes[_DUMP_NAME]
        digest = hashlib.sha256(module.operation.get_asm(enable_debug_info=False).encode()).hexdigest()[:16]

        def visit(operation: Any) -> Any:
            if operation.name.endswith("gpu.launch"):
                # Operands: tokens, grid (3), block (3), cluster (0 or 3), fallback cluster (0 or 3), shared memory.
                counts = list(ir.DenseI32ArrayAttr(operation.attributes["operandSegmentSizes"]))
                block = [_read_constant(operation.operands[sum(counts[:index])]) for index in (4, 5, 6)]
                shared = _read_constant(operation.operands[sum(counts[:10])]) if counts[10] else 0
                found.append(KernelUse(name, digest, threads=math.prod(block), shared_memory_bytes=shared))
            return ir.WalkResult.ADVANCE

        module.operation.walk(visit)
        copies = [f"{fault}: {made}" for made in list_descriptors(module) for fault in made.list_faults()]
        faults = (*copies, *list_short_offsets(module))
    return [replace(use, faults=faults) for use in found]


def _read_constant(value: Any) -> int:
    return ir.IntegerAttr(value.owner.attributes["value"]).value


@dataclass(frozen=True)
class Gate:
    """Compiles programs for a target. Without devices it lowers them only, which needs no compiler.

    `seen` keeps what ptxas said: a process compiles equal kernels of different programs once.
    """

    target: Target
    devices: Sequence[Any] = ()
    seen: dict[str, KernelUse] = field(default_factory=dict)

    def measure(self, report: ProgramReport, trace: Callable[[], Any]) -> ProgramReport:
        """Adds to the report what lowering and compiling a program say. An error becomes part of the report: it fails
        the gate, and the next programs are still compiled."""
        start = time.perf_counter()
        try:
            with trace_for(self.target):
                report = self._compile(report, trace())
        except Exception as error:  # whatever a compiler raises
            report = replace(report, error=f"{type(error).__name__}: {error}")
        return replace(report, seconds=time.perf_counter() - start)

    def _compile(self, report: ProgramReport, traced: Any) -> ProgramReport:
        if self.target.platform == "tpu":
            report = replace(report, unread_operands=tuple(list_unread_operands(traced.jaxpr.jaxpr)))
        if not self.devices:
            lowered = traced.lower(lowering_platforms=(PLATFORMS[self.target.platform],))
            return replace(report, kernels=tuple(list_launches(lowered)))
        lowered = traced.lower()
        kernels, complaints, launches, layer_launches = list_launches(lowered), [], None, None
        repeated, collectives = 0, (0, 0)
        with capture_output() as read_output:
            compiled = lowered.compile()
        text = compiled.as_text()
        if self.target.platform == "gpu":
            kernels = merge_uses(kernels, parse_ptxas(read_output()), self.seen)
            complaints = list_complaints(read_output())
            launches, repeated = count_launches(text), count_repeated(text)
            layer_launches = count_layer_launches(text)
        else:
            kernels, collectives = parse_tpu_kernels(text), count_collectives(text)
        memory = compiled.memory_analysis()
        return replace(
            report,
            is_compiled=True,
            argument_bytes=memory.argument_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            launches=launches,
            layer_launches=layer_launches,
            repeated=repeated,
            small_tiles=tuple(list_small_tiles(text)),
            collectives=collectives[0],
            async_pairs=collectives[1],
            kernels=tuple(kernels),
            complaints=tuple(complaints),
            copied_params=tuple(list_copied_params(text)),
            headed_products=count_headed_products(text),
            fixed_turns=tuple(list_fixed_turns(text)),
            short_indices=tuple(list_short_indices(text)),
        )


def measure_attention(gate: Gate, program: GateProgram, *, impl: str) -> ProgramReport:
    """Compiles the attention of one layer with its update, as a model calls it."""
    target = gate.target
    shape = program.shape.attention(program.page_size)
    report = ProgramReport(program.name, target.name, impl=impl)
    chosen, reason = resolve_impl(None, shape, platform=target.platform, device_kind=target.device_kind)
    if impl == target.impl and (chosen == impl) == (target.impl in dict(program.shape.portable)):
        return replace(report, error=f"GateShape.portable says otherwise: {chosen} is chosen: {reason}")
    if impl == target.impl:
        report = replace(report, impl=chosen, reason=reason)
    report = replace(report, loops_follow_batch=report.impl == "xla")
    layout = choose_layout(report.impl, shape.spec, platform=target.platform)
    shape = replace(shape, spec=replace(shape.spec, layout=layout))
    layer_pages = int(target.memory_bytes * POOL_SHARE) // (NUM_LAYERS * page_bytes(shape.spec))
    arrays = _describe_arguments(program, shape, gate.devices, NUM_LAYERS * layer_pages)
    report = replace(report, donated_bytes=NUM_LAYERS * layer_pages * page_bytes(shape.spec))

    def attend(
        kv_pages: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        heads: HeadParams,
        meta: Any,
    ) -> Any:
        options = {"max_query_len": program.max_query_len, "impl": report.impl}
        if program.shape.switch and report.impl == "gpu":
            (part, name), config = program.shape.switch, find_backend("gpu").module.default_config(shape)
            options["config"] = replace(config, **{part: replace(getattr(config, part), **{name: True})})
        batch = prepare_batch(*meta, num_tokens=program.num_tokens, shape=shape, **options)
        if program.max_query_len is not None and report.impl == target.impl and target.platform == "gpu":
            config = batch.work.config  # of latents it has one part
            planned.append(getattr(config, "decode", config).ctas_per_sm)
        return attend_with_update(q, k, v, kv_pages, batch, AttnLayer(program.shape.params, heads, layer_pages))

    planned: list[int] = []  # when it has been traced
    jitted = jax.jit(attend, donate_argnames="kv_pages")
    report = gate.measure(report, lambda: jitted.trace(**arrays))
    return replace(report, planned_blocks=planned[0] if planned else None)


def _describe_arguments(
    program: GateProgram, shape: AttnShape, devices: Sequence[Any], num_pages: int
) -> dict[str, Any]:
    """Abstract arrays of one step on one device."""
    sharding = jax.sharding.SingleDeviceSharding(devices[0]) if devices else None

    def describe(dims: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=sharding)

    spec, num_tokens, num_rows = shape.spec, program.num_tokens, program.num_rows
    per_head = describe((spec.num_kv_heads,), jnp.float32) if jnp.dtype(spec.dtype).itemsize == 1 else None
    sinks = describe((shape.num_heads,), jnp.float32) if program.shape.sinks else None
    new = describe((num_tokens, spec.num_kv_heads, spec.head_dim), shape.dtype)
    return {
        "kv_pages": describe(pool_shape(spec, num_pages), spec.dtype),
        "q": describe((num_tokens, shape.num_heads, spec.head_dim), shape.dtype),
        "k": new,
        "v": None if spec.is_latent else new,
        "heads": HeadParams(sinks, per_head, None if spec.is_latent else per_head),
        "meta": (
            describe((num_rows, program.table_width)),
            describe((num_rows,)),
            describe((num_rows + 1,)),
            describe((3,)),
        ),
    }


def make_parser(description: str) -> argparse.ArgumentParser:
    """The arguments of every child process of the gate."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="programs of these names (default: all)")
    parser.add_argument("--full", action="store_true", help="the slow ones as well")
    parser.add_argument("--lower-only", action="store_true", help="without the target's compiler")
    parser.add_argument("--impl", default=None, help="default: the target's kernels")
    parser.add_argument("--json", action="store_true", help="a JSON line with all names, then one a program")
    return parser


def choose_names(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """The programs that are asked for. The parent is told at once: it must know what an aborted process still had."""
    chosen = [name for name in names if args.only is None or name in args.only]
    if args.json:
        print(json.dumps(chosen), flush=True)
    return chosen


def print_report(report: ProgramReport, *, as_json: bool) -> None:
    """Prints one line at once, so that the parent knows how far an aborted process has come."""
    print(report.to_json() if as_json else report, flush=True)
