"""Schemes that quantize a checkpoint of 16 or 32 bits while it is read: which matrices each takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxserve.core.models.base import DecoderConfig, Table
from jaxserve.core.models.matrix_formats import EVERY_MODULE, MatrixFormat, Quantization, Targets
from jaxserve.errors import ConfigError, shorten
from jaxserve.features.quantization.float4 import MX_BLOCK
from jaxserve.quantization_config import ACTIVATIONS, SCHEMES, QuantizationConfig

_FORMATS: Mapping[str, MatrixFormat] = {
    "fp8_per_tensor": MatrixFormat(None, "float8_e4m3fn", (None, None)),
    "fp8_per_channel": MatrixFormat(None, "float8_e4m3fn", (1, None)),
    "fp8_per_block": MatrixFormat(None, "float8_e4m3fn", (128, 128)),
    "int8_per_channel_weight_only": MatrixFormat(None, "int8", (1, None)),
    "mxfp4": MatrixFormat(None, "float4_e2m1fn", (1, MX_BLOCK), scale_dtype="bfloat16"),
    "int4_per_group_weight_only": MatrixFormat(None, "int4", (1, 32)),
}
_ACTIVATIONS = {"fp8_per_token": "float8_e4m3fn", "int8_per_token": "int8"}
assert _FORMATS.keys() == set(SCHEMES) and _ACTIVATIONS.keys() == set(ACTIVATIONS)
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
    chosen = chosen or QuantizationConfig()
    linear, moe = chosen.linear or default, chosen.moe or default
    if chosen.activation is not None and linear is None:
        message = f"{chosen.activation} needs a scheme for the weights, too: quantization_config.linear.weight"
        raise ConfigError(message, field="quantization_config.linear.activation", value=chosen.activation)
    rules = (
        (Targets(chosen.ignore), None),
        (_EXPERTS, None if moe is None else _FORMATS[moe]),
        (EVERY_MODULE, None if linear is None else _with_rows(linear, chosen.activation)),
    )
    method = linear if linear == moe or not model.has_experts else f"linear {linear}, moe {moe}"
    found = Quantization(method or "online", rules, while_loading=True)
    return dataclasses.replace(model, quantization=found)


def _with_rows(scheme: str, activation: str | None) -> MatrixFormat:
    """Returns a scheme's format, for products with rows that are quantized as `activation` says.

    Raises ConfigError if they would be of another type than the matrix, or its columns have several scales.
    """
    form = _FORMATS[scheme]
    if activation is None:
        return form
    if form.block[1] is not None or _ACTIVATIONS[activation] != form.dtype:
        fit = [name for name, each in _FORMATS.items() if each.block[1] is None]
        fit = [name for name in fit if _FORMATS[name].dtype == _ACTIVATIONS[activation]]
        message = f"{activation} does not go with {scheme}; it goes with {' and '.join(fit)}"
        raise ConfigError(message, field="quantization_config.linear.activation", value=activation)
    return dataclasses.replace(form, quantizes_rows=True)


def require_matches(table: Table, ignore: frozenset[str]) -> None:
    """Raises ConfigError for a name of modules to leave out that no module of the model has."""
    modules = {name.removesuffix(".weight") for each in table.values() for name in each.source.names}
    for name in sorted(ignore):
        if not any(Targets(frozenset([name])).match(module) for module in modules):
            message = f"{shorten(name)} is no module of the model; known are for example {min(modules)}"
            raise ConfigError(message, field="quantization_config.ignore", value=name)
