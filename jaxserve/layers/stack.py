"""The one place that knows how parameters lie at run time.

Canonical trees (files, checkpoints, `update_weights`) hold one dictionary per layer:
`{"embed": ..., "layers": [{"qkv": ...}, ...], ...}`. At run time they are either

- "unrolled": the same tree. For CPUs, where a slice of a stacked array is copied each step.
- "stacked": `{"embed": ..., "layers": {"qkv": [L, ...]}, ...}`. For accelerators: slices at static indices are free
  there, and a dispatch with few leaves costs microseconds instead of hundreds.

All layers of a model have equal leaves. The functions take trees of arrays and of parameter specs alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

StackMode = Literal["unrolled", "stacked"]
Tree = Mapping[str, Any]
LeafPath = tuple[str | int, ...]


def stack_params(params: dict[str, Any], mode: StackMode) -> dict[str, Any]:
    """Returns the runtime tree of a canonical tree of arrays, and empties the canonical one's layers.

    So stacking holds one leaf twice, never the whole model.
    """
    if mode == "unrolled":
        return params
    layers = params["layers"]
    stacked = {name: jnp.stack([layer.pop(name) for layer in layers]) for name in list(layers[0])}
    return {**params, "layers": stacked}


def stack_specs(specs: Tree, mode: StackMode) -> Tree:
    """Returns the runtime tree of a canonical tree of parameter specs (a layer axis leads `shape`, `axes`)."""
    if mode == "unrolled":
        return dict(specs)
    num_layers = len(specs["layers"])

    def stack(spec: Any) -> Any:
        return dataclasses.replace(spec, shape=(num_layers, *spec.shape), axes=("layers", *spec.axes))

    return {**specs, "layers": jax.tree.map(stack, specs["layers"][0])}


def layer_params(params: Tree, index: int) -> dict[str, Any]:
    """Returns the leaves of one layer of a runtime tree; `index` is a Python integer."""
    layers = params["layers"]
    if isinstance(layers, list):
        return layers[index]
    return jax.tree.map(lambda leaf: leaf[index], layers)


def locate_leaf(name: str, mode: StackMode) -> tuple[LeafPath, int | None]:
    """Returns where a canonical leaf lies at run time: its path, and its index on the layer axis if stacked.

    "layers.3.qkv" is (("layers", 3, "qkv"), None) unrolled and (("layers", "qkv"), 3) stacked.
    """
    parts = name.split(".")
    if parts[0] != "layers":
        return tuple(parts), None
    if mode == "unrolled":
        return ("layers", int(parts[1]), *parts[2:]), None
    return ("layers", *parts[2:]), int(parts[1])


def get_leaf(tree: Tree, path: LeafPath) -> Any:
    """Returns the leaf at `path`; KeyError or IndexError when there is none."""
    for key in path:
        tree = tree[key]
    return tree


def set_leaf(tree: Any, path: LeafPath, value: Any) -> Any:
    """Returns `tree` with another leaf at `path`; only the containers on the way are copied."""
    if not path:
        return value
    copy = list(tree) if isinstance(tree, list) else dict(tree)
    copy[path[0]] = set_leaf(tree[path[0]], path[1:], value)
    return copy


def write_layer(stacked: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `stacked` [L, ...] with layer `index` replaced by `value` [...].

    `index` may be traced: jitted with `stacked` donated this is one program per leaf shape, and works in place.
    """
    return lax.dynamic_update_index_in_dim(stacked, value.astype(stacked.dtype), index, axis=0)
