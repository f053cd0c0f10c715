"""The identity of an engine, as JSON: what two engines need equal to take the same steps.

Recordings, bundles and the agreement of several nodes compare it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax.sharding import Mesh

from jaxserve import __version__
from jaxserve.config import EngineConfig
from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.runtime.memory import CachePlan
from jaxserve.core.runtime.plan_codec import describe_fields
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.devices import find_devices
from jaxserve.options import list_options
from jaxserve.pooling_options import PoolerOverrides
from jaxserve.quantization_config import QuantizationConfig
from jaxserve.speculative_config import SpeculativeConfig

FORMAT = 1  # of the lines; goes up when their meaning changes (the fields of plans are compared by name)
# No step depends on these.
_LOCAL_OPTIONS = ("record_steps", "compilation_cache_dir", "bundle", "tokenizer", "generation_config")
_TABLES = (SpeculativeConfig, QuantizationConfig, PoolerOverrides)  # values of options that are tables


def describe_versions() -> dict[str, Any]:
    """Returns the versions, and the form of the calls by which steps are run."""
    versions = {"jaxserve": __version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    return {"recording": FORMAT, **versions, "plans": describe_fields()}


def describe_host() -> dict[str, Any]:
    """Returns the versions, the form of the calls and the kind of this host's devices; DeviceError: it has none."""
    find_devices()
    device = jax.local_devices()[0]
    return {**describe_versions(), "platform": device.platform, "device": device.device_kind}


def describe_mesh(mesh: Mesh) -> dict[str, Any]:
    """Returns the devices along each axis of the mesh."""
    return {"mesh": dict(mesh.shape)}


def describe_model(model: DecoderConfig) -> dict[str, Any]:
    """Returns the model's config as it is run."""
    return {"model": describe_value(model)}


def describe_value(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass as values of JSON: tuples and sets are lists, those of sets sorted."""
    return dict(json.loads(json.dumps(dataclasses.asdict(value), default=_list_set)))


def _list_set(value: object) -> list[Any]:
    if isinstance(value, frozenset):
        return sorted(value)  # two processes have the same set in two orders
    raise TypeError(f"{value!r} cannot be described as JSON")


def describe_engine(shapes: Shapes, plan: CachePlan, mesh: Mesh, all_params: Any, weights: str) -> dict[str, Any]:
    """Returns the header of a recording of this engine.

    Args:
        all_params: the runtime trees of the model and of the drafter, if there is one.
        weights: `digest_params` of both.
    """
    leaves = [leaf for params in all_params for leaf in jax.tree_util.tree_leaves_with_path(params)]
    names = [f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves]
    return {
        **describe_host(),
        **describe_mesh(mesh),
        **describe_model(shapes.model),
        "parameters": hashlib.sha256("\n".join(names).encode()).hexdigest()[:16],
        "weights": weights,
        "attention": shapes.impl,
        "buckets": [str(bucket) for bucket in shapes.buckets.buckets],
        "state": dataclasses.asdict(shapes.state),
        "num_pages": list(plan.num_pages),
        "num_snapshots": plan.num_snapshots,
        "options": list_chosen_options(shapes.config),
    }


def list_chosen_options(config: EngineConfig) -> dict[str, Any]:
    """Returns the options that steps depend on and that are not the defaults, by name."""
    given = _list_given(config)
    return {name: value for name, value in given.items() if name not in _LOCAL_OPTIONS}


def list_local_options(config: EngineConfig) -> dict[str, Any]:
    """Returns the other options that are not the defaults, by name, but for those of nodes and replicas."""
    given = _list_given(config)
    return {name: value for name, value in given.items() if name in _LOCAL_OPTIONS}


def _list_given(config: EngineConfig) -> dict[str, Any]:
    given = {}
    for section, option in list_options(EngineConfig):
        value = getattr(getattr(config, section), option.name)
        if section not in ("nodes", "replicas") and value != option.default:
            given[option.name] = value.to_dict() if isinstance(value, _TABLES) else value
    return given


def find_difference(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Returns (dotted name, recorded value, value here) of the first difference; None where `here` is as recorded.

    What only the recording has is not looked at: it may be compared later.
    """
    for name in here:
        value, other = here[name], recorded.get(name)
        if isinstance(value, Sequence) and isinstance(other, Sequence) and len(value) == len(other):
            value, other = _number_entries(value), _number_entries(other)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            inner = find_difference(other, value)
            if inner is not None:
                return f"{name}.{inner[0]}", *inner[1:]
        elif other != value:
            return name, other, value
    return None


def find_any_difference(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Returns what `find_difference` does, also for what only `recorded` has."""
    found = find_difference(recorded, here)
    if found is not None or (reverse := find_difference(here, recorded)) is None:
        return found
    name, value, other = reverse
    return name, other, value


def _number_entries(entries: Sequence[Any]) -> Any:
    """Returns a list of objects by number, and any other value as it is."""
    is_list = not isinstance(entries, str) and any(isinstance(entry, Mapping) for entry in entries)
    return {str(number): entry for number, entry in enumerate(entries)} if is_list else entries


def digest_params(params: Any) -> str:
    """Returns a digest of all values of a tree of parameters: 32 bits per array, computed where the arrays lie.

    It tells weights apart that differ by accident. It is not a cryptographic one. Where several nodes share an array,
    all must call this.
    """
    folded = jax.device_get([_fold(leaf) for leaf in jax.tree.leaves(params)])
    return hashlib.sha256(b"".join(int(each).to_bytes(4, "little") for each in folded)).hexdigest()[:16]


@jax.jit
def _fold(leaf: jax.Array) -> jax.Array:
    """Returns a uint32 scalar: a sum, modulo 2**32, of a hash of each value's bits and place.

    Such a sum does not depend on its order, so not on how the array is sharded either.
    """
    leaf = leaf.astype(jnp.int8) if leaf.dtype == jnp.int4 else leaf
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
    place, stride = jnp.zeros_like(bits), 1
    for axis in reversed(range(leaf.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= leaf.shape[axis]
    mixed = bits * jnp.uint32(0x9E3779B1) + place * jnp.uint32(0x85EBCA77)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE3D)
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)
