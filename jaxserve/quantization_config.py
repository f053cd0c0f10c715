"""The option `quantization_config`: how weights are quantized while a checkpoint is read."""

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
ACTIVATIONS = ("fp8_per_token", "int8_per_token")
METHODS = ("fp8", "compressed-tensors", "gptq", "awq", "auto-round", "modelopt")
"""Those of quantized files. Of others, fp8 means fp8_per_tensor, as in vLLM."""

CHOICES = ("online", *SCHEMES, *METHODS)
SYNONYMS = {"gptq_marlin": "gptq", "awq_marlin": "awq"}
_FIELD = "quantization_config"
_KEYS = ("linear", "moe", "ignore")


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The scheme of projections and of experts, None for that of `quantization`; and modules that are left out.

    `activation` is how the rows that projections multiply are quantized, None for not at all.
    """

    linear: str | None = None
    moe: str | None = None
    activation: str | None = None
    ignore: frozenset[str] = frozenset()

    def to_dict(self) -> dict[str, Any]:
        """Returns the table that `read_quantization_config` makes this of, in values of JSON."""
        return {
            "linear": {"weight": self.linear, "activation": self.activation},
            "moe": {"weight": self.moe},
            "ignore": sorted(self.ignore),
        }


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
    linear, moe = (_read_part(value, key) for key in ("linear", "moe"))
    if moe.get("activation") is not None:
        message = f"{shorten(moe['activation'])} is not possible: activations keep the model's bits; leave it out"
        raise ConfigError(message, field=f"{_FIELD}.moe.activation", value=moe["activation"])
    return QuantizationConfig(linear.get("weight"), moe.get("weight"), linear.get("activation"), frozenset(ignore))


def _read_part(value: Mapping[str, Any], key: str) -> Mapping[str, str | None]:
    """Returns the schemes of the weights and the activations of a part."""
    part = value.get(key)
    part = {"weight": part} if part is None or isinstance(part, str) else part
    if not isinstance(part, Mapping) or not part.keys() <= {"weight", "activation"}:
        raise ConfigError(
            f"must be a scheme, or a table with weight and activation, got {shorten(part)}",
            field=f"{_FIELD}.{key}",
            value=part,
        )
    for name, known in (("weight", SCHEMES), ("activation", ACTIVATIONS)):
        if part.get(name) is not None and part[name] not in known:
            message = f"{shorten(part[name])} is not known; known are {', '.join(known)}"
            raise ConfigError(message, field=f"{_FIELD}.{key}.{name}", value=part[name])
    return part
