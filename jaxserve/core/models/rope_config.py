"""Reads the rotary embedding from config.json, in every form that checkpoints use.

Transformers 5 writes one object `rope_parameters` (Gemma 3: one per layer type). Older files have `rope_theta` and
`rope_scaling`; the oldest call the type "type".
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from jaxserve.core.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    Scaling,
    YarnScaling,
)
from jaxserve.core.models.hf_config import HFConfig, check_integer, check_number
from jaxserve.errors import ConfigError, shorten

_log = logging.getLogger(__name__)

_DEFAULT_THETA = 10000.0

# Keys that the object of any type may hold (the trained length is read by some types only), and each type's own.
_SHARED_KEYS = frozenset(
    {"type", "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "finetuned"}
    | {"mrope_section", "mrope_interleaved"}  # of models that read images
)
_TYPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
    "proportional": {"factor"},
}


def rope_parameters(config: HFConfig) -> dict[str, object]:
    """Returns the rope object of a file in either form, completed by the keys beside it.

    As in the reference implementation, a non-empty `rope_scaling` takes the place of `rope_parameters`.
    """
    old, new = config.mapping("rope_scaling"), config.mapping("rope_parameters")
    parameters = dict(old or new)
    for key in ("rope_theta", "partial_rotary_factor"):
        if parameters.get(key) is None:
            parameters[key] = config.get(key)
    return parameters


def parse_rope(
    parameters: Mapping[str, object], *, head_dim: int, max_position_embeddings: int, partial: bool = False
) -> RopeConfig:
    """Returns the rotary embedding of a rope object; with `partial` it may rotate only a part of each head.

    Keys of other types are ignored with a warning, as in the reference. Raises ConfigError for an unknown type, a key
    that no type has, and a value that is missing or out of range.
    """
    kind = _rope_type(parameters)
    _check_keys(parameters, kind)
    share = check_number("partial_rotary_factor", _value(parameters, "partial_rotary_factor", 1.0))
    scales_share = kind == "proportional" and share <= 1.0
    if share != 1.0 and not scales_share and (not partial or share > 1.0):
        raise ConfigError(f"{share} is not supported here, only 1", field="partial_rotary_factor", value=share)
    rotary_dim = head_dim if scales_share else int(head_dim * share)
    if rotary_dim % 2 or rotary_dim < 2:
        raise ConfigError(
            f"rotation needs an even number of dimensions, not {rotary_dim}", field="head_dim", value=head_dim
        )
    theta = check_number("rope_theta", _value(parameters, "rope_theta", _DEFAULT_THETA))
    if theta <= 1.0:
        raise ConfigError(f"must be above 1, not {theta}", field="rope_theta", value=theta)
    scaling = _parse_scaling(parameters, kind, rotary_dim, max_position_embeddings)
    return RopeConfig(rotary_dim=rotary_dim, theta=theta, scaling=scaling, sections=_read_sections(parameters))


def _read_sections(parameters: Mapping[str, object]) -> tuple[int, int, int] | None:
    """Returns how many frequencies rotate by each of an image's three positions; None where they do not take turns.

    Texts need none of it, and models where frequencies lie in blocks are served as text.
    """
    given = parameters.get("mrope_section")
    if given is None or not parameters.get("mrope_interleaved"):
        return None
    if not isinstance(given, list | tuple) or len(given) != 3:
        raise ConfigError(f"must be three numbers, not {shorten(given)}", field="mrope_section", value=given)
    frames, rows, columns = (check_integer("mrope_section", size, minimum=0) for size in given)
    return frames, rows, columns


def _rope_type(parameters: Mapping[str, object]) -> str:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if not isinstance(kind, str) or kind not in _TYPE_KEYS:
        raise ConfigError(
            f"{shorten(kind)} is not supported; known are {', '.join(sorted(_TYPE_KEYS))}",
            field="rope_type",
            value=kind,
        )
    return kind


def _check_keys(parameters: Mapping[str, object], kind: str) -> None:
    own = ", ".join(sorted(_TYPE_KEYS[kind])) or "none"
    foreign = [key for key, value in parameters.items() if value is not None and key not in _SHARED_KEYS]
    foreign = [key for key in foreign if key not in _TYPE_KEYS[kind]]
    for key in foreign:
        if not any(key in keys for keys in _TYPE_KEYS.values()):
            raise ConfigError(
                f"is not a parameter of rope type {kind!r}, which has {own}", field=f"rope_parameters.{key}"
            )
    if foreign:
        _log.warning(
            "config.json: rope type %r has no %s, which is ignored; its parameters are %s",
            kind,
            ", ".join(foreign),
            own,
        )


def _parse_scaling(
    parameters: Mapping[str, object], kind: str, rotary_dim: int, max_position_embeddings: int
) -> Scaling | None:
    original = check_integer(
        "original_max_position_embeddings",
        _value(parameters, "original_max_position_embeddings", max_position_embeddings),
        minimum=1 if kind in ("default", "linear", "dynamic") else 2,  # formulas divide by its logarithm
    )
    match kind:
        case "linear":
            return LinearScaling(factor=_number(parameters, "factor"))
        case "dynamic":  # grows from the trained length, whatever `original_max_position_embeddings` says
            if rotary_dim <= 2:  # the formula's exponent is rotary_dim / (rotary_dim - 2)
                raise ConfigError("dynamic scaling needs more than 2 dimensions", field="head_dim", value=rotary_dim)
            return DynamicScaling(factor=_number(parameters, "factor"), trained_length=max_position_embeddings)
        case "llama3":
            low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
            if high <= low:
                raise ConfigError(f"must exceed low_freq_factor {low}", field="high_freq_factor", value=high)
            return Llama3Scaling(
                factor=_number(parameters, "factor"),
                trained_length=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )
        case "yarn":
            factor = _number(parameters, "factor", max_position_embeddings / original)
            return YarnScaling(
                factor=factor,
                trained_length=original,
                attention_factor=_yarn_attention_factor(parameters, factor),
                beta_fast=_number(parameters, "beta_fast", 32.0),
                beta_slow=_number(parameters, "beta_slow", 1.0),
                truncate=parameters.get("truncate") is not False,
            )
        case "longrope":
            return LongRopeScaling(
                trained_length=original,
                attention_factor=_longrope_attention_factor(parameters, max_position_embeddings, original),
                short_factor=_factors(parameters, "short_factor", rotary_dim // 2),
                long_factor=_factors(parameters, "long_factor", rotary_dim // 2),
            )
        case _:
            return _parse_proportional(parameters) if kind == "proportional" else None


def _parse_proportional(parameters: Mapping[str, object]) -> ProportionalScaling:
    return ProportionalScaling(_number(parameters, "partial_rotary_factor", 1.0), _number(parameters, "factor", 1.0))


def _yarn_attention_factor(parameters: Mapping[str, object], factor: float) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return temperature(_number(parameters, "mscale")) / temperature(_number(parameters, "mscale_all_dim"))
    return temperature(1.0)


def _longrope_attention_factor(parameters: Mapping[str, object], max_position_embeddings: int, original: int) -> float:
    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")
    factor = _number(parameters, "factor", max_position_embeddings / original)
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))


def _value(parameters: Mapping[str, object], key: str, default: object) -> object:
    value = parameters.get(key)
    return default if value is None else value


def _number(parameters: Mapping[str, object], key: str, default: float | None = None) -> float:
    value = parameters.get(key)
    if not value and default is not None:  # to the reference both null and 0 mean "not given"
        return default
    return check_number(f"rope_parameters.{key}", value)


def _factors(parameters: Mapping[str, object], key: str, count: int) -> tuple[float, ...]:
    values = parameters.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise ConfigError(
            f"must be a list of {count} numbers (half the rotated dimensions), not {shorten(values)}",
            field=f"rope_parameters.{key}",
            value=values,
        )
    return tuple(check_number(f"rope_parameters.{key}", value) for value in values)
