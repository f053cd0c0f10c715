"""Makes the table of a quantized model's parameters of the table that its family writes.

A matrix `qkv.weight` [..., K, N] whose modules are quantized alike becomes `qkv.weight.values` in the values' dtype,
`qkv.weight.scales` [..., G, N] float32 and, where there are any, `qkv.weight.zeros` [..., G, N] int8 and
`qkv.weight.order` [K] (pallas_kernels/quantized.py). The family's own function puts them together, as it only ever
moves rows of [out, in]. Consecutive K / G rows share a scale, and no group is cut between devices: where the size of
the files' groups does not divide what a device has, groups are smaller and repeat their scale.

Some matrices are expanded to the model's dtype while they are read: those that do not go through `linear` or the
experts' products as they are, and those whose modules are quantized in different ways.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import numpy as np

from jaxserve.errors import ConfigError, WeightsError
from jaxserve.models.base import HostArray, Parameter, ParamSpec, Table, WeightSource
from jaxserve.models.quantization.formats import MatrixFormat, Quantization
from jaxserve.models.quantization.packings import PACKINGS, Stored, decode
from jaxserve.sharding import DEFAULT_RULES

_EXPANDED = frozenset({"lm_head", "router", "shared_gate", "k_b", "v_b"})
_WEIGHT = ".weight"

UNREAD = (r".*\.(input_scale|activation_scale|weight_shape|g_idx|qzeros)",)
"""Patterns of tensors beside quantized matrices that are read only where a format needs them: scales of activations,
shapes, an order of columns that changes none, and zero points that are all the middle."""


def quantize_table(table: Table, quantization: Quantization) -> Table:
    """Returns the table of a quantized model. What is quantized while it is read has the source of the whole matrix."""
    list_params = _list_made if quantization.while_loading else _list_stored
    quantized: Table = {}
    for name, parameter in table.items():
        quantized |= list_params(name, parameter, quantization)
    return quantized


def find_scheme(name: str, parameter: Parameter, quantization: Quantization) -> MatrixFormat | None:
    """Returns the format that a parameter gets while it is read; None for one that stays as it is.

    A matrix stays if only some of the modules in it are left out.
    """
    if not _is_matrix(name, parameter.spec) or _leaf(name) in _EXPANDED:
        return None
    formats = {quantization.find_format(module) for module in _list_modules(parameter.source)}
    return formats.pop() if len(formats) == 1 else None


def _list_made(name: str, parameter: Parameter, quantization: Quantization) -> Table:
    form = find_scheme(name, parameter, quantization)
    if form is None:
        return {name: parameter}
    specs = _list_specs(name, parameter.spec, form, quantization)
    return {part: Parameter(spec, parameter.source) for part, spec in specs.items()}


def _list_stored(name: str, parameter: Parameter, quantization: Quantization) -> Table:
    source = _find_matrices(parameter.source) if _is_matrix(name, parameter.spec) else None
    formats = [] if source is None else [quantization.find_format(module) for module in _list_modules(source)]
    if source is None or not any(formats):
        return {name: parameter}
    if len(set(formats)) > 1 or _leaf(name) in _EXPANDED:
        return {name: Parameter(parameter.spec, _expand_source(source, formats))}
    return _list_parts(name, parameter.spec, source, formats[0], quantization)


def _is_matrix(name: str, spec: ParamSpec) -> bool:
    leaf = _leaf(name)
    return name.endswith(_WEIGHT) and len(spec.shape) > 1 and leaf != "embed" and "norm" not in leaf


def _leaf(name: str) -> str:
    return name.split(".")[-2]


def _find_matrices(source: WeightSource) -> WeightSource | None:
    """Returns the form in which a source is made of matrices [out, in] of modules, if it has one."""
    form: WeightSource | None = source
    while form is not None:
        if all(name.endswith(_WEIGHT) and len(shape) == 2 for name, shape in zip(form.names, form.shapes, strict=True)):
            return dataclasses.replace(form, otherwise=None)
        form = form.otherwise
    return None


def _list_modules(source: WeightSource) -> list[str]:
    return [name.removesuffix(_WEIGHT) for name in source.names]


def _list_specs(name: str, spec: ParamSpec, form: MatrixFormat, quantization: Quantization) -> dict[str, ParamSpec]:
    """Returns the parameters of a quantized matrix by name."""
    *lead, width, columns = spec.shape
    *_, row_axis, column_axis = spec.axes
    is_split = DEFAULT_RULES.spec((row_axis,))[0] is not None
    share = width // quantization.num_devices if is_split else width
    group = math.gcd(form.block[1] or share, share)
    groups = 1 if form.count_groups(width) == 1 else width // group
    axes = (*spec.axes[:-2], row_axis if groups > 1 else None, column_axis)
    specs = {
        "values": ParamSpec(spec.shape, quantization.hold(form.dtype), spec.axes, "values"),
        "scales": ParamSpec((*lead, groups, columns), "float32", axes, "scales"),
        "zeros": ParamSpec((*lead, groups, columns), "int8", axes, "zeros"),
        "order": ParamSpec((width,), "int32", (None,), "arange"),
    }
    return {f"{name}.{part}": specs[part] for part in _list_form_parts(form)}


def _list_parts(
    name: str, spec: ParamSpec, source: WeightSource, form: MatrixFormat, quantization: Quantization
) -> Table:
    """Returns the parameters of a matrix that files have quantized."""
    if form.ordered and ".experts." in name:
        message = "experts whose columns have an order of their own are not read; use files without one"
        raise ConfigError(message, field="quantization_config.desc_act", value=True)
    specs = _list_specs(name, spec, form, quantization)
    width, groups = spec.shape[-2], specs[f"{name}.scales"].shape[-2]

    def build_groups(*matrices: np.ndarray) -> HostArray:
        return source.build(*(_regroup(form, width, groups, matrix) for matrix in matrices))

    builds = {
        "values": source.build,
        "scales": build_groups,
        "zeros": build_groups,
        "order": partial(_merge_orders, _list_modules(source)[0]),
    }
    return {
        f"{name}.{part}": Parameter(specs[f"{name}.{part}"], _part_source(source, form, part, builds[part]))
        for part in _list_form_parts(form)
    }


def _part_source(source: WeightSource, form: MatrixFormat, part: str, build: Callable[..., HostArray]) -> WeightSource:
    """Returns the source of one part of all matrices; of values in an order of their own, that order is a part, too."""
    parts = ("values", "order") if part == "values" and form.ordered else (part,)
    made = _source_of(source, [(form, parts)] * len(source.names), partial(_build_part, build), shared=form.ordered)
    if part != "scales" or form.other_scale is None:
        return made
    other = dataclasses.replace(form, scale=form.other_scale, other_scale=None)
    return dataclasses.replace(made, otherwise=_part_source(source, other, part, build))


def _build_part(build: Callable[..., HostArray], *matrices: dict[str, np.ndarray]) -> HostArray:
    return build(*(_take_ordered(matrix) if "values" in matrix else next(iter(matrix.values())) for matrix in matrices))


def _take_ordered(matrix: dict[str, np.ndarray]) -> np.ndarray:
    return matrix["values"][:, matrix["order"]] if "order" in matrix else matrix["values"]


def _expand_source(source: WeightSource, formats: list[MatrixFormat | None]) -> WeightSource:
    """Returns the source of a parameter that is expanded to float32, or read as it is where files have no scales."""
    forms = [(form, () if form is None else _list_form_parts(form)) for form in formats]

    def build(*matrices: dict[str, np.ndarray]) -> HostArray:
        return source.build(*(_expand(form, matrix) for (form, _), matrix in zip(forms, matrices, strict=True)))

    return dataclasses.replace(_source_of(source, forms, build, shared=source.part), otherwise=source)


def _list_form_parts(form: MatrixFormat) -> tuple[str, ...]:
    return ("values", "scales") + ("zeros",) * form.zeros + ("order",) * form.ordered


def _source_of(
    source: WeightSource,
    forms: list[tuple[MatrixFormat | None, tuple[str, ...]]],
    build: Callable[..., HostArray],
    *,
    shared: bool,
) -> WeightSource:
    """Returns the source of some parts of the matrices of `source`; `build` takes each matrix as a dictionary."""
    stored: list[tuple[int, str, str, Stored]] = []
    for index, (module, shape, (form, parts)) in enumerate(
        zip(_list_modules(source), source.shapes, forms, strict=True)
    ):
        tensors = {} if form is None else PACKINGS[form.packing].tensors(form, *shape)
        plain = Stored("weight", shape, ("F32", "BF16", "F16"))
        for part in parts or ("weight",):
            stored.append((index, part, module, tensors.get(part, plain)))
    names = tuple(f"{module}.{tensor.name}" for _, _, module, tensor in stored)

    def build_decoded(*arrays: np.ndarray) -> HostArray:
        matrices: list[dict[str, np.ndarray]] = [{} for _ in source.names]
        for (index, part, _, _), name, array in zip(stored, names, arrays, strict=True):
            form = forms[index][0]
            decoded = array if form is None else decode(form, part, source.shapes[index], array, name)
            matrices[index][part] = decoded
        return build(*matrices)

    return dataclasses.replace(
        source,
        names=names,
        shapes=tuple(tensor.shape for *_, tensor in stored),
        build=build_decoded,
        dtypes=tuple(tensor.dtypes for *_, tensor in stored),
        part=shared,
    )


def _expand(form: MatrixFormat | None, matrix: dict[str, np.ndarray]) -> np.ndarray:
    """Returns a matrix [out, in] in float32."""
    if form is None:
        return matrix["weight"].astype(np.float32)
    values = _take_ordered(matrix).astype(np.float32)
    spread = partial(_regroup, form, values.shape[1], values.shape[1])
    values = (values - spread(matrix["zeros"]) if form.zeros else values) * spread(matrix["scales"])
    return values[:, np.argsort(matrix["order"])] if form.ordered else values


def _regroup(form: MatrixFormat, width: int, groups: int, per_group: np.ndarray) -> np.ndarray:
    """Returns numbers of the files' groups [out, g] as those of `groups` groups of equal size, each inside of one."""
    if per_group.shape[1] == groups:
        return per_group
    size = form.block[1] or width
    return per_group[:, np.arange(groups) * (width // groups) // size]


def _merge_orders(module: str, *orders: np.ndarray) -> np.ndarray:
    """Returns the order of modules that are one matrix here, and so must have the same."""
    if any(not np.array_equal(order, orders[0]) for order in orders):
        raise WeightsError("and those it is joined with have columns in different orders", field=module)
    return orders[0]
