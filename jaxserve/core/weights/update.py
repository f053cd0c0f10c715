"""New weights, checked before any parameter is replaced: from the caller's process, or from a checkpoint's files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.core.models.base import ParamSpec, WeightSource
from jaxserve.core.sharding import AxisRules
from jaxserve.core.weights.file_formats import checkpoint_format
from jaxserve.core.weights.finite import has_nonfinite, has_nonfinite_shard, nonfinite_error, require_finite
from jaxserve.core.weights.load import check_tensors, stream_pieces
from jaxserve.core.weights.orbax import restore_params
from jaxserve.core.weights.paths import flatten_specs
from jaxserve.core.weights.place import list_castable
from jaxserve.core.weights.reader import list_names, open_checkpoint
from jaxserve.errors import WeightsError, shorten


@dataclass(frozen=True)
class CheckpointUpdate:
    """The weights of a checkpoint, read one after the other while they are written. Every node can read its own."""

    path: Path
    specs: Any  # the canonical tree
    sources: Mapping[str, WeightSource]
    ignored: tuple[str, ...]
    mesh: Mesh
    rules: AxisRules
    allow_nonfinite: bool = False

    def check(self) -> None:
        """Raises WeightsError where `items` would after it has yielded something.

        That is for what files lack, or have too much or in other shapes, and for NaN and infinity, for which the first
        host reads them once more. An Orbax checkpoint is restored before any of it is yielded.
        """
        if checkpoint_format(self.path) == "orbax":
            return
        checkpoint = open_checkpoint(self.path)
        check_tensors(checkpoint, flatten_specs(self.specs)[0], self.sources, self.ignored)
        if not self.allow_nonfinite and jax.process_index() == 0:
            used = (name for source in self.sources.values() for name in source.choose(checkpoint.names).names)
            require_finite(checkpoint, dict.fromkeys(used))

    def items(self) -> Iterator[tuple[str, jax.Array]]:
        """Yields (dotted path, array in its final sharding). An Orbax checkpoint is read as a whole before."""
        if checkpoint_format(self.path) == "orbax":
            options = {"mesh": self.mesh, "rules": self.rules, "allow_nonfinite": self.allow_nonfinite}
            restored = restore_params(self.path, self.specs, **options)
            return iter(check_update(self.specs, restored, allow_nonfinite=True).items())
        arguments = self.path, self.specs, self.sources, self.ignored
        pieces = stream_pieces(*arguments, mesh=self.mesh, rules=self.rules, whole=True, allow_nonfinite=True)
        return ((piece.name, piece.array) for piece in pieces)


def check_update(specs: Any, new_params: Any, *, allow_nonfinite: bool = False) -> dict[str, np.ndarray | jax.Array]:
    """Returns the arrays of `new_params`, unchanged, by dotted path in the order of `specs`.

    `new_params` is the canonical nested tree, a flat mapping of dotted paths ("layers.3.qkv.weight"), a mixture of the
    two, or an `nnx.State` with the canonical paths. Its leaves are numpy or JAX arrays in the shapes of `specs`, in
    bfloat16, float16 or float32 or, for the parts of quantized matrices, as the engine has them: `place_parameter`
    casts them to the dtype of the spec.

    Raises WeightsError naming the paths that are missing, unknown or given twice, or the first leaf that is not an
    array, was deleted (donated), has another shape or dtype or, unless `allow_nonfinite`, holds NaN or infinity. For
    the last JAX arrays are copied to the host, one at a time.
    """
    flat, _ = flatten_specs(specs)
    leaves: dict[str, Any] = {}
    for name, leaf in _walk("", _to_plain(new_params)):
        if name in leaves:
            raise WeightsError("is given twice", field=name)
        leaves[name] = leaf
    missing, unknown = sorted(flat.keys() - leaves.keys()), sorted(leaves.keys() - flat.keys())
    if missing or unknown:
        parts = [f"lack {len(missing)} of {len(flat)} parameters: {list_names(missing)}"] * bool(missing)
        parts += [f"hold {len(unknown)} that the model does not have: {list_names(unknown)}"] * bool(unknown)
        raise WeightsError("the new weights " + ", and ".join(parts), field="new_params")
    for name, spec in flat.items():
        _check_leaf(name, leaves[name], spec)
    for name, leaf in () if allow_nonfinite else leaves.items():
        if has_nonfinite(leaf) if isinstance(leaf, np.ndarray) else has_nonfinite_shard(leaf):
            raise nonfinite_error(name)
    return {name: leaves[name] for name in flat}


def _to_plain(new_params: Any) -> Any:
    nnx = sys.modules.get("flax.nnx")  # imported already if the caller has a State
    if nnx is None:
        return new_params
    if isinstance(new_params, nnx.Module):
        raise WeightsError("is an nnx.Module; pass nnx.state(module, nnx.Param)", field="new_params")
    return nnx.to_pure_dict(new_params) if isinstance(new_params, nnx.State) else new_params


def _walk(prefix: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yields (dotted path, leaf); list positions and integer keys are equal parts of a path."""
    if isinstance(node, Mapping):
        children = node.items()
    elif isinstance(node, list | tuple):
        children = enumerate(node)
    else:
        yield prefix, node
        return
    for key, child in children:
        if not isinstance(key, str | int):
            raise WeightsError(
                f"key {shorten(key)} under {prefix!r} is neither a name nor a position", field="new_params"
            )
        yield from _walk(f"{prefix}.{key}" if prefix else str(key), child)


def _check_leaf(name: str, leaf: Any, spec: ParamSpec) -> None:
    if not isinstance(leaf, np.ndarray | jax.Array):
        raise WeightsError(f"must be a numpy or JAX array, not {type(leaf).__name__}", field=name)
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise WeightsError("is a deleted array; it was donated to another computation", field=name)
    if leaf.shape != spec.shape:
        raise WeightsError(f"has shape {leaf.shape}, the model needs {spec.shape}", field=name, value=leaf.shape)
    known = list_castable(spec.dtype)
    if str(leaf.dtype) not in known:
        raise WeightsError(f"has dtype {leaf.dtype}; it must be one of {', '.join(known)}", field=name)
