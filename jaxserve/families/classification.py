"""Heads that classify: what is behind the layers of `...ForSequenceClassification` and `...ForTokenClassification`.

A reranker is a classifier of pairs with one class. One that was trained to answer by one of two tokens is read as a
classifier, whose rows are those of the output head (`project_answers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.core.layers.pooling import ClassConfig, DenseConfig, PoolerConfig
from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.models.hf_config import check_mapping
from jaxserve.core.models.trunk import Trunk
from jaxserve.errors import ConfigError, shorten
from jaxserve.pooling_options import PoolingType


@dataclass(frozen=True)
class Head:
    """The head of a family: `hidden`, a projection in front of tanh, if it has one, and `output`."""

    architecture: str
    pooling_type: PoolingType
    output: str
    hidden: str | None = None
    bias: bool = True


_ROBERTA = "classifier.out_proj", "classifier.dense"
HEADS: Mapping[str, tuple[Head, ...]] = {
    "bert": (
        Head("BertForSequenceClassification", "CLS", "classifier", "bert.pooler.dense"),
        Head("BertForTokenClassification", "ALL", "classifier"),
    ),
    "roberta": (
        Head("RobertaForSequenceClassification", "CLS", *_ROBERTA),
        Head("RobertaForTokenClassification", "ALL", "classifier"),
    ),
    "xlm-roberta": (
        Head("XLMRobertaForSequenceClassification", "CLS", *_ROBERTA),
        Head("XLMRobertaForTokenClassification", "ALL", "classifier"),
    ),
    "distilbert": (Head("DistilBertForTokenClassification", "ALL", "classifier"),),
    "llama": (Head("LlamaForSequenceClassification", "LAST", "score", bias=False),),
    "qwen2": (Head("Qwen2ForSequenceClassification", "LAST", "score", bias=False),),
    "qwen3": (Head("Qwen3ForSequenceClassification", "LAST", "score", bias=False),),
    "gemma2": (Head("Gemma2ForSequenceClassification", "LAST", "score", bias=False),),
}
"""By the family's `model_type`."""

ANSWERS = "classifier_from_token"
KEYS = (ANSWERS, "method", "is_original_qwen3_reranker")
"""Keys of config.json that heads are read from, beside those that every config may have."""

_ACTIVATIONS = {"Identity": "linear", "Sigmoid": "sigmoid", "Softmax": "softmax", "Tanh": "tanh"}
_PROBLEMS = {
    "regression": "linear",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_DIFFERENCE, _PLAIN = "from_2_way_softmax", "no_post_processing"  # vLLM's names of `method`


def read_pooler(hf_config: Mapping[str, Any], model: DecoderConfig, head: Head) -> PoolerConfig:
    """Returns the pooler of a config.json and its head. If tokens are the classes, it lacks their projection.

    Raises ConfigError, naming the key, for a value that is malformed or not supported.
    """
    size, denses = model.hidden_size, list[DenseConfig]()
    if hf_config.get(ANSWERS) is not None:
        tokens, difference = read_answers(hf_config)
        labels = tokens[-1:] if difference else tokens
        classes = ClassConfig(labels, read_activation(hf_config, len(labels)), difference)
        return PoolerConfig("LAST", normalizes=False, classes=classes)
    labels = _read_labels(hf_config)
    if head.hidden is not None:
        denses.append(DenseConfig(size, size, True, "tanh", head.hidden))
    denses.append(DenseConfig(size, len(labels), head.bias, "linear", head.output))
    classes = ClassConfig(labels, read_activation(hf_config, len(labels)))
    return PoolerConfig(head.pooling_type, tuple(denses), normalizes=False, classes=classes)


def read_answers(hf_config: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Returns the tokens that are the classes, and whether the one score is the second's logit less the first's.

    Raises ConfigError if the keys of config.json are malformed.
    """
    tokens, method = hf_config[ANSWERS], hf_config.get("method")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ConfigError(f'must be tokens like ["no", "yes"], not {shorten(tokens)}', field=ANSWERS, value=tokens)
    if method is None:
        method = _DIFFERENCE if hf_config.get("is_original_qwen3_reranker") else _PLAIN
    if method not in (_DIFFERENCE, _PLAIN):
        message = f"{shorten(method)} is not supported; known are {_DIFFERENCE}, {_PLAIN}"
        raise ConfigError(message, field="method", value=method)
    if method == _DIFFERENCE and len(tokens) != 2:
        message = f"method {_DIFFERENCE} needs the tokens of no and yes, not {shorten(tokens)}"
        raise ConfigError(message, field=ANSWERS, value=tokens)
    return tuple(tokens), method == _DIFFERENCE


def project_answers(model: DecoderConfig, trunk: Trunk, ids: Sequence[int]) -> DenseConfig:
    """Returns the projection to the logits of these tokens alone: rows of the head, which is not kept otherwise."""
    module = trunk.embed if model.embedding.tied else trunk.head
    return DenseConfig(model.hidden_size, len(ids), False, "linear", module, tuple(ids))


def _read_labels(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the classes."""
    named, count = check_mapping("id2label", hf_config.get("id2label")), hf_config.get("num_labels")
    if not named:
        count = 2 if count is None else count
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 2**20:
            raise ConfigError(f"must be a number of classes, not {shorten(count)}", field="num_labels", value=count)
        return tuple(f"LABEL_{index}" for index in range(count))
    ids = [str(index) for index in range(len(named))]
    if {str(key) for key in named} != set(ids):
        message = f"must name the classes from 0 to {len(named) - 1}"
        raise ConfigError(message, field="id2label", value=list(named))
    return tuple(str(named.get(key, named.get(int(key)))) for key in ids)  # type: ignore[call-overload]


def read_activation(hf_config: Mapping[str, Any], num_labels: int) -> str:
    """Returns the activation that the file names, else that of its kind of problem or of its number of classes."""
    named = check_mapping("sentence_transformers", hf_config.get("sentence_transformers")).get("activation_fn")
    field = "sentence_transformers.activation_fn"
    if named is None:
        field = "sbert_ce_default_activation_function"
        named = hf_config.get(field)
    if named is not None:
        module, _, name = str(named).rpartition(".")
        if name not in _ACTIVATIONS or not module.startswith("torch.nn"):
            message = f"{shorten(named)} is not read; known are {', '.join(_ACTIVATIONS)} of torch.nn"
            raise ConfigError(message, field=field, value=named)
        return _ACTIVATIONS[name]
    problem = hf_config.get("problem_type")
    if problem is not None and problem not in _PROBLEMS:
        message = f"{shorten(problem)} is not supported; known are {', '.join(_PROBLEMS)}"
        raise ConfigError(message, field="problem_type", value=problem)
    return "sigmoid" if num_labels == 1 else _PROBLEMS[problem or "single_label_classification"]
