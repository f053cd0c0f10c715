"""Writes quantized checkpoints from the text of their formats, and what they mean in float32: for tests.

Nothing here is shared with what reads them: matrices are quantized, packed and expanded again value by value.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.core.weights.reader import open_checkpoint

_NAMES = {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "bfloat16": "BF16", "float16": "F16"}
_NAMES |= {"float32": "F32", "int8": "I8", "uint8": "U8", "int32": "I32", "int64": "I64"}
_PROJECTION = re.compile(
    r".*\.(\w+_proj|w[123]|kv_a_proj_with_mqa|q_[ab]_proj|kv_b_proj|\d+\.w[123]"
    r"|in_proj_(?:qkvz|qkv|z)|(?:in|out)put_linear)\.weight"
)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of 4-bit floats, by their lower three bits


@dataclass(frozen=True)
class Method:
    """A format: its `quantization_config`, and what makes a matrix [out, in] tensors by their names' ends.

    `quantize(weight, rng)` returns them and the matrix that they stand for.
    """

    config: Mapping[str, Any]
    quantize: Callable[[np.ndarray, np.random.Generator], tuple[dict[str, np.ndarray], np.ndarray]]


def write_quantized(source: Path, folder: Path, method: Method) -> tuple[Path, Path]:
    """Returns two checkpoints made of that in `source`: one quantized, one with the same numbers in float32."""
    checkpoint = open_checkpoint(source)
    quantized, expanded = {}, {}
    for name in sorted(checkpoint.names):
        tensor = np.array(checkpoint.read(name)).astype(np.float32)
        if _PROJECTION.fullmatch(name) and tensor.ndim == 2:
            layer = int(re.search(r"layers\.(\d+)", name)[1])
            parts, meant = method.quantize(tensor, np.random.default_rng(layer))
            quantized |= {f"{name.removesuffix('.weight')}.{part}": array for part, array in parts.items()}
            expanded[name] = meant.astype(np.float32)
        else:
            quantized[name] = expanded[name] = tensor
    for target, tensors, extra in (
        (folder / "quantized", quantized, {"quantization_config": dict(method.config)}),
        (folder / "expanded", expanded, {}),
    ):
        target.mkdir(parents=True)
        for file in source.glob("*.json"):
            if file.name not in ("config.json", "model.safetensors.index.json"):
                shutil.copy(file, target)
        config = json.loads((source / "config.json").read_text()) | extra
        (target / "config.json").write_text(json.dumps(config))
        write_file(target / "model.safetensors", tensors)
    return folder / "quantized", folder / "expanded"


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file; numpy's own writer does not know all dtypes."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": _NAMES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def fp8(rows: int | None, columns: int | None, scale: str, dtype: Any = np.float32, extra: str | None = None) -> Any:
    """Quantizes to 8-bit floats with a scale for each block of rows and columns; None for all of them."""

    def quantize(weight: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        del rng
        scales, spread = _block_scales(weight, rows, columns, 448.0, dtype)
        values = (weight / spread).astype(ml_dtypes.float8_e4m3fn)
        parts = {"weight": values, scale: scales}
        if extra is not None:
            parts[extra] = np.float32(0.5).reshape(())
        return parts, values.astype(np.float32) * spread

    return quantize


def int8(rows: int | None, *, zeros: bool = False) -> Any:
    """Quantizes to 8-bit integers by channel, or with one scale."""

    def quantize(weight: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        del rng
        scales, spread = _block_scales(weight, rows, None, 120.0, np.float32)
        shift = np.full(scales.shape, 7 if zeros else 0, np.int8)
        values = np.clip(np.round(weight / spread) + (7 if zeros else 0), -128, 127).astype(np.int8)
        parts = {"weight": values, "weight_scale": scales} | ({"weight_zero_point": shift} if zeros else {})
        return parts, (values.astype(np.float32) - (7 if zeros else 0)) * spread

    return quantize


def words(layout: str, bits: int, size: int | None, *, zeros: bool, offset: int = 0, ordered: bool = False) -> Any:
    """Quantizes to unsigned integers with zero points by group of columns, packed into words as `layout` does."""

    def quantize(weight: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        rows, columns = weight.shape
        group = np.arange(columns) // (size or columns)
        if ordered:
            group = group[np.random.default_rng(columns + rng.integers(100)).permutation(columns)]
        count, middle, most = int(group.max()) + 1, 2 ** (bits - 1), 2**bits - 1
        scales = np.stack([np.abs(weight[:, group == each]).max(axis=1) for each in range(count)], axis=1) / middle
        scales = (scales + 1e-3).astype(np.float16)
        points = np.full((rows, count), middle)
        if zeros:  # with both ends among them
            points = rng.integers(0, most + 1, (rows, count))
            points.flat[:2] = 0, most
        spread, shift = scales.astype(np.float32)[:, group], points[:, group]
        values = np.clip(np.round(weight / spread) + shift, 0, most).astype(np.int64)
        meant = (values - shift).astype(np.float32) * spread
        return _pack(layout, bits, values, scales, points, group, offset, zeros, ordered), meant

    return quantize


def float4(size: int, scale: str, *, values: str = "weight_packed", factor: str | None = None) -> Any:
    """Quantizes to 4-bit floats with a power of two for `size` columns, or with an 8-bit float times a `factor`."""

    def quantize(weight: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        rows, columns = weight.shape
        group = np.arange(columns) // size
        largest = np.stack([np.abs(weight[:, group == each]).max(axis=1) for each in range(group[-1] + 1)], axis=1)
        tensor, extra = np.float32(1), {}
        if factor is None:
            exponents = np.floor(np.log2(largest)) - 2
            scales, stored = 2.0**exponents, (exponents + 127).astype(np.uint8)
        else:
            tensor = np.float32(largest.max() / (6 * 448))
            scales = (largest / 6 / tensor).astype(ml_dtypes.float8_e4m3fn)
            scales[0, 0] = 0  # as of a group of very small numbers
            stored, scales = scales, scales.astype(np.float32)
            extra = {factor: tensor if factor.endswith("_2") else np.array([1 / tensor], np.float32)}
            tensor = tensor if factor.endswith("_2") else 1 / extra[factor][0]
        spread = (scales * tensor).astype(np.float32)[:, group]
        scaled = np.divide(weight, spread, out=rng.standard_normal((rows, columns)), where=spread > 0)
        codes = np.abs(np.abs(scaled)[..., None] - np.array(_MAGNITUDES)).argmin(-1)
        meant = (np.array(_MAGNITUDES)[codes] * np.sign(scaled)).astype(np.float32) * spread
        codes = (codes + 8 * (scaled < 0)).astype(np.uint8)
        return {values: codes[:, 0::2] | codes[:, 1::2] << 4, scale: stored} | extra, meant

    return quantize


def _block_scales(
    weight: np.ndarray, rows: int | None, columns: int | None, largest: float, dtype: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales as stored, and for each number of the matrix."""
    row_block = np.arange(weight.shape[0]) // (rows or weight.shape[0])
    column_block = np.arange(weight.shape[1]) // (columns or weight.shape[1])
    scales = np.zeros((row_block[-1] + 1, column_block[-1] + 1), np.float32)
    np.maximum.at(scales, (row_block[:, None], column_block[None, :]), np.abs(weight) / largest)
    if dtype == ml_dtypes.float8_e8m0fnu:
        scales = 2.0 ** np.ceil(np.log2(scales))
    stored = scales.astype(dtype)
    spread = stored.astype(np.float32)[row_block][:, column_block]
    stored = stored.reshape(()) if rows is None and columns is None else stored
    return stored, spread


def _pack(
    layout: str,
    bits: int,
    values: np.ndarray,
    scales: np.ndarray,
    points: np.ndarray,
    group: np.ndarray,
    offset: int,
    zeros: bool,
    ordered: bool,
) -> dict[str, np.ndarray]:
    if layout == "compressed":
        parts = {
            "weight_packed": _to_words(values, bits),
            "weight_scale": scales,
            "weight_shape": np.array(values.shape, np.int64),
        }
        parts |= {"weight_zero_point": _to_words(points.T, bits).T} if zeros else {}
        return parts | ({"weight_g_idx": group.astype(np.int32)} if ordered else {})
    if layout == "gptq":
        stored = (points.T - offset) % 2**bits
        parts = {"qweight": _to_words(values, bits).T, "scales": scales.T, "qzeros": _to_words(stored, bits)}
        return parts | {"g_idx": group.astype(np.int32)}
    by_place = [
        array.reshape(len(array), -1, 8)[..., _AWQ_ORDER].reshape(len(array), -1) for array in (values.T, points.T)
    ]
    return {"qweight": _to_words(by_place[0], bits), "scales": scales.T, "qzeros": _to_words(by_place[1], bits)}


def _to_words(values: np.ndarray, bits: int) -> np.ndarray:
    """Returns int32 words of consecutive values along the last axis, the first in the lowest bits."""
    per_word = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word))).reshape(len(values), -1, per_word)
    joined = sum(padded[..., place].astype(np.uint64) << np.uint64(bits * place) for place in range(per_word))
    return joined.astype(np.uint32).view(np.int32)


def compressed(form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs}
    ignore = ["lm_head", "re:.*mlp.gate$"]
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ignore}


def _ints(bits: int, size: int | None, **changes: Any) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if size is None else {"strategy": "group", "group_size": size}
    return {"num_bits": bits, "type": "int", "symmetric": True} | strategy | changes


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}
_GPTQ = {"quant_method": "gptq", "desc_act": False, "checkpoint_format": "gptq"}
_AWQ = {"quant_method": "awq", "version": "gemm", "zero_point": True, "bits": 4, "group_size": 8}
_AUTO = {"quant_method": "auto-round", "data_type": "int", "bits": 4, "group_size": 16}

BOTH_SIDES = "compressed int8 channels and activations"
"""The method whose products are not those of the matrix that its files stand for: rows are rounded, too."""

METHODS: dict[str, Method] = {
    "fp8 blocks": Method(_FP8 | {"weight_block_size": [16, 16]}, fp8(16, 16, "weight_scale_inv")),
    "fp8 blocks of powers of two": Method(
        _FP8 | {"weight_block_size": [16, 16]}, fp8(16, 16, "weight_scale_inv", ml_dtypes.float8_e8m0fnu)
    ),
    "fp8 tensors": Method(
        _FP8 | {"weight_block_size": None, "activation_scheme": "static"},
        fp8(None, None, "weight_scale_inv", ml_dtypes.bfloat16, extra="activation_scale"),
    ),
    "fp8 tensors, older name": Method(_FP8, fp8(None, None, "weight_scale", extra="input_scale")),
    "modelopt fp8": Method(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.mlp.gate"]},
        fp8(None, None, "weight_scale", extra="input_scale"),
    ),
    "compressed fp8 channels": Method(
        compressed("float-quantized", _FLOATS | {"strategy": "channel"}),
        fp8(1, None, "weight_scale", ml_dtypes.bfloat16),
    ),
    "compressed fp8 blocks": Method(
        compressed("float-quantized", _FLOATS | {"strategy": "block", "block_structure": [16, 8]}),
        fp8(16, 8, "weight_scale"),
    ),
    "compressed fp8, naive": Method(
        compressed("naive-quantized", _FLOATS | {"strategy": "tensor"}), fp8(None, None, "weight_scale")
    ),
    "compressed int8 channels": Method(compressed("int-quantized", _ints(8, None)), int8(1)),
    BOTH_SIDES: Method(
        compressed("int-quantized", _ints(8, None), {"num_bits": 8, "type": "int", "strategy": "token"}), int8(1)
    ),
    "compressed int8 tensors": Method(compressed("int-quantized", _ints(8, None, strategy="tensor")), int8(None)),
    "compressed int8 with zeros": Method(
        compressed("int-quantized", _ints(8, None, symmetric=False)), int8(1, zeros=True)
    ),
    "compressed words": Method(compressed("pack-quantized", _ints(4, 8)), words("compressed", 4, 8, zeros=False)),
    "compressed words with zeros": Method(
        compressed("pack-quantized", _ints(4, 16, symmetric=False)), words("compressed", 4, 16, zeros=True)
    ),
    "compressed words in order": Method(
        compressed("pack-quantized", _ints(4, 8, actorder="group")),
        words("compressed", 4, 8, zeros=False, ordered=True),
    ),
    "compressed words in an order, newer name": Method(
        compressed("pack-quantized", _ints(4, 8, actorder="dynamic")),
        words("compressed", 4, 8, zeros=False, ordered=True),
    ),
    "compressed words of 8 bits": Method(
        compressed("pack-quantized", _ints(8, None)), words("compressed", 8, None, zeros=False)
    ),
    "gptq": Method(_GPTQ | {"bits": 4, "group_size": 16, "sym": True}, words("gptq", 4, 16, zeros=False, offset=1)),
    "gptq with zeros": Method(
        _GPTQ | {"bits": 4, "group_size": 8, "sym": False}, words("gptq", 4, 8, zeros=True, offset=1)
    ),
    "gptq v2": Method(
        _GPTQ | {"bits": 4, "group_size": 8, "sym": False, "checkpoint_format": "gptq_v2"},
        words("gptq", 4, 8, zeros=True),
    ),
    "gptq in order": Method(
        _GPTQ | {"bits": 4, "group_size": 8, "sym": False, "desc_act": True},
        words("gptq", 4, 8, zeros=True, offset=1, ordered=True),
    ),
    "gptq of 8 bits": Method(
        _GPTQ | {"bits": 8, "group_size": -1, "sym": False}, words("gptq", 8, None, zeros=True, offset=1)
    ),
    "awq": Method(_AWQ, words("awq", 4, 8, zeros=True)),
    "auto-round": Method(
        _AUTO | {"sym": True, "packing_format": "auto_round:auto_gptq"}, words("gptq", 4, 16, zeros=False, offset=1)
    ),
    "auto-round as awq": Method(
        _AUTO | {"sym": False, "packing_format": "auto_round:auto_awq"}, words("awq", 4, 16, zeros=True)
    ),
    "compressed mxfp4": Method(
        compressed("mxfp4-pack-quantized", _FLOATS | {"num_bits": 4, "strategy": "group", "group_size": 32}),
        float4(32, "weight_scale"),
    ),
    "compressed nvfp4": Method(
        compressed("nvfp4-pack-quantized", _FLOATS | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}),
        float4(16, "weight_scale", factor="weight_global_scale"),
    ),
    "modelopt nvfp4": Method(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*.mlp.gate"]},
        float4(16, "weight_scale", values="weight", factor="weight_scale_2"),
    ),
}
