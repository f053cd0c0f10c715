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
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from jaxserve.core.models.base import HostArray, Parameter, ParamSpec, Table, WeightSource
from jaxserve.core.models.layouts import Rows
from jaxserve.core.models.matrix_formats import MatrixFormat, Quantization
from jaxserve.core.sharding import DEFAULT_RULES
from jaxserve.errors import ConfigError, WeightsError
from jaxserve.features.quantization.packings import PACKINGS, Stored, StoredMatrix

_EXPANDED = frozenset({"lm_head", "router", "shared_gate", "k_b", "v_b", "ba"})
_WEIGHT = ".weight"

UNREAD = (r".*\.(input_scale|input_global_scale|activation_scale|weight_shape|g_idx|qzeros)",)
"""Patterns of tensors beside quantized matrices that are read only where a format needs them: scales of activations,
shapes, an order of columns that changes none, and zero points that are all the middle."""

EMPTY_BIASES = (r".*\.bias",)
"""Patterns of biases that GPTQ's files have beside matrices without one; they must be zeros."""


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
    if len(set(formats)) > 1 or _leaf(name) in _EXPANDED or quantization.expands(formats[0]):
        return {name: Parameter(parameter.spec, _expand_source(source, formats))}
    return _list_parts(name, parameter.spec, source, formats[0], quantization)


def _is_matrix(name: str, spec: ParamSpec) -> bool:
    leaf = _leaf(name)
    return name.endswith(_WEIGHT) and len(spec.shape) > 1 and not leaf.startswith("embed") and "norm" not in leaf


def _leaf(name: str) -> str:
    return name.split(".")[-2]


def _find_matrices(source: WeightSource) -> WeightSource | None:
    """Returns the form in which a source is made of matrices [out, in] of modules, or of stacks of them, if any."""
    form: WeightSource | None = source
    while form is not None:
        if all(name.endswith(_WEIGHT) for name in form.names) and min(map(len, form.shapes)) > 1:
            return dataclasses.replace(form, otherwise=None)
        form = form.otherwise
    return None


def _list_modules(source: WeightSource) -> list[str]:
    return [name.removesuffix(_WEIGHT) for name in source.names]


def count_groups(form: MatrixFormat, columns: int, num_devices: int = 1) -> int:
    """Returns in how many groups of equal size the columns of a matrix share a scale, when no device cuts one."""
    share = columns // num_devices
    size = math.gcd(form.block[1] or share, share)
    return 1 if form.count_groups(columns) == 1 else columns // size


def _list_specs(name: str, spec: ParamSpec, form: MatrixFormat, quantization: Quantization) -> dict[str, ParamSpec]:
    """Returns the parameters of a quantized matrix by name."""
    *lead, width, columns = spec.shape
    *_, row_axis, column_axis = spec.axes
    is_split = DEFAULT_RULES.spec((row_axis,))[0] is not None
    groups, piece = count_groups(form, width, quantization.num_devices if is_split else 1), spec.piece_axis
    axes = (*spec.axes[:-2], row_axis if groups > 1 else None, column_axis)
    specs = {
        "values": ParamSpec(spec.shape, quantization.hold(form.dtype), spec.axes, "values", piece),
        "scales": ParamSpec((*lead, groups, columns), form.scale_dtype, axes, "scales", piece),
        "zeros": ParamSpec((*lead, groups, columns), "int8", axes, "zeros", piece),
        "order": ParamSpec((width,), "int32", (None,), "arange"),
    }
    return {f"{name}.{part}": specs[part] for part in form.parts}


def _list_parts(
    name: str, spec: ParamSpec, source: WeightSource, form: MatrixFormat, quantization: Quantization
) -> Table:
    """Returns the parameters of a matrix that files have quantized."""
    if form.ordered and ".experts." in name:
        message = "experts whose columns have an order of their own are not read; use files without one"
        raise ConfigError(message, field="quantization_config.desc_act", value=True)
    specs = _list_specs(name, spec, form, quantization)
    groups = specs[f"{name}.scales"].shape[-2]
    readers: dict[str, Callable[[StoredMatrix], Rows]] = {
        "values": StoredMatrix.list_values,
        "scales": lambda matrix: matrix.list_scales(groups),
        "zeros": lambda matrix: matrix.list_zeros(groups),
    }

    def build(part: str, *matrices: StoredMatrix) -> HostArray:
        if part == "order":
            return _merge_orders(_list_modules(source)[0], matrices)
        return source.build(*(matrix.map(readers[part]) for matrix in matrices))

    return {
        f"{name}.{part}": Parameter(specs[f"{name}.{part}"], _part_source(source, form, part, partial(build, part)))
        for part in form.parts
    }


def _part_source(source: WeightSource, form: MatrixFormat, part: str, build: Callable[..., HostArray]) -> WeightSource:
    """Returns the source of one part of all matrices, with the tensors that it takes."""
    needed = {"values": ("order",) * form.ordered, "scales": ("factor",) * bool(form.factor)}.get(part, ())
    made = _source_of(source, [(form, (part, *needed))] * len(source.names), build, shared=form.ordered)
    if part != "scales" or form.other is None:
        return made
    return dataclasses.replace(made, otherwise=_part_source(source, form.other, part, build))


def _expand_source(source: WeightSource, formats: list[MatrixFormat | None]) -> WeightSource:
    """Returns the source of a parameter that is expanded, or read as it is where files have no scales."""
    parts = [("weight",) if form is None else (*form.parts, *("factor",) * bool(form.factor)) for form in formats]

    def build(*matrices: StoredMatrix) -> HostArray:
        return source.build(*(matrix.map(StoredMatrix.expand) for matrix in matrices))

    expanded = _source_of(source, list(zip(formats, parts, strict=True)), build, shared=source.part)
    others = [form if form is None or form.other is None else form.other for form in formats]
    return dataclasses.replace(expanded, otherwise=source if others == formats else _expand_source(source, others))


def _source_of(
    source: WeightSource,
    forms: list[tuple[MatrixFormat | None, tuple[str, ...]]],
    build: Callable[..., HostArray],
    *,
    shared: bool,
) -> WeightSource:
    """Returns the source of some parts of the matrices of `source`; `build` takes them as `StoredMatrix`."""
    stored: list[tuple[int, str, str, Stored]] = []
    for index, (module, shape, (form, parts)) in enumerate(
        zip(_list_modules(source), source.shapes, forms, strict=True)
    ):
        *lead, rows, columns = shape
        plain = {"weight": Stored("weight", (rows, columns), ("F32", "BF16", "F16"))}
        tensors = plain if form is None else PACKINGS[form.packing or ""].tensors(form, rows, columns)
        for part in parts:
            found = tensors[part]
            stored.append((index, part, found.name_in(module), found._replace(shape=(*lead, *found.shape))))

    def build_stored(*arrays: np.ndarray) -> HostArray:
        tensors: list[dict[str, tuple[str, np.ndarray]]] = [{} for _ in source.names]
        for (index, part, name, _), array in zip(stored, arrays, strict=True):
            tensors[index][part] = name, array
        matrices = zip(forms, source.shapes, tensors, strict=True)
        return build(*(StoredMatrix(form, shape, found) for (form, _), shape, found in matrices))

    return dataclasses.replace(
        source,
        names=tuple(name for _, _, name, _ in stored),
        shapes=tuple(tensor.shape for *_, tensor in stored),
        build=build_stored,
        dtypes=tuple(tensor.dtypes for *_, tensor in stored),
        part=shared,
    )


def _merge_orders(module: str, matrices: Sequence[StoredMatrix]) -> np.ndarray:
    """Returns the order of modules that are one matrix here, and so must have the same."""
    first, *others = (matrix.find_order() for matrix in matrices)
    if any(not np.array_equal(order, first) for order in others):
        raise WeightsError("and those it is joined with have columns in different orders", field=module)
    return first
