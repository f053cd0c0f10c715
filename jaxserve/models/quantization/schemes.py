"""Which matrices are quantized while a checkpoint of 16 or 32 bits is read, as its user asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxserve.errors import ConfigError, shorten
from jaxserve.models.base import DecoderConfig, Table
from jaxserve.models.quantization.float4 import MX_BLOCK
from jaxserve.models.quantization.formats import EVERY_MODULE, MatrixFormat, Quantization, Targets
from jaxserve.quantization_config import SCHEMES, QuantizationConfig

_FORMATS: Mapping[str, MatrixFormat] = {
    "fp8_per_tensor": MatrixFormat(None, "float8_e4m3fn", (None, None)),
    "fp8_per_channel": MatrixFormat(None, "float8_e4m3fn", (1, None)),
    "fp8_per_block": MatrixFormat(None, "float8_e4m3fn", (128, 128)),
    "int8_per_channel_weight_only": MatrixFormat(None, "int8", (1, None)),
    "mxfp4": MatrixFormat(None, "float4_e2m1fn", (1, MX_BLOCK), scale_dtype="bfloat16"),
    "int4_per_group_weight_only": MatrixFormat(None, "int4", (1, 32)),
}
assert _FORMATS.keys() == set(SCHEMES)
_EXPERTS = Targets(patterns=(r".*\.experts\..*",))


def choose_schemes(model: DecoderConfig, quantization: str | None, chosen: QuantizationConfig | None) -> DecoderConfig:
    """Returns the model with the quantization that the options ask for.

    Raises ConfigError if its files are quantized already, in another way than `quantization` names.
    """
    stored = model.quantization
    if quantization is None and chosen is None:
        return model
    if stored is not None:
        if chosen is None and quantization == stored.method:
            return model
        message = f"the checkpoint is quantized already, with {stored.method}; leave it out"
        field = "quantization" if chosen is None else "quantization_config"
        raise ConfigError(message, field=field, value=quantization)
    default = {"online": None, "fp8": "fp8_per_tensor"}.get(quantization or "online", quantization)
    if default is not None and default not in SCHEMES:
        message = f"the checkpoint is not quantized with {default}; to quantize it: {', '.join(SCHEMES)}"
        raise ConfigError(message, field="quantization", value=quantization)
    linear, moe = (default, default) if chosen is None else (chosen.linear or default, chosen.moe or default)
    rules = (
        (Targets(frozenset() if chosen is None else chosen.ignore), None),
        (_EXPERTS, None if moe is None else _FORMATS[moe]),
        (EVERY_MODULE, None if linear is None else _FORMATS[linear]),
    )
    method = linear if linear == moe or not model.has_experts else f"linear {linear}, moe {moe}"
    found = Quantization(method or "online", rules, while_loading=True)
    return dataclasses.replace(model, quantization=found)


def require_matches(table: Table, ignore: frozenset[str]) -> None:
    """Raises ConfigError for a name of modules to leave out that no module of the model has."""
    modules = {name.removesuffix(".weight") for each in table.values() for name in each.source.names}
    for name in sorted(ignore):
        if not any(Targets(frozenset([name])).match(module) for module in modules):
            message = f"{shorten(name)} is no module of the model; known are for example {min(modules)}"
            raise ConfigError(message, field="quantization_config.ignore", value=name)
