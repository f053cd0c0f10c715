"""Reads `quantization_config` of a config.json, one function for each method of quantization.

Keys that say how the file was made (calibration, damping, backends) are not looked at; those that say what its numbers
mean must have a value that is read here.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping

from jaxserve.core.models.hf_config import MODELOPT, QUANTIZATION_KEY
from jaxserve.core.models.matrix_formats import EVERY_MODULE, MatrixFormat, Quantization, Targets
from jaxserve.errors import ConfigError, shorten
from jaxserve.features.quantization.compressed_config import read_compressed
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

_OTHER_KEYS = ("compression_config", "quantization")  # of older compressed-tensors, of MLX
_METHOD_KEYS = ("quant_method", "quant_algo")
_FP8, _FP4 = "float8_e4m3fn", "float4_e2m1fn"
_POWERS = "bfloat16"  # of scales that are powers of two
_MODELOPT_NVFP4 = MatrixFormat("modelopt nvfp4", _FP4, (1, NV_BLOCK), "weight_scale", factor="weight_scale_2")
_MODELOPT = {  # by `quant_algo`
    "FP8": MatrixFormat("plain", _FP8, (None, None), "weight_scale", quantizes_rows=True),
    "NVFP4": _MODELOPT_NVFP4,
    "W4A16_NVFP4": _MODELOPT_NVFP4,
}
_MIXED = "MIXED_PRECISION"


def read_quantization(hf_config: Mapping[str, object], *, own: Collection[str] = ()) -> Quantization | None:
    """Returns what a config.json says about quantized weights; None if it says nothing.

    `own` are the methods that files of this family alone are written with. Raises ConfigError, naming key and value,
    for a method or a format that is not read.
    """
    for key in _OTHER_KEYS:
        if hf_config.get(key):
            raise quantized_error(_name_method(hf_config[key]), field=key, value=hf_config[key])
    settings = hf_config.get(QUANTIZATION_KEY)
    if not settings:
        return None
    method = MODELOPT if _is_by_modelopt(settings) else _name_method(settings)
    if not isinstance(settings, Mapping) or method not in _METHODS or (method in _OWN and method not in own):
        raise quantized_error(method, field=QUANTIZATION_KEY, value=settings)
    return Quantization(method, tuple(_METHODS[method](settings)))


def refuse_quantized(hf_config: Mapping[str, object]) -> None:
    """Raises ConfigError, naming the method, when a config.json says that its weights are quantized."""
    for key in (QUANTIZATION_KEY, *_OTHER_KEYS):
        if hf_config.get(key):
            message = f"quantized weights ({_name_method(hf_config[key])}) are not read here; use the unquantized"
            raise ConfigError(f"{message} repository", field=key, value=hf_config[key])


def quantized_error(method: str, *, field: str, value: object = None) -> ConfigError:
    """Returns the error for weights that are quantized with `method`, according to `field`."""
    known = ", ".join(name for name in _METHODS if name not in _OWN)
    message = f"quantized checkpoints ({method}) are not read; known are {known}, or use the unquantized repository"
    return ConfigError(message, field=field, value=value)


def _is_by_modelopt(settings: object) -> bool:
    """Whether ModelOpt wrote the settings, which early versions do not say as the method."""
    if not isinstance(settings, Mapping) or settings.get("quant_method") is not None:
        return False
    producer = settings.get("producer")
    return isinstance(producer, Mapping) and producer.get("name") == MODELOPT


def _name_method(settings: object) -> str:
    if not isinstance(settings, Mapping):
        return shorten(settings)
    named = [settings[key] for key in _METHOD_KEYS if isinstance(settings.get(key), str)]
    if named:
        return named[0][:40]
    return f"{shorten(settings['bits'])} bits" if settings.get("bits") else "no method named"


def _read_fp8(settings: Settings) -> Iterator[tuple[Targets, MatrixFormat | None]]:
    """Yields the rules of transformers' and DeepSeek's FP8."""
    require(settings, "fmt", "e4m3", _FP8, None)
    require(settings, "activation_scheme", "dynamic", "static", None)
    yield _list_names(settings, "modules_to_not_convert", "ignored_layers"), None
    block, rows = read_block(settings, "weight_block_size"), settings.get("activation_scheme") is not None
    form = MatrixFormat("plain", _FP8, block or (None, None), "weight_scale_inv", other_scale="weight_scale")
    yield EVERY_MODULE, dataclasses.replace(form, quantizes_rows=rows and block is None)


def _read_gptq(settings: Settings) -> Iterator[tuple[Targets, MatrixFormat | None]]:
    yield from _read_dynamic(settings)
    yield from _read_words(settings)


def _read_dynamic(settings: Settings) -> Iterator[tuple[Targets, MatrixFormat | None]]:
    """Yields GPTQModel's rules for single modules, of which those that leave modules out are read."""
    for pattern, rule in as_mapping(settings, "dynamic").items():
        if not pattern.startswith("-:"):
            raise refuse("dynamic", f"{shorten(pattern)}: {shorten(rule)}", "only rules that leave modules out (-:)")
        yield Targets(patterns=(check_pattern("dynamic", pattern[2:]),)), None


def _read_words(settings: Settings) -> Iterator[tuple[Targets, MatrixFormat | None]]:
    """Yields the rules of GPTQ's packing."""
    bits, size = _read_bits(settings), read_group_size(settings)
    ordered = bool(settings.get("desc_act")) and size is not None
    require(settings, "checkpoint_format", "gptq", "gptq_v2", None)
    offset = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    yield _list_names(settings, "modules_to_not_convert"), None
    form = MatrixFormat("gptq", f"int{bits}", (1, size), "scales", ordered=ordered)
    # files have zero points in either case, which are the middle of all values if these are symmetric
    form = dataclasses.replace(form, zeros=not settings.get("sym", True), zero_offset=offset)
    yield _read_blocks_to_quantize(settings), form


def _read_blocks_to_quantize(settings: Settings) -> Targets:
    """Returns the modules of GPTQ's `modules_in_block_to_quantize`, a list of lists; all without it."""
    listed = settings.get("modules_in_block_to_quantize")
    if listed is None:
        return EVERY_MODULE
    if not isinstance(listed, list) or not all(isinstance(names, list) for names in listed):
        raise refuse("modules_in_block_to_quantize", listed, "a list of lists of names")
    return Targets(names=frozenset(str(name) for names in listed for name in names))


def _read_awq(settings: Settings) -> Iterator[tuple[Targets, MatrixFormat | None]]:
    require(settings, "version", "gemm", "GEMM", None)
    require(settings, "bits", 4)
    yield _list_names(settings, "modules_to_not_convert"), None
    block, symmetric = (1, read_group_size(settings)), settings.get("sym", not settings.get("zero_point", True))
    yield EVERY_MODULE, MatrixFormat("awq", "int4", block, "scales", zeros=not symmetric)


def _read_auto_round(settings: Settings) -> Iterator[tuple[Targets, MatrixFormat | None]]:
    """Yields the rules of auto-round's files, which are packed as GPTQ's or as AWQ's."""
    require(settings, "data_type", "int", None)
    packing = settings.get("packing_format", "auto_round:auto_gptq")
    for module, rule in as_mapping(settings, "extra_config").items():
        if not isinstance(rule, Mapping) or rule.get("bits") not in (16, 32):
            raise refuse("extra_config", f"{module}: {shorten(rule)}", "only modules of 16 bits")
        yield Targets(names=frozenset([module])), None
    if packing in ("auto_round:auto_awq", "auto_round:awq"):
        yield from _read_awq({**settings, "version": None})
    elif packing in ("auto_round:auto_gptq", "auto_round:gptq"):
        yield from _read_words({**settings, "desc_act": False})
    else:
        raise refuse("packing_format", packing, "auto_round:auto_gptq and auto_round:auto_awq")


def _read_modelopt(settings: Settings) -> Iterator[tuple[Targets, MatrixFormat | None]]:
    """Yields the rules of ModelOpt's files, which may have different formats for named modules."""
    algorithm = settings.get("quant_algo")
    if algorithm != _MIXED and algorithm not in _MODELOPT:
        raise refuse("quant_algo", algorithm, f"{', '.join(_MODELOPT)} and {_MIXED}")
    for key in ("ignore", "exclude_modules"):
        yield _match_wildcards(as_names(settings, key)), None
    if algorithm != _MIXED:
        yield EVERY_MODULE, _MODELOPT[str(algorithm)]
        return
    for module, chosen in as_mapping(settings, "quantized_layers").items():
        algorithm = chosen.get("quant_algo") if isinstance(chosen, Mapping) else chosen
        if algorithm not in _MODELOPT:
            raise refuse(f"quantized_layers.{module}", chosen, " and ".join(_MODELOPT))
        yield _match_wildcards([module]), _MODELOPT[str(algorithm)]


def _read_mxfp4(settings: Settings) -> Iterator[tuple[Targets, MatrixFormat | None]]:
    """Yields the rules of gpt-oss's files, whose experts alone are quantized."""
    yield _match_wildcards(as_names(settings, "modules_to_not_convert")), None
    form = MatrixFormat("mxfp4 blocks", _FP4, (1, MX_BLOCK), scale_dtype=_POWERS)
    yield Targets(patterns=(r".*\.experts\.",)), form


def _read_bits(settings: Settings) -> int:
    bits = settings.get("bits", settings.get("w_bit"))
    if bits not in (4, 8) or isinstance(bits, bool):
        raise refuse("bits", bits, "4 and 8")
    return int(bits)


def _match_wildcards(names: Collection[str]) -> Targets:
    """Returns the targets that names with `*` mean, and what is below them."""
    return Targets(patterns=tuple(fnmatch.translate(each) for name in names for each in (name, f"{name}.*")))


def _list_names(settings: Settings, *keys: str) -> Targets:
    return Targets(frozenset(name for key in keys for name in as_names(settings, key)))


_METHODS: Mapping[str, Callable[[Settings], Iterator[tuple[Targets, MatrixFormat | None]]]] = {
    "fp8": _read_fp8,
    "compressed-tensors": read_compressed,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "auto-round": _read_auto_round,
    MODELOPT: _read_modelopt,
    "mxfp4": _read_mxfp4,
}
_OWN = ("mxfp4",)  # methods of single families
