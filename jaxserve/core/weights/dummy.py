"""Random parameters made on the device, for benchmarks and tests that need a model's size but not its weights."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxserve.core.models.base import ParamSpec
from jaxserve.core.sharding import AxisRules
from jaxserve.core.weights.paths import flatten_specs

# The usual initial scale of published decoders: unit-variance inputs give logits of magnitude about 0.02 * sqrt(D).
_STANDARD_DEVIATION = 0.02
_VALUE_SCALE = _STANDARD_DEVIATION / 3  # quantized values then fill four bits
_BOUND = 8  # on both sides of zero


def make_dummy_params(specs: Any, *, mesh: Mesh, rules: AxisRules, seed: int) -> Any:
    """Returns the tree of `specs` (any tree of ParamSpec) with each array filled according to its `init`.

    "normal" has mean 0 and standard deviation 0.02. Values depend on `seed` (any integer), the dotted path and the
    shape, not on the mesh. Nothing passes through the host; one small program is compiled for each distinct spec.
    Raises ValueError for an unknown `init`.
    """
    _, treedef = flatten_specs(specs)
    return treedef.unflatten([array for _, array in stream_dummy_params(specs, mesh=mesh, rules=rules, seed=seed)])


def stream_dummy_params(specs: Any, *, mesh: Mesh, rules: AxisRules, seed: int) -> Iterator[tuple[str, jax.Array]]:
    """Yields (dotted path, array) for each parameter of `make_dummy_params`."""
    programs: dict[ParamSpec, Callable[..., jax.Array]] = {}
    for name, spec in flatten_specs(specs)[0].items():
        if spec not in programs:
            programs[spec] = jax.jit(
                partial(_initialise, spec), out_shardings=rules.placement(mesh, spec.axes, spec.shape)
            )
        yield name, programs[spec](np.uint32(zlib.crc32(f"{seed}:{name}".encode())))


def _initialise(spec: ParamSpec, stream: jax.Array) -> jax.Array:
    match spec.init:
        case "zeros" | "ones":
            return jnp.full(spec.shape, spec.init == "ones", spec.dtype)
        case "normal":
            return _normal(spec.shape, stream).astype(spec.dtype)
        case "values":
            return jnp.clip(jnp.round(_normal(spec.shape, stream) / _VALUE_SCALE), -8, 7).astype(spec.dtype)
        case "scales":
            return jnp.full(spec.shape, _VALUE_SCALE, spec.dtype)
        case "arange":
            return jnp.arange(spec.shape[-1], dtype=spec.dtype) * jnp.ones(spec.shape, spec.dtype)
        case "bounds":
            sides = lax.broadcasted_iota(jnp.int32, spec.shape, int(spec.axes[0] == "layers"))
            return ((2 * sides - 1) * _BOUND).astype(spec.dtype)
        case _:
            raise ValueError(f"init: {spec.init!r} is not one of ParamSpec's")


def _normal(shape: tuple[int, ...], stream: jax.Array) -> jax.Array:
    """Returns float32 normal numbers that depend on stream and position alone, so that XLA fuses all of it.

    `jax.random.normal` takes 16 bytes of temporaries per element: 8 GB for the embedding of an 8B model.
    """
    index = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, axis)
    return _to_normal(_mix(_mix(index) ^ stream))


def _to_normal(bits: jax.Array) -> jax.Array:
    # 23 bits plus one half are exact in float32, so -1 and 1, where erf_inv is infinite, are never reached
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2**-22 - 1
    return lax.erf_inv(uniform) * (math.sqrt(2) * _STANDARD_DEVIATION)


def _mix(word: jax.Array) -> jax.Array:
    """The 32-bit finaliser of MurmurHash3: each input bit flips each output bit about half the time."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
