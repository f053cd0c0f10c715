"""Compiles the grouped products of real models for a device that is not attached, as `compile_gate` does attention.

The stack of matrices is a parameter of the program: the gate finds copies of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from pallas_kernels.grouped.api import choose_grouped_impl, grouped_matmul
from pallas_kernels.quantized import QuantizedArray, QuantizedFormat
from pallas_kernels.targets import Target
from pallas_kernels.testing.compile_gate import Gate
from pallas_kernels.testing.gate_report import ProgramReport

NUM_LAYERS = 4  # in the stack, which must not be copied
DECODE_TOKENS, MIXED_TOKENS = 64, 2048


@dataclass(frozen=True)
class GroupedShape:
    """The experts of one device: `parts` * E matrices [K, N], of E experts of which a token has `top_k`.

    `quantized`: how the matrices are stored, if not in 16 bits. `platforms` have a kernel for the shape; for the others
    `choose_grouped_impl` must name an obstacle.
    """

    name: str
    num_experts: int
    top_k: int
    width: int  # K
    columns: int  # N
    parts: int = 1
    quantized: QuantizedFormat | None = None
    platforms: tuple[str, ...] = ("gpu", "tpu")

    @property
    def layer_bytes(self) -> int:
        """The bytes of one layer's matrices, without scales."""
        bits = 16 if self.quantized is None else self.quantized.bits
        return self.parts * self.num_experts * self.width * self.columns * bits // 8


_FP8_BLOCKS = QuantizedFormat("float8_e4m3fn", 128)
_AWQ = QuantizedFormat("int4", 128, zeros=True)
_NVFP4 = QuantizedFormat("float4_e2m1fn", 16)
_MXFP4 = QuantizedFormat("float4_e2m1fn", 32, scale_dtype="bfloat16")

SHAPES = (
    GroupedShape("qwen3-30b-a3b, up", 128, 8, 2048, 768, parts=2),
    GroupedShape("qwen3-30b-a3b, down", 128, 8, 768, 2048),
    GroupedShape("qwen3-30b-a3b, fp8 blocks, up", 128, 8, 2048, 768, parts=2, quantized=_FP8_BLOCKS),
    GroupedShape("qwen3-30b-a3b, fp8 blocks, down", 128, 8, 768, 2048, quantized=_FP8_BLOCKS),
    GroupedShape("qwen3-30b-a3b, awq, up", 128, 8, 2048, 768, parts=2, quantized=_AWQ),
    GroupedShape("qwen3-30b-a3b, awq, down", 128, 8, 768, 2048, quantized=_AWQ),
    GroupedShape("qwen3-30b-a3b, int4 groups of 32, up", 128, 8, 2048, 768, 2, QuantizedFormat("int4", 32)),
    GroupedShape("qwen3-30b-a3b, int4 groups of 32, down", 128, 8, 768, 2048, 1, QuantizedFormat("int4", 32)),
    GroupedShape("qwen3-30b-a3b, int8 channels, up", 128, 8, 2048, 768, 2, QuantizedFormat("int8", 2048)),
    GroupedShape("qwen3-30b-a3b, int8 channels, down", 128, 8, 768, 2048, 1, QuantizedFormat("int8", 768)),
    GroupedShape("qwen3-30b-a3b, nvfp4, up", 128, 8, 2048, 768, parts=2, quantized=_NVFP4),
    GroupedShape("qwen3-30b-a3b, nvfp4, down", 128, 8, 768, 2048, quantized=_NVFP4),
    GroupedShape("mixtral-8x7b, up", 8, 2, 4096, 14336, parts=2),
    GroupedShape("mixtral-8x7b, down", 8, 2, 14336, 4096),
    GroupedShape("gpt-oss-20b, up", 32, 4, 2880, 2880, parts=2),
    GroupedShape("gpt-oss-20b, mxfp4, up", 32, 4, 2880, 2880, parts=2, quantized=_MXFP4),
    GroupedShape("gpt-oss-20b, mxfp4, down", 32, 4, 2880, 2880, quantized=_MXFP4),
    GroupedShape("deepseek-v3, up, one of 8 devices", 256, 8, 7168, 256, parts=2),
    GroupedShape("deepseek-v3, down, one of 8 devices", 256, 8, 256, 7168),
    GroupedShape("deepseek-v3, fp8 blocks, up, one of 8 devices", 256, 8, 7168, 256, 2, _FP8_BLOCKS),
    GroupedShape("deepseek-v3, fp8 blocks, down, one of 8 devices", 256, 8, 256, 7168, 1, _FP8_BLOCKS),
    GroupedShape("llama-3.1-8b, awq, a projection", 1, 1, 4096, 4096, quantized=_AWQ),
    GroupedShape("mixtral-8x7b, int8 channels, down", 8, 2, 14336, 4096, 1, QuantizedFormat("int8", 14336)),
    GroupedShape("kimi-k2, up, experts on 8 devices", 48, 8, 7168, 2048, parts=2),
    GroupedShape("kimi-k2, down, experts on 8 devices", 48, 8, 2048, 7168),
)
# What each target that has a kernel compiles without `--full`. One GPU and one TPU have both kernels in both buckets.
_WIDE, _QUANTIZED = "qwen3-30b-a3b, up", "qwen3-30b-a3b, fp8 blocks, up"
_BOTH = tuple(f"{bucket}: {name}" for name in (_WIDE, _QUANTIZED) for bucket in ("decode", "mixed"))
SAMPLES = {"h200": _BOTH, "v5e": _BOTH, "v6e": (f"mixed: {_QUANTIZED}",), "tpu7x": (f"decode: {_QUANTIZED}",)}


def list_programs(target: Target, *, full: bool) -> list[tuple[str, GroupedShape, int]]:
    """Name, shape and tokens of each program; none for a target without a kernel."""
    if target.name not in SAMPLES:
        return []
    buckets = {"decode": DECODE_TOKENS, "mixed": MIXED_TOKENS}
    programs = [(f"{name}: {shape.name}", shape, tokens) for shape in SHAPES for name, tokens in buckets.items()]
    return programs if full else [program for program in programs if program[0] in SAMPLES[target.name]]


def measure_grouped(gate: Gate, name: str, shape: GroupedShape, num_tokens: int, *, impl: str) -> ProgramReport:
    """Compiles one product with the matrices of the last layer in a stack."""
    target = gate.target
    chosen, reason = choose_grouped_impl(
        shape.width,
        shape.columns,
        jnp.bfloat16,
        platform=target.platform,
        device_kind=target.device_kind,
        quantized=shape.quantized,
    )
    report = ProgramReport(name, target.name, impl=impl, reason=reason)
    if (chosen == target.impl) != (target.platform in shape.platforms):
        return replace(report, error=f"GroupedShape.platforms says otherwise: {chosen} is chosen: {reason}")
    if impl == target.impl != chosen:
        impl, report = chosen, replace(report, impl=chosen)
    if impl == target.impl and num_tokens == DECODE_TOKENS:
        # More would hold a copy of the stack in another type, which is no copy of a parameter by name.
        report = replace(report, most_temp_bytes=shape.layer_bytes)
    sharding = jax.sharding.SingleDeviceSharding(gate.devices[0]) if gate.devices else None
    first = (NUM_LAYERS - 1) * shape.parts * shape.num_experts
    arrays = (
        jax.ShapeDtypeStruct((num_tokens * shape.top_k, shape.width), jnp.bfloat16, sharding=sharding),
        {"weight": _describe_stack(shape, sharding)},
        jax.ShapeDtypeStruct((shape.num_experts,), jnp.int32, sharding=sharding),
    )

    def multiply(x: jax.Array, params: dict[str, Any], sizes: jax.Array) -> jax.Array:
        return grouped_matmul(x, params["weight"], sizes, first, parts=shape.parts, impl=impl)

    jitted = jax.jit(multiply)
    return gate.measure(report, lambda: jitted.trace(*arrays))


def _describe_stack(shape: GroupedShape, sharding: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct | Any:
    """The matrices of all layers, in 16 bits or as a `QuantizedArray`, as an engine places them."""
    count, form = NUM_LAYERS * shape.parts * shape.num_experts, shape.quantized

    def describe(rows: int, dtype: str) -> jax.ShapeDtypeStruct:
        array = jax.ShapeDtypeStruct((count, rows, shape.columns), jnp.dtype(dtype))
        return array if sharding is None else array.update(sharding=Format(Layout((0, 1, 2)), sharding))

    if form is None:
        return describe(shape.width, "bfloat16")
    groups = shape.width // form.group
    zeros = describe(groups, "int8") if form.zeros else None
    return QuantizedArray(describe(shape.width, form.dtype), describe(groups, form.scale_dtype), zeros)
