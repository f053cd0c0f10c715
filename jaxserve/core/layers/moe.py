"""A mixture of experts: each token goes through a few of many feed-forward blocks (Shazeer et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey
from jaxtyping import Array, Float, Int

from jaxserve.core.layers.adapters import adapter_axes
from jaxserve.core.layers.context import LayerContext, StepContext
from jaxserve.core.layers.linear import linear
from jaxserve.core.layers.mlp import MLPConfig, activate, apply_gate, dense_mlp
from jaxserve.core.layers.router import RouterConfig, route
from jaxserve.core.layers.stack import InStack, unstack
from jaxserve.core.sharding import DEFAULT_RULES, TENSOR_AXIS, Axes
from pallas_kernels import QuantizedArray, grouped_matmul

EXPERTS = "experts"
"""The leaf of all experts of a layer: `gate_up` [2, E, D, F], or without gates `up` [E, D, F], and `down` [E, F, D];
biases have no second last axis."""


@dataclass(frozen=True)
class MoEConfig:
    """`expert` is each of the routed ones, `shared` a block that every token goes through beside them.

    `gated_shared`: a sigmoid of the token weighs what the shared block gives. `by_expert`: on a mesh each device has
    whole experts; else it has a slice of every one. `impl`: of grouped products; None for the best on the device.
    """

    router: RouterConfig
    expert: MLPConfig
    shared: MLPConfig | None = None
    gated_shared: bool = False
    by_expert: bool = False
    impl: str | None = None

    @property
    def expert_axes(self) -> tuple[str | None, str | None]:
        """The logical axes of E and F."""
        return ("experts", None) if self.by_expert else (None, "ffn")


class _Groups(NamedTuple):
    """Rows sorted by expert: how many each expert has, and the expert of each row."""

    sizes: Int[Array, " E"]
    owners: Int[Array, " M"]


def feed_forward(
    config: MLPConfig | MoEConfig, leaves: Mapping[str, Any], x: Float[Array, "T D"], ctx: LayerContext
) -> Float[Array, "T D"]:
    """Returns the feed-forward block that the layer has: `mix_experts` or `dense_mlp`."""
    return (mix_experts if isinstance(config, MoEConfig) else dense_mlp)(config, leaves, x, ctx)


def mix_experts(
    config: MoEConfig,
    leaves: Mapping[str, Any],
    x: Float[Array, "T D"],
    ctx: LayerContext,
    router_input: Float[Array, "T D"] | None = None,
) -> Float[Array, "T D"]:
    """Returns the weighted sum of each token's experts, plus the shared block's answer.

    Parameters: `router` (`route`), `experts` and, where there is a shared block, `shared` (`dense_mlp`) and
    `shared_gate` [D, 1]. Padding tokens go to no expert. On a mesh, all devices route all tokens, each computes what
    its parameters give, and one sum makes the answer. `router_input` is what the router reads, if not `x`.
    """
    num_tokens, routed = ctx.batch.query_start_loc[-1], x if router_input is None else router_input
    if ctx.mesh is None:
        return _mix(config, leaves, x, routed, num_tokens)
    read = {name: leaves[name] for name in ("router", EXPERTS, "shared", "shared_gate") if name in leaves}
    sharded = jax.shard_map(
        lambda leaves, *args: lax.psum(_mix(config, _add_once(config, leaves), *args), TENSOR_AXIS),
        mesh=ctx.mesh,
        in_specs=({name: _split(config, name, leaf) for name, leaf in read.items()}, *[PartitionSpec()] * 3),
        out_specs=PartitionSpec(),
        check_vma=False,  # kernels state no varying axes
    )
    return sharded(read, x, routed, num_tokens)


def _mix(
    config: MoEConfig,
    leaves: Mapping[str, Any],
    x: Float[Array, "T D"],
    routed: Float[Array, "T D"],
    num_tokens: Int[Array, ""],
) -> Float[Array, "T D"]:
    """Returns what the parameters at hand give: all of the answer, or on a mesh this device's part of the sum."""
    here = StepContext(mesh=None)
    experts, weights = route(config.router, leaves["router"], routed, here)
    out = _run_experts(config, leaves[EXPERTS], x, _keep_local(config, leaves, experts, num_tokens), weights)
    if config.shared is None:
        return out
    shared = dense_mlp(config.shared, leaves["shared"], x, here)
    if config.gated_shared:
        shared = jax.nn.sigmoid(linear(here, leaves["shared_gate"], x)) * shared
    return out + shared


def _keep_local(
    config: MoEConfig, leaves: Mapping[str, Any], experts: Int[Array, "T k"], num_tokens: Int[Array, ""]
) -> Int[Array, "T k"]:
    """Returns the experts counted from the first that this device has; their number where it lacks one, for padding."""
    count = _count_experts(leaves[EXPERTS])
    local = experts - lax.axis_index(TENSOR_AXIS) * count if count < config.router.num_experts else experts
    is_token = jnp.arange(experts.shape[0])[:, None] < num_tokens
    return jnp.where(is_token & (local >= 0) & (local < count), local, count)


def _run_experts(
    config: MoEConfig,
    leaves: Mapping[str, Any],
    x: Float[Array, "T D"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
) -> Float[Array, "T D"]:
    """Returns the weighted sum over a token's experts, in the order of k; `experts` of no matrix give nothing.

    Rows are sorted by expert, and the answers found again by their place: a scatter that adds would add in any order.
    """
    top_k, count = experts.shape[1], _count_experts(leaves)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    groups = _Groups(sizes, flat[order])
    rows = x[order // top_k]
    if config.expert.gated:
        gate, up = _multiply(config, leaves["gate_up"], rows, groups, parts=2)
        hidden = apply_gate(config.expert, leaves, gate, up)
    else:
        (up,) = _multiply(config, leaves["up"], rows, groups, parts=1)
        hidden = activate(config.expert, leaves, up)
    (answers,) = _multiply(config, leaves["down"], hidden, groups, parts=1)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]), unique_indices=True)
    places = places.reshape(experts.shape)
    total = jnp.zeros(x.shape, jnp.float32)
    for choice in range(top_k):
        part = weights[:, choice, None] * answers[places[:, choice]].astype(jnp.float32)
        total += jnp.where(experts[:, choice, None] < count, part, 0.0)
    return total.astype(x.dtype)


def _multiply(
    config: MoEConfig, leaf: Mapping[str, Any], rows: Float[Array, "M K"], groups: _Groups, *, parts: int
) -> Float[Array, "parts M N"]:
    """Returns the grouped products with a leaf [parts, E, K, N] or [E, K, N], which may lie in a stack of layers."""
    weight = leaf["weight"]
    if isinstance(weight, Mapping):
        matrices = QuantizedArray(**{name: _list_matrices(array) for name, array in weight.items()})
        weight = weight["values"]
    else:
        matrices = _list_matrices(weight)
    first = weight.index * parts * groups.sizes.shape[0] if isinstance(weight, InStack) else 0
    out = grouped_matmul(rows, matrices, groups.sizes, first, parts=parts, impl=config.impl)
    if "bias" not in leaf:
        return out
    bias = unstack(leaf["bias"]).reshape(parts, -1, out.shape[-1])
    return out + bias.at[:, groups.owners].get(mode="clip")


def _list_matrices(array: jax.Array | InStack) -> jax.Array:
    """Returns an array as one list [..., K, N] of matrices, all of its stack's if it lies in one."""
    array = array.stack if isinstance(array, InStack) else array
    return array.reshape(-1, *array.shape[-2:])


def _count_experts(leaves: Mapping[str, Any]) -> int:
    """Returns how many experts this device has."""
    weight = leaves["down"]["weight"]
    return (weight["values"] if isinstance(weight, Mapping) else weight).shape[-3]


def _add_once(config: MoEConfig, leaves: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a device's leaves, where of equal biases of `down` only the first device's are not 0."""
    down = leaves[EXPERTS]["down"]
    if config.by_expert or "bias" not in down:
        return leaves
    bias = jnp.where(lax.axis_index(TENSOR_AXIS) == 0, unstack(down["bias"]), 0)
    return {**leaves, EXPERTS: {**leaves[EXPERTS], "down": {**down, "bias": bias}}}


def _split(config: MoEConfig, name: str, leaf: Any) -> Any:
    """Returns how the leaf `name` of a layer lies on the mesh."""
    expert, column = config.expert_axes if name == EXPERTS else (None, "ffn")
    wide: Axes = (expert, None, column)
    axes_of: dict[str, Axes] = {"gate_up": wide, "up": wide, "down": (expert, column, None)}

    def split(path: Any, array: jax.Array) -> PartitionSpec:
        axes = axes_of.get(path[0].key, ())
        axes = adapter_axes(axes)[path[-1].key] if axes and DictKey("adapters") in path else axes
        axes = (*axes[:-2], *axes[-1:]) if DictKey("bias") in path else axes
        axes = axes[-array.ndim :]
        axes = (*[None] * (array.ndim - len(axes)), *axes)
        # one scale for all rows is whole on every device
        axes = tuple(None if size == 1 else axis for size, axis in zip(array.shape, axes, strict=True))
        return DEFAULT_RULES.spec(axes)

    return jax.tree_util.tree_map_with_path(split, leaf)
