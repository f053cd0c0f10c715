"""Reads `quantization_config` of compressed-tensors' files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from jaxserve.core.models.matrix_formats import EVERY_MODULE, MatrixFormat, Targets
from jaxserve.errors import shorten
from jaxserve.features.quantization.float4 import MX_BLOCK, NV_BLOCK
from jaxserve.features.quantization.settings import (
    Settings,
    as_mapping,
    as_names,
    check_pattern,
    read_block,
    read_group_size,
    refuse,
    require,
)

_FP8, _FP4 = "float8_e4m3fn", "float4_e2m1fn"
_KINDS = {_FP8: ("float", 8), _FP4: ("float", 4), "int8": ("int", 8), "int4": ("int", 4)}
_NVFP4 = MatrixFormat("nvfp4", _FP4, (1, NV_BLOCK), "weight_scale", factor="weight_global_scale", divides=True)
_COMPRESSED_FP4 = {
    "nvfp4-pack-quantized": _NVFP4,
    "mxfp4-pack-quantized": MatrixFormat("mxfp4", _FP4, (1, MX_BLOCK), "weight_scale", scale_dtype="bfloat16"),
}
_ORDERED, _IN_PLACE = (True, "group", "dynamic"), (None, False, "weight", "static")  # `actorder`


def read_compressed(settings: Settings) -> Iterator[tuple[Targets, MatrixFormat | None]]:
    """Yields the rules of compressed-tensors: what is ignored, then each group by its targets."""
    for key in ("sparsity_config", "transform_config"):
        chosen = as_mapping(settings, key)
        if chosen and chosen.get("format", "given") != "dense":
            raise refuse(key, chosen, "none")
    for ignored in _find_targets(settings, "ignore"):
        yield ignored, None
    groups = as_mapping(settings, "config_groups")
    if not groups and not as_mapping(settings, "kv_cache_scheme"):
        raise refuse("config_groups", settings.get("config_groups"), "at least one group, or a kv_cache_scheme,")
    forms = [_read_group(settings, name, group) for name, group in groups.items()]
    targets = [_find_targets(_as_group(name, group), "targets") for name, group in groups.items()]
    for of_kind in zip(*targets, strict=True):
        yield from zip(of_kind, forms, strict=True)


def _as_group(name: str, group: object) -> Settings:
    if not isinstance(group, Mapping):
        raise refuse(f"config_groups.{name}", group, "an object")
    return group


def _read_group(settings: Settings, name: str, group: object) -> MatrixFormat | None:
    """Returns the format of a group's weights; None if it quantizes others of their numbers alone."""
    field, group = f"config_groups.{name}", _as_group(name, group)
    if group.get("weights") is None:
        return None
    form = _read_group_format(field, group.get("format") or settings.get("format"), as_mapping(group, "weights"))
    inputs = as_mapping(group, "input_activations")
    rows = form.block[1] is None and (inputs.get("type"), inputs.get("num_bits")) == _KINDS.get(form.dtype)
    return dataclasses.replace(form, quantizes_rows=rows and not form.zeros)


def _read_group_format(field: str, stored: object, weights: Settings) -> MatrixFormat:
    """Returns the format of one group of modules."""
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    dtypes = {named: dtype for dtype, named in _KINDS.items()}
    if (kind, bits) not in dtypes:
        raise refuse(f"{field}.weights", f"{kind} of {shorten(bits)} bits", "int and float of 4 and 8 bits")
    dtype, symmetric = dtypes[kind, bits], weights.get("symmetric", True) is not False
    formats = {"pack-quantized": ("int4", "int8"), "int-quantized": ("int8",), "float-quantized": (_FP8,)}
    formats |= {"naive-quantized": ("int8", _FP8)} | dict.fromkeys(_COMPRESSED_FP4, (_FP4,))
    if dtype not in formats.get(str(stored), ()):
        raise refuse("format", stored, " and ".join(name for name, types in formats.items() if dtype in types))
    if kind == "float" and not symmetric:
        raise refuse(f"{field}.weights.symmetric", False, "true, as floats have no zero points")
    if dtype == _FP4:
        form = _COMPRESSED_FP4[str(stored)]
        require(weights, "group_size", form.block[1])
        return form
    block = _read_strategy(f"{field}.weights", weights)
    ordered = _read_order(f"{field}.weights.actorder", weights.get("actorder")) and block[1] is not None
    if stored != "pack-quantized":
        if ordered:
            raise refuse(f"{field}.weights.actorder", weights["actorder"], "none, or the format pack-quantized")
        return MatrixFormat("plain", dtype, block, "weight_scale", zeros=not symmetric)
    return MatrixFormat("compressed", dtype, (1, block[1]), "weight_scale", zeros=not symmetric, ordered=ordered)


def _read_order(field: str, order: object) -> bool:
    """Returns whether columns were quantized in an order that files have."""
    named = order.lower() if isinstance(order, str) else order
    if named not in (*_ORDERED, *_IN_PLACE):
        raise refuse(field, order, "group, dynamic, weight and static")
    return named in _ORDERED


def _read_strategy(field: str, weights: Settings) -> tuple[int | None, int | None]:
    """Returns the rows and the columns that share a scale."""
    strategy = weights.get("strategy") or ("tensor" if weights.get("group_size") is None else "group")
    if strategy == "block":
        block = read_block(weights, "block_structure")
        if block is not None:
            return block
    known = {"tensor": (None, None), "channel": (1, None)}
    if strategy == "group":
        known["group"] = (1, read_group_size(weights))
    if strategy not in known:
        raise refuse(f"{field}.strategy", strategy, "tensor, channel, group and block")
    return known[strategy]


def _find_targets(settings: Settings, key: str) -> tuple[Targets, Targets, Targets]:
    """Returns the modules that a list of compressed-tensors means, in the order in which they count.

    These are modules by their whole names, those of patterns ("re:..."), and those of a class ("Linear": all).
    """
    listed = as_names(settings, key)
    patterns = tuple(check_pattern(key, name[3:]) for name in listed if name.startswith("re:"))
    names = sorted(name for name in listed if not name.startswith("re:"))
    whole = rf"(?:{'|'.join(map(re.escape, names))})\Z"
    return (
        Targets(patterns=(whole,) if names else ()),
        Targets(patterns=patterns),
        EVERY_MODULE if "Linear" in names else Targets(),
    )
