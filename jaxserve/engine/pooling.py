"""Chooses how a model makes embeddings: from the options, its files and its architecture, in this order."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jaxserve.errors import ConfigError
from jaxserve.pooling_options import PoolingOptions

if TYPE_CHECKING:
    from jaxserve.core.layers.pooling import PoolerConfig
    from jaxserve.core.models.base import DecoderConfig
    from jaxserve.core.weights.sentence_transformers import SentenceModules


def choose_pooling(model: DecoderConfig, options: PoolingOptions, modules: SentenceModules | None) -> DecoderConfig:
    """Returns the model with its pooler, which makes embeddings only if the options, files or architecture say so.

    Raises ConfigError for options that the model cannot have.
    """
    pooler = model.pooler if modules is None else modules.pooler
    given = options.pooler_config
    if given is not None:
        found = {"pooling_type": given.pooling_type, "normalizes": given.use_activation, "dimensions": given.dimensions}
        pooler = dataclasses.replace(pooler, **{name: value for name, value in found.items() if value is not None})
    _check_sizes(model, pooler)
    by_files = options.runner == "auto" and options.convert == "auto" and modules is not None
    wants = options.runner == "pooling" or options.convert == "embed" or by_files
    if options.runner == "generate" and not model.generates:
        message = f"{model.family} of this architecture has no head and makes embeddings only; leave it out"
        raise ConfigError(message, field="runner", value=options.runner)
    if pooler.needs_every_token and (options.runner == "generate" or options.convert == "none") and model.generates:
        name = "runner" if options.runner == "generate" else "convert"
        message = (
            f"{getattr(options, name)}: the model's embeddings are of type {pooler.pooling_type}, for which texts are "
            "computed whole; leave it out, or give pooler_config={'pooling_type': 'LAST'}"
        )
        raise ConfigError(message, field=name, value=getattr(options, name))
    only_pools = not model.generates or wants or pooler.needs_every_token
    return dataclasses.replace(model, pooler=pooler, only_pools=only_pools)


def _check_sizes(model: DecoderConfig, pooler: PoolerConfig) -> None:
    """Raises ConfigError where the projections do not fit the model, or more dimensions are kept than there are."""
    size = model.hidden_size
    for dense in pooler.denses:
        if dense.in_size != size:
            message = f"takes vectors of {dense.in_size} numbers, and gets {size}"
            raise ConfigError(message, field=f"{dense.folder}/config.json", value=dense.in_size)
        size = dense.out_size
    if pooler.dimensions is not None and pooler.dimensions > size:
        message = f"at most {size}, got {pooler.dimensions}"
        raise ConfigError(message, field="pooler_config.dimensions", value=pooler.dimensions)
