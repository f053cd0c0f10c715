"""How weights are quantized while a checkpoint is read, as users say it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ConfigError, shorten

SCHEMES = (
    "fp8_per_tensor",
    "fp8_per_channel",
    "fp8_per_block",
    "mxfp4",
    "int8_per_channel_weight_only",
    "int4_per_group_weight_only",
)
METHODS = ("fp8", "compressed-tensors", "gptq", "awq", "auto-round", "modelopt")
"""Those of quantized files. Of others, fp8 means fp8_per_tensor, as in vLLM."""

CHOICES = ("online", *SCHEMES, *METHODS)
SYNONYMS = {"gptq_marlin": "gptq", "awq_marlin": "awq"}
_FIELD = "quantization_config"
_KEYS = ("linear", "moe", "ignore")


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The scheme of projections and of experts, None for that of `quantization`; and modules that are left out."""

    linear: str | None = None
    moe: str | None = None
    ignore: frozenset[str] = frozenset()


def read_quantization_config(value: Any) -> QuantizationConfig:
    """Returns the choice in a table like {"linear": {"weight": "fp8_per_block"}, "ignore": ["lm_head"]}.

    Raises ConfigError, naming the key.
    """
    if isinstance(value, QuantizationConfig):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"must be a table, got {shorten(value)}", field=_FIELD, value=value)
    for key in value:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"is unknown; known are {', '.join(_KEYS)}{hint}", field=f"{_FIELD}.{key}", value=key)
    ignore = value.get("ignore", ())
    if isinstance(ignore, str) or not all(isinstance(name, str) for name in ignore):
        raise ConfigError(f"must be a list of modules' names, got {shorten(ignore)}", field=f"{_FIELD}.ignore")
    return QuantizationConfig(_read_part(value, "linear"), _read_part(value, "moe"), frozenset(ignore))


def _read_part(value: Mapping[str, Any], key: str) -> str | None:
    """Returns the scheme of the weights of a part."""
    part = value.get(key)
    if part is None:
        return None
    if isinstance(part, str):
        part = {"weight": part}
    if not isinstance(part, Mapping) or not part.keys() <= {"weight", "activation"}:
        raise ConfigError(
            f"must be a scheme, or a table with weight and activation, got {shorten(part)}",
            field=f"{_FIELD}.{key}",
            value=part,
        )
    if part.get("activation") is not None:
        raise ConfigError(
            f"{shorten(part['activation'])} is not possible: activations keep the model's bits; leave it out",
            field=f"{_FIELD}.{key}.activation",
            value=part["activation"],
        )
    weight = part.get("weight")
    if weight is not None and weight not in SCHEMES:
        message = f"{shorten(weight)} is not known; known are {', '.join(SCHEMES)}"
        raise ConfigError(message, field=f"{_FIELD}.{key}.weight", value=weight)
    return weight
