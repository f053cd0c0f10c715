"""The golden cases of classifiers and rerankers: tiny random checkpoints with a tokenizer of words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reference_goldens.encoder_cases import DECODER, SMALL

SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
WORDS = (*SPECIAL, "yes", "no", *(f"w{index}" for index in range(54)))
TINY = {**SMALL, "vocab_size": len(WORDS), "num_hidden_layers": 1}


@dataclass(frozen=True)
class ClassifierCase:
    """One checkpoint: the keys of its config on top of `TINY`.

    `processor` is the form of pairs: "bert", "roberta" or "plain". With `answers` the model generates, and the classes
    are these tokens; else it has `num_labels` of its own. `by_token`: each token has classes.
    """

    name: str
    model_type: str
    processor: str
    num_labels: int = 1
    answers: tuple[str, ...] = ()
    config: dict[str, Any] | None = None
    by_token: bool = False


_ROBERTA = {"pad_token_id": 0, "type_vocab_size": 1}
_QWEN3 = {**DECODER, "head_dim": 16}
_IDENTITY = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
CLASSIFIER_CASES = (
    ClassifierCase("bert", "bert", "bert", config=_IDENTITY),
    ClassifierCase("bert_classes", "bert", "bert", 3, config={"id2label": {0: "b", 1: "a", 2: "c"}}),
    ClassifierCase("roberta", "roberta", "roberta", config=_ROBERTA),
    ClassifierCase("xlm_roberta", "xlm-roberta", "roberta", config=_ROBERTA),
    ClassifierCase("llama", "llama", "plain", 3, config={**DECODER, "problem_type": "multi_label_classification"}),
    ClassifierCase("qwen2", "qwen2", "plain", 2, config=DECODER),
    ClassifierCase("qwen3", "qwen3", "plain", config=_QWEN3),
    ClassifierCase("gemma2", "gemma2", "plain", config={**_QWEN3, "query_pre_attn_scalar": 16}),
    ClassifierCase("bert_tokens", "bert", "bert", 3, by_token=True),
    ClassifierCase(
        "distilbert_tokens",
        "distilbert",
        "bert",
        5,
        config={"intermediate_size": None, "hidden_dim": 40},
        by_token=True,
    ),
    ClassifierCase(
        "qwen3_answers", "qwen3", "plain", answers=("no", "yes"), config=_QWEN3 | {"tie_word_embeddings": True}
    ),
    ClassifierCase(
        "qwen2_answers", "qwen2", "plain", answers=("no", "yes"), config=DECODER | {"tie_word_embeddings": False}
    ),
)
