"""Builds tests/goldens/classifiers: tiny random classifiers and rerankers, and what the reference answers.

Runs in the reference environment (`make reference-env`), never in CI:

    .venv-reference/bin/python scripts/make_classifier_goldens.py

All arithmetic is f32 with eager attention. Scores of pairs with one class are those of CrossEncoder.predict.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import sentence_transformers
import tokenizers
import torch
import transformers
from make_encoder_goldens import fill
from reference_goldens.classifier_cases import CLASSIFIER_CASES, SPECIAL, TINY, WORDS, ClassifierCase
from sentence_transformers import CrossEncoder
from tokenizers import models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "tests" / "goldens" / "classifiers"
LENGTHS = ((1, 1), (3, 20), (20, 3), (14, 15), (5, 33))
_SEED = 9
_PROCESSORS = {
    "bert": processors.BertProcessing(("</s>", 3), ("<s>", 2)),
    "roberta": processors.RobertaProcessing(("</s>", 3), ("<s>", 2), trim_offsets=False, add_prefix_space=False),
    "plain": processors.ByteLevel(trim_offsets=False),
}


def save_tokenizer(case: ClassifierCase, folder: Path) -> PreTrainedTokenizerFast:
    """Writes and returns a tokenizer of words."""
    library = tokenizers.Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.post_processor = _PROCESSORS[case.processor]
    library.add_special_tokens(list(SPECIAL))
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if case.processor == "bert" else [])]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=library, model_max_length=40, model_input_names=inputs, **names
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_model(case: ClassifierCase) -> Any:
    """The transformers model of a case."""
    given = {**TINY, **({} if case.answers else {"num_labels": case.num_labels}), **(case.config or {})}
    given = {key: value for key, value in given.items() if value is not None}
    config = AutoConfig.for_model(case.model_type, **given)
    kind = AutoModelForCausalLM if case.answers else AutoModelForSequenceClassification
    kind = AutoModelForTokenClassification if case.by_token else kind
    model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    fill(model)
    return model


@torch.no_grad()
def record(case: ClassifierCase, model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> dict[str, Any]:
    """The texts, the logits of each, or of its tokens, and for one class the scores of the pairs that they make."""
    rng = np.random.default_rng(_SEED)
    pairs = [[" ".join(rng.choice(WORDS[6:], length)) for length in lengths] for lengths in LENGTHS]
    logits = []
    for text in (text for pair in pairs for text in pair):
        found = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0]
        if case.answers:
            found = found[-1][tokenizer.convert_tokens_to_ids(list(case.answers))]
        logits.append(found.tolist())
    found: dict[str, Any] = {"pairs": pairs, "logits": logits}
    if case.num_labels == 1 and not case.answers:
        encoder = CrossEncoder(str(folder), device="cpu", model_kwargs={"attn_implementation": "eager"})
        found["scores"] = [float(encoder.predict([tuple(pair)], batch_size=1)[0]) for pair in pairs]
    return found


def main() -> None:
    """Builds all cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the goldens")
    parser.add_argument("only", nargs="*", metavar="CASE", help="the cases to build; all without any")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for case in CLASSIFIER_CASES:
        if arguments.only and case.name not in arguments.only:
            continue
        folder = arguments.out / case.name
        shutil.rmtree(folder, ignore_errors=True)
        model = make_model(case)
        model.save_pretrained(folder)
        tokenizer = save_tokenizer(case, folder)
        (folder / "golden.json").write_text(json.dumps(record(case, model, tokenizer, folder)))
        print(case.name, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()), "bytes")
    versions = {module.__name__: module.__version__ for module in (transformers, sentence_transformers, torch)}
    (arguments.out / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
