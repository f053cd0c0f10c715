"""Chooses how a model pools texts, and what for: from the options, its files and its architecture, in this order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jaxserve.errors import ConfigError, InvalidRequestError, shorten
from jaxserve.pooling_options import PoolingOptions

if TYPE_CHECKING:
    from jaxserve.core.layers.pooling import PoolerConfig
    from jaxserve.core.models.base import DecoderConfig
    from jaxserve.core.weights.sentence_transformers import LogitScore, SentenceModules
    from jaxserve.tokenizers import Tokenizer


def choose_pooling(
    model: DecoderConfig,
    options: PoolingOptions,
    modules: SentenceModules | None,
    hf_config: Mapping[str, Any] = MappingProxyType({}),
) -> DecoderConfig:
    """Returns the model with its pooler, which makes embeddings only if the options, files or architecture say so.

    Raises ConfigError for options that the model cannot have.
    """
    if model.pooler.classes is not None:
        return _check_classifier(model, options)
    if modules is not None and modules.logit_score is not None:
        return _check_classifier(_score_by_tokens(model, modules.logit_score, hf_config), options)
    if options.convert == "classify":
        message = f"{model.family} of this architecture has no classes; leave it out"
        raise ConfigError(message, field="convert", value=options.convert)
    pooler = model.pooler if modules is None else modules.pooler
    pooler = dataclasses.replace(pooler, trained_sizes=_read_sizes(hf_config))
    given = options.pooler_config
    if given is not None:
        for name in ("logit_mean", "logit_sigma"):
            if (value := getattr(given, name)) is not None:
                message = "is for classes, and this model makes embeddings; leave it out"
                raise ConfigError(message, field=f"pooler_config.{name}", value=value)
        if given.pooling_type is not None:
            pooler = dataclasses.replace(pooler, joined=())
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
            f"{getattr(options, name)}: the model's embeddings are of type {' and '.join(pooler.pooling_types)}, for "
            "which texts are computed whole; leave it out, or give pooler_config={'pooling_type': 'LAST'}"
        )
        raise ConfigError(message, field=name, value=getattr(options, name))
    only_pools = not model.generates or wants or pooler.needs_every_token
    return dataclasses.replace(model, pooler=pooler, only_pools=only_pools)


def _read_sizes(hf_config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns the sizes to which the model was trained to have its vectors cut: empty for any, None if it was not."""
    from jaxserve.core.models.hf_config import MATRYOSHKA_KEYS, check_integer

    flag, listed = MATRYOSHKA_KEYS
    sizes = hf_config.get(listed)
    if sizes is None:
        return () if hf_config.get(flag) is True else None
    if not isinstance(sizes, list) or not sizes:
        raise ConfigError(f"must be a list of sizes, not {shorten(sizes)}", field=listed, value=sizes)
    return tuple(check_integer(listed, size) for size in sizes)


def require_dimensions(model: DecoderConfig, dimensions: int) -> None:
    """Raises InvalidRequestError unless the model was trained to have its vectors cut to so many numbers."""
    size, sizes = model.embedding_size, model.pooler.trained_sizes
    if dimensions > size:
        raise InvalidRequestError(f"at most {size}, got {dimensions}", field="dimensions", value=dimensions)
    if dimensions == size or sizes == () or (sizes is not None and dimensions in sizes):
        return
    if sizes:
        message = f"must be one of {', '.join(map(str, sorted({*sizes, size})))}, got {dimensions}"
    else:
        message = f"the model's vectors have {size} numbers, and its config.json does not say that they may be cut; "
        message += "if it was trained so (Matryoshka), start the engine with hf_overrides={'is_matryoshka': true}"
    raise InvalidRequestError(message, field="dimensions", value=dimensions)


def list_tasks(model: DecoderConfig) -> tuple[str, ...]:
    """Returns what requests may ask of a model, by vLLM's names."""
    classes = model.pooler.classes
    if model.pooler.by_token:
        return ("token_embed",) if classes is None else ("token_classify",)
    if classes is None:
        return ("generate", "embed", "score") if model.generates else ("embed", "score")
    return ("classify", "score") if len(classes.labels) == 1 else ("classify",)


def require_task(tasks: Sequence[str], task: str) -> None:
    """Raises InvalidRequestError, naming a model's tasks, for another task."""
    if task not in tasks:
        message = f"this model's tasks are {', '.join(tasks)}, not {task}"
        if task == "token_embed" and "embed" in tasks:
            message += "; start the engine with pooler_config={'pooling_type': 'ALL'} for it"
        raise InvalidRequestError(message, field="model", value=task)


def add_answers(
    model: DecoderConfig, hf_config: Mapping[str, Any], load_tokenizer: Callable[[], Tokenizer | None]
) -> DecoderConfig:
    """Returns a classifier whose classes are tokens with their projection; any other model unchanged.

    Raises ConfigError if there is no tokenizer, or it has no such token.
    """
    from jaxserve.families.classification import ANSWERS, project_answers, read_answers
    from jaxserve.families.registry import FAMILIES

    if model.pooler.classes is None or model.pooler.denses:
        return model
    tokenizer = load_tokenizer()
    if tokenizer is None:
        raise ConfigError("names tokens, for which a tokenizer is needed, and there is none", field=ANSWERS)
    ids = []
    for token in read_answers(hf_config)[0]:
        found = tokenizer.encode(token, add_special_tokens=False)
        if len(found) != 1 or found[0] >= model.vocab_size:
            raise ConfigError(f"{shorten(token)} is not one token of the model", field=ANSWERS, value=token)
        ids += found
    dense = project_answers(model, FAMILIES[model.family].trunk, ids)
    return dataclasses.replace(model, pooler=dataclasses.replace(model.pooler, denses=(dense,)))


def _score_by_tokens(model: DecoderConfig, score: LogitScore, hf_config: Mapping[str, Any]) -> DecoderConfig:
    """Returns a decoder as the reranker that modules.json makes of it; ConfigError for a token that it has not."""
    from jaxserve.core.layers.pooling import ClassConfig, PoolerConfig
    from jaxserve.families.classification import project_answers, read_activation
    from jaxserve.families.registry import FAMILIES

    ids = [each for each in (score.false_token_id, score.true_token_id) if each is not None]
    if not model.causal or max(ids) >= model.vocab_size:
        message = f"LogitScore needs a decoder with the tokens {shorten(ids)}"
        raise ConfigError(message, field="modules.json", value=ids)
    classes = ClassConfig(("LABEL_0",), read_activation(hf_config, 1), difference=len(ids) == 2)
    dense = project_answers(model, FAMILIES[model.family].trunk, ids)
    pooler = PoolerConfig("LAST", (dense,), normalizes=False, classes=classes)
    return dataclasses.replace(model, pooler=pooler, only_pools=True)


def _check_classifier(model: DecoderConfig, options: PoolingOptions) -> DecoderConfig:
    """Returns a model with classes, as the options have it; ConfigError for what it cannot do."""
    for name, wrong in (("runner", ("generate",)), ("convert", ("embed", "none"))):
        if getattr(options, name) in wrong:
            message = f"{model.family} of this architecture classifies; leave it out"
            raise ConfigError(message, field=name, value=getattr(options, name))
    given = options.pooler_config
    if given is None:
        return model
    if given.dimensions is not None:
        message = "is for embeddings, and this model classifies; leave it out"
        raise ConfigError(message, field="pooler_config.dimensions", value=given.dimensions)
    pooler, classes = model.pooler, model.pooler.classes
    if given.pooling_type is not None:
        if (given.pooling_type == "ALL") != model.pooler.by_token:
            message = f"this model's head is for {'tokens' if model.pooler.by_token else 'texts'}; leave it out"
            raise ConfigError(message, field="pooler_config.pooling_type", value=given.pooling_type)
        pooler = dataclasses.replace(pooler, pooling_type=given.pooling_type)
    if classes is not None:
        found = {
            "activation": "linear" if given.use_activation is False else None,
            "mean": given.logit_mean,
            "sigma": given.logit_sigma,
        }
        changes = {name: value for name, value in found.items() if value is not None}
        pooler = dataclasses.replace(pooler, classes=dataclasses.replace(classes, **changes))
    return dataclasses.replace(model, pooler=pooler)


def _check_sizes(model: DecoderConfig, pooler: PoolerConfig) -> None:
    """Raises ConfigError where the projections do not fit the model, or more dimensions are kept than there are."""
    size = pooler.count_pooled(model.hidden_size)
    for dense in pooler.denses:
        if dense.in_size != size:
            message = f"takes vectors of {dense.in_size} numbers, and gets {size}"
            raise ConfigError(message, field=f"{dense.module.partition('/')[0]}/config.json", value=dense.in_size)
        size = dense.out_size
    if pooler.dimensions is not None and pooler.dimensions > size:
        message = f"at most {size}, got {pooler.dimensions}"
        raise ConfigError(message, field="pooler_config.dimensions", value=pooler.dimensions)
