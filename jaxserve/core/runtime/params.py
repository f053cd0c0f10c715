"""Fills the runtime tree of parameters, and replaces them without a compilation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.core.layers.stack import LayerStack, get_leaf, list_stacked, set_leaf, write_layer
from jaxserve.core.models.base import ParamSpec
from jaxserve.core.runtime.converter import WeightConverter
from jaxserve.core.runtime.protocol import ParamUpdates
from jaxserve.core.sharding import AxisRules, send
from jaxserve.core.weights import Piece, make_dummy_params, place_parameter


class WeightWriter:
    """Replaces leaves of a runtime tree, one at a time.

    Stacked leaves, and those that come in pieces, are written in place by small programs. Of a matrix
    that a `converter` takes, what it makes is written.
    """

    def __init__(self, converter: WeightConverter, params: Mapping[str, Any] | None = None) -> None:
        """Compiles the programs that updates of `params` need, so that no update compiles anything."""
        self._converter = converter
        self._programs: dict[object, Any] = {}
        for leaf in [] if params is None else list_stacked(params):
            self._find_program(leaf, leaf.shape[1:])

    def write(self, params: dict[str, Any], updates: ParamUpdates) -> dict[str, Any]:
        """Returns the tree with `updates` (canonical dotted name, array); `params` must not be used afterwards.

        A value takes the dtype of the leaf it replaces. Values are copied: the caller may donate its arrays later, to a
        training step for example.
        """
        for name, value in self._list_parts(updates):
            old, index = get_leaf(params, name)
            if index is None:
                new = place_parameter(value, old.dtype, old.sharding, name=name)
            else:
                value_sharding = self._find_program(old, value.shape).input_shardings[0][1]
                new = self._write(old, index, place_parameter(value, old.dtype, value_sharding, name=name))
            params = set_leaf(params, name, new)
        return params

    def write_piece(self, params: dict[str, Any], piece: Piece) -> dict[str, Any]:
        """Returns the tree with a piece, whose array may become a leaf; `params` must not be used afterwards.

        A leaf that is still a spec is made when its first piece comes. May compile a program.
        """
        for name, array in self._converter.convert(piece.name, piece.array).items():
            leaf, index = get_leaf(params, name)
            if index is None and piece.count == 1:
                leaf = array
            else:
                leaf = _make_zeros(leaf, array.sharding) if isinstance(leaf, ParamSpec) else leaf
                leaf = self._write(leaf, index, array, piece.axis, piece.index)
            params = set_leaf(params, name, leaf)
        return params

    def _list_parts(self, updates: ParamUpdates) -> Iterator[tuple[str, Any]]:
        for name, value in updates.items():
            yield from self._converter.convert(name, value).items()

    def _write(self, leaf: jax.Array, index: int | None, value: jax.Array, axis: int = 0, piece: int = 0) -> jax.Array:
        """Returns a leaf, which must not be used afterwards, with a layer of a stack or a part of it replaced."""
        program = self._find_program(leaf, value.shape, axis)
        numbers = (np.int32(index or 0), np.int32(piece))
        return program(leaf, value, *send(numbers, program.input_shardings[0][2]))

    def _find_program(self, leaf: jax.Array, shape: tuple[int, ...], axis: int = 0) -> Any:
        kind = leaf.shape, str(leaf.dtype), leaf.format, shape, axis
        if kind not in self._programs:
            self._programs[kind] = _compile_write(leaf, shape, axis)
        return self._programs[kind]


def fill_params(
    specs: Mapping[str, Any], pieces: Iterable[Piece], converter: WeightConverter, *, mesh: Mesh, rules: AxisRules
) -> dict[str, Any]:
    """Returns the runtime tree of `specs` (stack_specs) with the arrays of `pieces`.

    Stacks are made once and filled in place, so devices hold the model and one piece at most. Stacking afterwards would
    hold a leaf of all layers twice, and the experts are most of a model.
    """
    layers = specs["layers"]
    if isinstance(layers, LayerStack):
        empty = jax.tree.map(lambda spec: dataclasses.replace(spec, init="zeros"), layers)
        layers = make_dummy_params(empty, mesh=mesh, rules=rules, seed=0)
    params = {**specs, "layers": layers}
    writer = WeightWriter(converter)
    for piece in pieces:
        params = writer.write_piece(params, piece)
        del piece  # before the next is made
    return params


def _make_zeros(spec: ParamSpec, sharding: jax.sharding.Sharding) -> jax.Array:
    return jnp.zeros(spec.shape, spec.dtype, device=sharding)


def _compile_write(leaf: jax.Array, shape: tuple[int, ...], axis: int) -> Any:
    """Returns `write_layer` for values of a shape, in place; of leaves without layers it writes a part.

    Each device writes its share of a piece into its share of the leaf.
    """
    is_stacked = leaf.ndim > len(shape)
    write = partial(write_layer if is_stacked else _write_part, axis=axis)
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
        value_spec, no_axes = PartitionSpec(*spec[1:]) if is_stacked else spec, PartitionSpec()
        write = jax.shard_map(
            write, mesh=sharding.mesh, in_specs=(spec, value_spec, no_axes, no_axes), out_specs=spec, check_vma=False
        )
        value_sharding, replicated = (NamedSharding(sharding.mesh, each) for each in (value_spec, no_axes))
    else:
        value_sharding = replicated = sharding
    value = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=value_sharding)
    index = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    written = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.format)
    return jax.jit(write, donate_argnums=0, out_shardings=leaf.format).lower(written, value, index, index).compile()


def _write_part(leaf: jax.Array, value: jax.Array, index: jax.Array, piece: jax.Array, *, axis: int) -> jax.Array:
    return write_layer(leaf[None], value, index, piece, axis=axis)[0]
