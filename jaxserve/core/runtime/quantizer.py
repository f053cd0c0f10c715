"""Quantizes matrices on the devices, one at a time, as they arrive in 16 or 32 bits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.core.models.base import DecoderConfig, ParamSpec
from jaxserve.core.models.matrix_formats import MatrixFormat
from jaxserve.core.sharding import AxisRules
from jaxserve.core.weights import place_parameter
from jaxserve.families.registry import list_params, list_schemes
from pallas_kernels import QuantizedArray, quantize


class WeightQuantizer:
    """Makes the parts of a quantized matrix of the whole one.

    Its programs, one for each kind of matrix, are compiled here, but for those of pieces, which only loading brings. A
    matrix, or a piece of one, and its parts are on the devices together, so loading needs the quantized model and one
    of those in 16 or 32 bits.
    """

    def __init__(self, model: DecoderConfig, mesh: Mesh, rules: AxisRules) -> None:
        schemes = list_schemes(model)
        params = list_params(model) if schemes else {}
        self._mesh, self._rules = mesh, rules
        self._kinds = {
            name: (spec, form, params[f"{name}.values"].spec, params[f"{name}.scales"].spec)
            for name, (spec, form) in schemes.items()
        }
        for kind in self._kinds.values():
            _compile(*kind, mesh, rules)

    def split(self, name: str, value: np.ndarray | jax.Array) -> Mapping[str, Any]:
        """Returns the parts of a matrix, or of a piece of it, by dotted path; anything else as it is.

        `value` is not kept.
        """
        if name not in self._kinds:
            return {name: value}
        spec, *kind = self._kinds[name]
        spec = dataclasses.replace(spec, shape=value.shape)
        sharding = self._rules.sharding(self._mesh, spec.axes)
        is_placed = isinstance(value, jax.Array) and value.dtype == spec.dtype and value.sharding == sharding
        array = value if is_placed else place_parameter(value, spec.dtype, sharding, name=name)
        made = _compile(spec, *kind, self._mesh, self._rules)(array)
        return {f"{name}.values": made.values, f"{name}.scales": made.scales}


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
    matrix = jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=rules.sharding(mesh, spec.axes))
    return jax.jit(program, out_shardings=places).lower(matrix).compile()
