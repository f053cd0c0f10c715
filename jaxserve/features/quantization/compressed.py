"""Puts quantized matrices into the form of compressed-tensors' files: what packings.py reads, the other way round."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxserve.core.models.matrix_formats import MatrixFormat, Quantization
from jaxserve.errors import ConfigError

_BIAS = 127  # of the exponents of powers of two
_STORED = {  # by dtype: type and bits, and the file's format
    "float8_e4m3fn": ("float", 8, "float-quantized"),
    "float4_e2m1fn": ("float", 4, "mxfp4-pack-quantized"),
    "int8": ("int", 8, "int-quantized"),
    "int4": ("int", 4, "pack-quantized"),
}
_MIXED = "mixed-precision"
_EXPERTS = r"re:.*\.experts\..*"


def describe_quantization(quantization: Quantization, ignored: Collection[str]) -> dict[str, Any]:
    """Returns the `quantization_config` of files that are quantized as a checkpoint is while it is read.

    `ignored` are the names of all projections that stay as they are.
    """
    experts, others = (form for _, form in quantization.rules[1:])
    groups = {}
    if experts is not None and experts != others:
        groups["experts"] = _describe_group(experts, [_EXPERTS])
    if others is not None:
        groups["projections"] = _describe_group(others, ["Linear"])
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else _MIXED,
        "config_groups": groups,
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
    }


def _describe_group(form: MatrixFormat, targets: list[str]) -> dict[str, Any]:
    kind, bits, stored = _STORED[form.dtype]
    rows, columns = form.block
    weights: dict[str, Any] = {"type": kind, "num_bits": bits, "symmetric": True, "dynamic": False}
    if columns is None:
        weights["strategy"] = "tensor" if rows is None else "channel"
    elif rows == 1:
        weights |= {"strategy": "group", "group_size": columns}
    else:
        weights |= {"strategy": "block", "block_structure": [rows, columns]}
    inputs = {"type": kind, "num_bits": bits, "symmetric": True, "dynamic": True, "strategy": "token"}
    return {
        "targets": targets,
        "format": stored,
        "weights": weights,
        "input_activations": inputs if form.quantizes_rows else None,
        "output_activations": None,
    }


def require_fit(form: MatrixFormat, module: str, columns: int) -> None:
    """Raises ConfigError if a matrix of so many columns cannot be stored: in files all groups have one size."""
    size = form.block[1]
    if size is not None and form.block[0] == 1 and columns % size:
        message = f"{module} has {columns} columns, which are no multiple of the {size} that share a scale in files"
        raise ConfigError(f"{message}; leave it out with quantization_config.ignore", field="quantization")


def pack_matrix(form: MatrixFormat, values: np.ndarray, scales: np.ndarray) -> Mapping[str, np.ndarray]:
    """Returns the tensors of a module, by the ends of their names.

    `values` [in, out] and `scales` [G, out] are those of `quantize` (pallas_kernels/quantized.py).
    """
    values, scales = np.ascontiguousarray(values.T), _pick_scales(form, values.shape[0], scales)
    if form.dtype == "int4":
        words = _pack_words((values.astype(np.int8) + 8).view(np.uint8))
        return {"weight_packed": words, "weight_scale": scales, "weight_shape": np.array(values.shape, np.int64)}
    if form.dtype == "float4_e2m1fn":
        codes = values.view(np.uint8) & 15
        exponents = np.frexp(scales.astype(np.float32))[1] - 1 + _BIAS
        return {"weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": exponents.astype(np.uint8)}
    return {"weight": values, "weight_scale": scales}


def _pick_scales(form: MatrixFormat, columns: int, scales: np.ndarray) -> np.ndarray:
    """Returns one scale for each of the files' blocks, [blocks of rows, blocks of columns], or [1] for a matrix."""
    num_groups, num_rows = scales.shape
    rows = np.arange(0, num_rows, form.block[0] or num_rows)
    groups = np.arange(0, columns, form.block[1] or columns) * num_groups // columns
    picked = np.ascontiguousarray(scales[groups][:, rows].T)
    return picked.reshape(1) if form.block == (None, None) else picked


def _pack_words(values: np.ndarray) -> np.ndarray:
    """Returns int32 words of eight 4-bit values each, the first in the lowest bits; the last may lack some."""
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % 8)))
    return np.ascontiguousarray(values[:, 0::2] | values[:, 1::2] << 4).view("<i4")
