"""Canonical parameter trees by dotted path: "layers.3.qkv.weight" is `tree["layers"][3]["qkv"]["weight"]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxserve.core.models.base import ParamSpec


def flatten_specs(specs: Any) -> tuple[dict[str, ParamSpec], jax.tree_util.PyTreeDef]:
    """Returns the specs by dotted path, in the order of the tree's leaves, and the tree's structure."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(specs)
    return {jax.tree_util.keystr(path, simple=True, separator="."): spec for path, spec in leaves}, treedef


def unflatten(specs: Any, values: Mapping[str, Any]) -> Any:
    """Returns the tree of `specs` with each spec replaced by the value of its dotted path."""
    flat, treedef = flatten_specs(specs)
    return treedef.unflatten([values[name] for name in flat])
