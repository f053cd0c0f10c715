"""Embeddings, classes and scores: the requests of a call, and what is made of their vectors on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.engine.pooling import list_tasks, require_dimensions, require_task
from jaxserve.engine.prompt_forms import Prompt, list_prompts
from jaxserve.engine.prompts import RequestFactory
from jaxserve.engine.request_options import spread_options
from jaxserve.errors import InvalidRequestError, TokenizerError, shorten
from jaxserve.pooling_params import PoolingParams
from jaxserve.request import (
    TOKEN_TYPE,
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    Request,
    RequestOutput,
    ScoringOutput,
)

if TYPE_CHECKING:
    from jaxserve.core.layers.pooling import ClassConfig
    from jaxserve.core.models.base import DecoderConfig
    from jaxserve.tokenizers import Tokenizer

_LEAST_LENGTH = 1e-12  # a vector is divided by at least this: zeros stay zeros
_NO_PARAMS = PoolingParams()
ENCODE_TASKS = ("embed", "classify", "token_embed", "token_classify")


@dataclass(frozen=True)
class PoolingCall[T]:
    """The requests of one call, and what makes its answers of their outputs, which are in the same order."""

    requests: list[Request]
    finish: Callable[[Sequence[RequestOutput]], list[T]]

    def rename(self, change: Callable[[list[Request]], list[Request]]) -> PoolingCall[T]:
        """Returns the same call with other names of its requests."""
        return replace(self, requests=change(self.requests))


def embed(
    factory: RequestFactory,
    model: DecoderConfig,
    prompts: Prompt | Sequence[Prompt],
    options: Mapping[str, Any],
) -> PoolingCall[EmbeddingOutput]:
    """Returns the call of `LLM.embed`; `options` are those of `RequestFactory.make_embedding`.

    Raises InvalidRequestError for what the model cannot make.
    """
    require_task(list_tasks(model), "embed")
    return _pool(factory, model, prompts, options, EmbeddingOutput)


def classify(
    factory: RequestFactory,
    model: DecoderConfig,
    prompts: Prompt | Sequence[Prompt],
    options: Mapping[str, Any],
) -> PoolingCall[ClassificationOutput]:
    """Returns the call of `LLM.classify`; `options` are those of `RequestFactory.make_embedding`.

    Raises InvalidRequestError if the model has no classes.
    """
    require_task(list_tasks(model), "classify")
    return _pool(factory, model, prompts, options, ClassificationOutput)


def encode(
    factory: RequestFactory,
    model: DecoderConfig,
    prompts: Prompt | Sequence[Prompt],
    options: Mapping[str, Any],
) -> PoolingCall[PoolingOutput]:
    """Returns the call of `LLM.encode` for one of `ENCODE_TASKS` as `pooling_task`; without one, the model's own."""
    tasks = list_tasks(model)
    task = options.get("pooling_task") or next(each for each in ENCODE_TASKS if each in tasks)
    if task not in ENCODE_TASKS:
        message = f"must be one of {', '.join(ENCODE_TASKS)}, got {shorten(task)}"
        raise InvalidRequestError(message, field="pooling_task", value=task)
    require_task(tasks, task)
    own = {name: value for name, value in options.items() if name != "pooling_task"}
    return _pool(factory, model, prompts, own, PoolingOutput)


def _pool[T](
    factory: RequestFactory,
    model: DecoderConfig,
    prompts: Prompt | Sequence[Prompt],
    options: Mapping[str, Any],
    kind: Callable[..., T],
) -> PoolingCall[T]:
    """Returns the call of what the model makes of texts, or of all tokens of texts, whose answers are of a kind."""
    params, own = _split(options)
    if model.pooler.classes is None:
        make = partial(cut_embedding, params=check_embedding(model, params), normalizes=model.pooler.normalizes)
    else:
        make = partial(activate, model.pooler.classes, params=_refuse_dimensions(params))
    return PoolingCall(_make_each(factory, prompts, own), partial(_finish, kind, make))


def score(
    factory: RequestFactory,
    model: DecoderConfig,
    data_1: str | Sequence[str],
    data_2: str | Sequence[str],
    options: Mapping[str, Any],
) -> PoolingCall[ScoringOutput]:
    """Returns the call of `LLM.score`; `options` are those of `RequestFactory.make_pair`.

    A model with classes reads each pair as one text. The embeddings of others are compared: their score is the cosine
    of the two. Raises InvalidRequestError for lists that make no pairs, and for texts that cannot be read.
    """
    firsts, seconds = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
    if not firsts or not seconds or len(firsts) not in (1, len(seconds)):
        message = f"must be one text, or as many as data_2 has ({len(seconds)}), and not none; got {len(firsts)}"
        raise InvalidRequestError(message, field="data_1", value=len(firsts))
    require_task(list_tasks(model), "score")
    if model.pooler.classes is None:
        return _compare(factory, model, firsts, seconds, options)
    params, own = _split(options)
    classes, given = model.pooler.classes, _refuse_dimensions(params)
    _require_texts(firsts, seconds)
    pairs = zip(firsts * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True)
    each = zip(pairs, spread_options(own, len(seconds)), strict=True)
    requests = [factory.make_pair(*pair, **these) for pair, these in each]
    return PoolingCall(requests, partial(_finish, ScoringOutput, lambda numbers: activate(classes, numbers, given)[0]))


def _compare(
    factory: RequestFactory,
    model: DecoderConfig,
    firsts: Sequence[str],
    seconds: Sequence[str],
    options: Mapping[str, Any],
) -> PoolingCall[ScoringOutput]:
    """Returns the call of scores that are cosines of embeddings, each text embedded once."""
    given, own = _split(options)
    if given.use_activation is not None:
        message = "means nothing for scores that are cosines; leave it out"
        raise InvalidRequestError(message, field="use_activation", value=given.use_activation)
    check_embedding(model, given)
    for name in ("max_tokens_per_doc", "template"):
        if own.pop(name, None) is not None:
            message = "is for rerankers, and this model compares embeddings; leave it out"
            raise InvalidRequestError(message, field="chat_template" if name == "template" else name)
    _require_texts(firsts, seconds)
    requests = _make_each(factory, [*firsts, *seconds], own)

    def finish(outputs: Sequence[RequestOutput]) -> list[ScoringOutput]:
        vectors = [np.array(_read(each), np.float32)[: given.dimensions] for each in outputs]
        found = []
        for index in range(len(seconds)):
            at, other = 0 if len(firsts) == 1 else index, len(firsts) + index
            lengths = np.linalg.norm(vectors[at]) * np.linalg.norm(vectors[other])
            cosine = float(vectors[at] @ vectors[other] / max(lengths, _LEAST_LENGTH))
            name, prompt, ids = _describe(outputs[other])
            both = [*_describe(outputs[at])[2], *ids]
            found.append(ScoringOutput(name, prompt, both, cosine, outputs[other].num_cached_tokens))
        return found

    return PoolingCall(requests, finish)


def read_template(
    options: Mapping[str, Any], tokenizer: Tokenizer | None, render: Callable[..., str] | None = None
) -> dict[str, Any]:
    """Returns options of `RequestFactory.make_pair`, in which a `chat_template` has been read as `template`.

    Raises TokenizerError for a template that shows no pairs.
    """
    rest = {name: value for name, value in options.items() if name != "chat_template"}
    text = options.get("chat_template")
    if text is None:
        return rest
    from jaxserve.tokenizers.pairs import require_pair_template
    from jaxserve.tokenizers.renderer import render_apart

    if tokenizer is None:
        raise TokenizerError("there is none, so no template can be rendered", field="tokenizer")
    return {**rest, "template": require_pair_template(text, tokenizer, render or render_apart)}


def check_embedding(model: DecoderConfig, given: PoolingParams) -> PoolingParams:
    """Returns the parameters of an embedding; InvalidRequestError for what the model cannot make."""
    if given.dimensions is not None:
        require_dimensions(model, given.dimensions)
    if given.use_activation is False and model.pooler.normalizes:
        message = "vectors have length 1; start the engine with pooler_config={'use_activation': false} for others"
        raise InvalidRequestError(message, field="use_activation", value=False)
    return given


def cut_embedding(vectors: Any, params: PoolingParams, normalizes: bool) -> list[Any]:
    """Returns the first `dimensions` numbers, divided by their length if the model does so, or the request.

    `vectors` is one vector, or an array [n, E] of those of n tokens, which are returned as n lists.
    """
    if params.dimensions is None and (normalizes or not params.use_activation):
        return vectors if isinstance(vectors, list) else vectors.tolist()
    kept = np.asarray(vectors, np.float32)[..., : params.dimensions]
    if normalizes or params.use_activation:
        kept = kept / np.maximum(np.linalg.norm(kept, axis=-1, keepdims=True), _LEAST_LENGTH)
    return kept.tolist()


def activate(classes: ClassConfig, numbers: Any, params: PoolingParams) -> list[Any]:
    """Returns what the model's activation makes of the numbers of its classes, computed in float32.

    `numbers` are those of a text, or an array [n, C] of those of n tokens, which are returned as n lists.
    """
    with np.errstate(over="ignore"):
        found = (np.asarray(numbers, np.float32) - np.float32(classes.mean)) / np.float32(classes.sigma)
        if params.use_activation is not False:
            found = _ACTIVATIONS[classes.activation](found)
    return found.tolist()


def _softmax(numbers: np.ndarray) -> np.ndarray:
    powers = np.exp(numbers - numbers.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


_ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": lambda numbers: numbers,
    "sigmoid": lambda numbers: np.float32(1) / (np.float32(1) + np.exp(-numbers)),
    "softmax": _softmax,
    "tanh": np.tanh,
}


def _make_each(
    factory: RequestFactory, prompts: Prompt | Sequence[Prompt], options: Mapping[str, Any]
) -> list[Request]:
    many = list_prompts(prompts)
    each = zip(many, spread_options(options, len(many)), strict=True)
    return [factory.make_embedding(prompt, **own) for prompt, own in each]


def _split(options: Mapping[str, Any]) -> tuple[PoolingParams, dict[str, Any]]:
    """Returns the pooling parameters among a method's options, and those of `RequestFactory`."""
    own = dict(options)
    params = own.pop("pooling_params", None) or _NO_PARAMS
    if not isinstance(params, PoolingParams):
        raise InvalidRequestError("must be PoolingParams, one for all", field="pooling_params", value=params)
    return params, own


def _require_texts(firsts: Sequence[object], seconds: Sequence[object]) -> None:
    for field, texts in (("data_1", firsts), ("data_2", seconds)):
        for index, text in enumerate(texts):
            if not isinstance(text, str) or not text:
                message = f"must be a text of at least one character, got {shorten(text)}"
                raise InvalidRequestError(message, field=f"{field}[{index}]", value=text)


def _refuse_dimensions(given: PoolingParams) -> PoolingParams:
    if given.dimensions is not None:
        message = "is for embeddings, and this model classifies; leave it out"
        raise InvalidRequestError(message, field="dimensions", value=given.dimensions)
    return given


def _finish[T](kind: Callable[..., T], make: Callable[[Any], Any], outputs: Sequence[RequestOutput]) -> list[T]:
    """Returns the answers of a kind to requests that have ended; `make` makes an answer's value of what was pooled."""
    return [kind(*_describe(each), make(_read(each)), each.num_cached_tokens) for each in outputs]


def _read(output: RequestOutput) -> Any:
    """Returns `RequestOutput.embedding` of a request that has ended; raises its error if it has one."""
    if output.error is not None:
        raise output.error
    assert output.embedding is not None  # it has ended without an error
    return output.embedding


def _describe(output: RequestOutput) -> tuple[str, str | None, list[int]]:
    """Returns the name, the text and the token ids of a request, without their types."""
    return output.request_id, output.prompt, [token_id & ~TOKEN_TYPE for token_id in output.prompt_token_ids]
