"""Makes what a device holds of a matrix that files and updates have whole: a quantized one's parts, or a packed one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.core.layers.linear import PACKED
from jaxserve.core.models.base import DecoderConfig, ParamSpec
from jaxserve.core.models.matrix_formats import MatrixFormat
from jaxserve.core.sharding import AxisRules
from jaxserve.core.weights import place_parameter
from jaxserve.families.registry import list_packed, list_params, list_schemes
from pallas_kernels import QuantizedArray, quantize
from pallas_kernels.cpu.packing import pack


class WeightConverter:
    """Makes the parameters that a model has in a matrix' place, one matrix at a time, as they arrive in 16 or 32 bits.

    Its programs, one for each kind of matrix, are compiled here, but for those of pieces, which only loading brings. A
    matrix, or a piece of one, and what is made of it are on the devices together, so loading needs the model as it is
    held and one matrix more.
    """

    def __init__(self, model: DecoderConfig, mesh: Mesh, rules: AxisRules) -> None:
        schemes = list_schemes(model)
        params = list_params(model) if schemes else {}
        self._mesh, self._rules = mesh, rules
        self._kinds = {
            name: (spec, form, params[f"{name}.values"].spec, params[f"{name}.scales"].spec)
            for name, (spec, form) in schemes.items()
        }
        self._packed = list_packed(model)
        for kind in self._kinds.values():
            _compile(*kind, mesh, rules)
        for matrix in self._packed.values():
            _compile_packing(*matrix, mesh, rules)

    def convert(self, name: str, value: np.ndarray | jax.Array) -> Mapping[str, Any]:
        """Returns by dotted path what a matrix, or a piece of it, becomes; anything else as it is.

        `value` is not kept.
        """
        if name in self._packed:
            spec, transposed = self._packed[name]
            made = _compile_packing(spec, transposed, self._mesh, self._rules)(self._place(name, spec, value))
            return {f"{name}.{PACKED}": made}
        if name not in self._kinds:
            return {name: value}
        spec, *kind = self._kinds[name]
        spec = dataclasses.replace(spec, shape=value.shape)
        parts = _compile(spec, *kind, self._mesh, self._rules)(self._place(name, spec, value))
        return {f"{name}.values": parts.values, f"{name}.scales": parts.scales}

    def _place(self, name: str, spec: ParamSpec, value: np.ndarray | jax.Array) -> jax.Array:
        """Returns a whole matrix on its devices, in its dtype."""
        sharding = self._rules.sharding(self._mesh, spec.axes)
        is_placed = isinstance(value, jax.Array) and value.dtype == spec.dtype and value.sharding == sharding
        return value if is_placed else place_parameter(value, spec.dtype, sharding, name=name)


@functools.cache
def _compile(
    spec: ParamSpec, form: MatrixFormat, values: ParamSpec, scales: ParamSpec, mesh: Mesh, rules: AxisRules
) -> Any:
    places = QuantizedArray(*(rules.sharding(mesh, each.axes) for each in (values, scales)))  # type: ignore[arg-type]
    program = functools.partial(
        quantize,
        dtype=form.dtype,
        block=form.block,
        groups=scales.shape[-2],
        held=values.dtype,
        scale_dtype=scales.dtype,
    )
    return jax.jit(program, out_shardings=places).lower(_describe(spec, mesh, rules)).compile()


@functools.cache
def _compile_packing(spec: ParamSpec, transposed: bool, mesh: Mesh, rules: AxisRules) -> Any:
    program = jax.jit(functools.partial(pack, transposed=transposed), out_shardings=rules.sharding(mesh, ()))
    return program.lower(_describe(spec, mesh, rules)).compile()


def _describe(spec: ParamSpec, mesh: Mesh, rules: AxisRules) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=rules.sharding(mesh, spec.axes))
