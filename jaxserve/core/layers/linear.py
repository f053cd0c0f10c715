"""The one matrix product of every model, and that of heads with a weight each.

Weights are used as they are stored. They have two axes, or three where several products share their input: with more,
a compiler may choose another layout for them, and copy them in every step to get it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.core.layers.adapters import add_adapters
from jaxserve.core.layers.context import StepContext
from jaxserve.core.sharding import DEFAULT_RULES
from pallas_kernels import QuantizedArray, quantized_matmul
from pallas_kernels.cpu.packing import multiply_packed
from pallas_kernels.cpu.product import multiply_few_rows, suits

Leaf = Mapping[str, Any]
"""The arrays of one projection or norm: `weight`, `bias` where the model has one, and `adapters` where tokens have any.

Where a model was trained with bounds, `in_range` [2] are those of what goes in, and `out_range` [2, ...] those of what
comes out.

A quantized weight is the dictionary of a `QuantizedArray`'s fields, one that a CPU reads packed is {PACKED: array}.
"""

PACKED = "packed"
"""The only key of a weight that `pallas_kernels.cpu.packing.pack` made."""

PROJECTIONS = frozenset({
    "qkv", "o", "qkv_a", "q_b", "qkvz", "ba", "bcx", "zxbcdt", "gate_up", "up", "down", "input_gate", "input_proj",
})  # fmt: skip
"""The leaves of a layer, or of its shared experts, that only `linear` reads."""


def linear(
    ctx: StepContext,
    leaf: Leaf,
    x: Float[Array, "T in"],
    *,
    reduce: bool = False,
    transposed: bool = False,
    dtype: jnp.dtype | None = None,
) -> Float[Array, "*parts T out"]:
    """Returns `x` times the weight [in, out], plus the bias, in the dtype of `x`; both sides are cut at their bounds.

    A weight [parts, in, out] gives [parts, T, out] in one launch. As one product of [in, parts, out] it is no faster on
    CPU, and TPU v5e's compiler then copies the weights of all layers into another layout, in each layer.

    Args:
        reduce: on a mesh the weight is split along `in`; the devices' partial sums are added here.
        transposed: the weight is [out, in], as a table of embeddings is.
        dtype: the result's, if not that of `x`.
    """
    dtype = x.dtype if dtype is None else dtype
    if "in_range" in leaf:
        x = jnp.clip(x, *leaf["in_range"])
    out = _multiply_rows(ctx, leaf["weight"], x, dtype, transposed=transposed)
    if "adapters" in leaf:
        out += add_adapters(partial(_multiply_rows, ctx), leaf["adapters"], x, dtype)
    if reduce and ctx.mesh is not None:
        out = jax.lax.with_sharding_constraint(out, DEFAULT_RULES.sharding(ctx.mesh, (None,) * out.ndim))
    if "bias" in leaf:
        out += leaf["bias"][:, None] if out.ndim > x.ndim else leaf["bias"]
    return jnp.clip(out, *leaf["out_range"]) if "out_range" in leaf else out


def _multiply_rows(
    ctx: StepContext, weight: Any, x: Float[Array, "T in"], dtype: jnp.dtype, *, transposed: bool = False
) -> Float[Array, "*parts T out"]:
    """Returns the product of `linear`, before any sum over devices."""
    if isinstance(weight, Mapping) and PACKED in weight:
        return multiply_packed(x, weight[PACKED], dtype, ctx.num_rows)
    if isinstance(weight, Mapping):
        quantized = QuantizedArray(**weight)
        return quantized_matmul(x, quantized, dtype, whole=ctx.mesh is not None, products=ctx.products)
    if x.shape[0] <= ctx.few_rows and suits(x, weight, transposed=transposed):
        return multiply_few_rows(x, weight, dtype, transposed=transposed)
    parts = weight.shape[:-2]
    batch = tuple(range(len(parts)))
    numbers = ((x.ndim - 1 + len(parts),), (len(parts) + transposed,)), (batch, batch)
    return _multiply(jnp.broadcast_to(x, (*parts, *x.shape)), weight, numbers, dtype)


def multiply_silu(ctx: StepContext, leaf: Leaf, x: Float[Array, "T in"]) -> Float[Array, "T out"] | None:
    """Returns silu(x gate) * (x up) of a leaf's two matrices if one product makes it: packed, no bias, no adapters."""
    if leaf.keys() != {"weight"} or not isinstance(leaf["weight"], Mapping) or PACKED not in leaf["weight"]:
        return None
    return multiply_packed(x, leaf["weight"][PACKED], x.dtype, ctx.num_rows, gated=True)


def linear_heads(leaf: Leaf, x: Float[Array, "T N in"]) -> Float[Array, "T N out"]:
    """Returns each head of `x` times a weight of its own, [N, in, out], in the dtype of `x`."""
    return _multiply(x, leaf["weight"], (((2,), (1,)), ((1,), (0,))), x.dtype).swapaxes(0, 1)


def _multiply(x: Array, weight: Array, numbers: lax.DotDimensionNumbers, dtype: jnp.dtype) -> Array:
    """Returns a product, exact for float32: the default of TPUs and recent GPUs drops most of the mantissa."""
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, weight, numbers, precision=precision, preferred_element_type=dtype)
