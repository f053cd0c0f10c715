"""The options that say whether a model makes embeddings, and how, by vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jaxserve.errors import ConfigError, shorten
from jaxserve.options import check_choices, option

PoolingType = Literal["LAST", "CLS", "MEAN", "MAX", "MEAN_SQRT", "WEIGHTED_MEAN", "ALL"]
"""The token that stands for its text, the last or the first, or the mean of all (vLLM's names).

Beside these, those of sentence-transformers: the largest of each number, the sum divided by the square root of the
length, and the mean in which a token weighs as much as its position, from 1. ALL: each token has a vector of its own.
"""

ONE_TOKEN = frozenset({"LAST", "CLS"})
"""The types that read one token of a text."""

_FIELD = "pooler_config"
_KEYS = ("pooling_type", "use_activation", "dimensions", "logit_mean", "logit_sigma")
_MOST = 1e6  # a number of a class stays finite behind any allowed calibration
_INSTEAD = {
    "task": "; a vector for each token is pooling_type ALL",
    "seq_pooling_type": "; give pooling_type",
    "tok_pooling_type": "; give pooling_type",
    "logit_bias": "; give logit_mean",
    "logit_scale": "; give logit_sigma, which is 1 / logit_scale",
}
"""What to give in place of vLLM's other keys."""


@dataclass(frozen=True, slots=True)
class PoolerOverrides:
    """What `pooler_config` says in place of a model's own files; None: nothing."""

    pooling_type: PoolingType | None = None
    use_activation: bool | None = None  # whether vectors have length 1, and classes go through their activation
    dimensions: int | None = None  # of the vectors, in front of their division by their length
    # Numbers of classes x become (x - logit_mean) / logit_sigma, in front of the activation (Platt scaling).
    logit_mean: float | None = None
    logit_sigma: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the table that `read_pooler_config` makes this of."""
        return {key: value for key in _KEYS if (value := getattr(self, key)) is not None}


def read_pooler_config(value: Any) -> PoolerOverrides | None:
    """Returns the choices in a table like {"pooling_type": "MEAN"}, None if it is empty; ConfigError names the key."""
    if isinstance(value, PoolerOverrides):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"must be a table, got {shorten(value)}", field=_FIELD, value=value)
    found = {key: each for key, each in value.items() if each is not None}
    unknown = [key for key in found if key not in _KEYS]
    if unknown:
        message = f"is not read; known are {', '.join(_KEYS)}{_INSTEAD.get(unknown[0], '')}"
        raise ConfigError(message, field=f"{_FIELD}.{unknown[0]}", value=found[unknown[0]])
    _check("pooling_type", found, found.get("pooling_type") in get_args(PoolingType), ", ".join(get_args(PoolingType)))
    _check("use_activation", found, isinstance(found.get("use_activation"), bool), "true, false")
    dimensions = found.get("dimensions")
    is_count = isinstance(dimensions, int) and not isinstance(dimensions, bool) and dimensions >= 1
    _check("dimensions", found, is_count, "an integer of at least 1")
    for key, least in (("logit_mean", 0.0), ("logit_sigma", 1e-6)):
        number = found.get(key)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        is_right = is_number and least <= abs(number) <= _MOST
        _check(key, found, is_right, f"numbers of a size from {least:g} to {_MOST:g}")
    return PoolerOverrides(**found) if found else None


def _check(key: str, found: Mapping[str, Any], is_right: bool, known: str) -> None:
    if key in found and not is_right:
        message = f"{shorten(found[key])} is not supported; known are {known}"
        raise ConfigError(message, field=f"{_FIELD}.{key}", value=found[key])


@dataclass(frozen=True, slots=True)
class PoolingOptions:
    """Whether a model makes embeddings only, and how it makes them."""

    runner: str = option(
        "auto",
        "pooling: embeddings or classes only; generate: answers, and embeddings beside them; auto: pooling if the "
        "model's files say how embeddings are made, or have no head that generates",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = option(
        "auto",
        "embed: as runner=pooling; classify: the same, of a model with classes; none: a model with a head generates",
        choices=("auto", "none", "embed", "classify"),
    )
    pooler_config: PoolerOverrides | None = option(  # noqa: RUF009 - declares a field, as everywhere
        None,
        'how embeddings are made, in place of what the files say: {"pooling_type": "LAST", "CLS", "MEAN", "MAX", '
        '"MEAN_SQRT", "WEIGHTED_MEAN" or, for a vector of each token, "ALL", '
        '"use_activation": whether their length is 1, "dimensions": COUNT}; of classifiers also "logit_mean" and '
        '"logit_sigma", by which their numbers are moved and divided in front of the activation',
        read=read_pooler_config,
    )

    def __post_init__(self) -> None:
        check_choices(self)
        if self.convert in ("embed", "classify") and self.runner == "generate":
            message = f"{self.convert} generates nothing, and runner is generate; leave one out"
            raise ConfigError(message, field="convert", value=self.convert)
        if self.convert == "none" and self.runner == "pooling":
            raise ConfigError("is for models that generate, and runner is pooling; leave one out", field="convert")
