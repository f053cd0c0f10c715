"""Classifiers and rerankers against transformers and CrossEncoder: pairs, heads, answers by one of two tokens."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import LLM, AsyncLLM, PoolingParams, SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.engine.model_files import locate_model, resolve_model
from jaxserve.engine.pooling import list_tasks
from jaxserve.errors import ConfigError, InvalidRequestError, TokenizerError
from jaxserve.families.registry import param_specs, parse_config
from tests.e2e.helpers import CACHE
from tests.golden_cases import GOLDENS

FOLDER = GOLDENS / "classifiers"
CLASSIFIERS = sorted(
    path.name for path in FOLDER.iterdir() if path.is_dir() and not path.name.endswith(("answers", "tokens"))
)
TOKENS = {"classifier_from_token": ["no", "yes"]}
ANSWERS: dict[str, Any] = {
    "qwen3_answers": TOKENS | {"architectures": ["Qwen3ForSequenceClassification"], "is_original_qwen3_reranker": True},
    "qwen2_answers": TOKENS | {"architectures": ["Qwen2ForSequenceClassification"], "method": "from_2_way_softmax"},
}
TEMPLATE = "<s> {% for message in messages %}{{ message.content }} {% endfor %}</s>"
PROBS = {"softmax": lambda x: np.exp(x) / np.exp(x).sum(), "sigmoid": lambda x: 1 / (1 + np.exp(-x))}


def start(name: str | Path, kind: type = LLM, **options: Any) -> Any:
    defaults = {"dtype": "float32", "page_size": 16, "max_num_seqs": 8, "show_progress": False}
    sizes = {"max_num_batched_tokens": 256, "precompile_token_paddings": [256], "precompile_bs_paddings": [8]}
    return kind(str(FOLDER / name), **(CACHE | defaults | sizes | options))


def read_golden(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name / "golden.json").read_text())


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_and_scores_equal_the_reference(name: str) -> None:
    golden, llm = read_golden(name), start(name)
    texts = [text for pair in golden["pairs"] for text in pair]
    logits = np.array(golden["logits"])
    raw = llm.classify(texts, pooling_params=PoolingParams(use_activation=False))
    np.testing.assert_allclose([each.probs for each in raw], logits, rtol=0, atol=1e-4)
    activation = llm.ready.shapes.model.pooler.classes.activation
    assert activation == {"bert": "linear", "llama": "sigmoid"}.get(
        name, "sigmoid" if "scores" in golden else "softmax"
    )
    expected = [PROBS[activation](line) for line in logits] if activation != "linear" else logits
    found = llm.classify(texts)
    np.testing.assert_allclose([each.outputs.probs for each in found], expected, rtol=0, atol=1e-4)
    assert {each.num_classes for each in found} == {len(logits[0])}
    if "scores" not in golden:
        with pytest.raises(InvalidRequestError, match="this model's tasks are classify, not score"):
            llm.score("w1", "w2")
        return
    queries, documents = zip(*golden["pairs"], strict=True)
    scores = llm.score(list(queries), list(documents), truncate_prompt_tokens=40)
    np.testing.assert_allclose([each.outputs.score for each in scores], golden["scores"], rtol=0, atol=1e-5)
    for at, document in enumerate(documents):
        (alone,) = llm.score(queries[at], document, truncate_prompt_tokens=40)
        np.testing.assert_allclose(alone.score, scores[at].score, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["bert_tokens", "distilbert_tokens"])
def test_each_token_has_classes(name: str) -> None:
    golden, llm = read_golden(name), start(name)
    texts = [text for pair in golden["pairs"] for text in pair]
    raw = llm.encode(texts, pooling_task="token_classify", pooling_params=PoolingParams(use_activation=False))
    for found, probable, logits in zip(raw, llm.encode(texts), golden["logits"], strict=True):
        np.testing.assert_allclose(found.data, logits, rtol=0, atol=1e-4)
        expected = [PROBS["softmax"](line) for line in np.array(logits)]
        np.testing.assert_allclose(probable.data, expected, rtol=0, atol=1e-5)
    for task, call in (("classify", llm.classify), ("token_embed", partial(llm.encode, pooling_task="token_embed"))):
        with pytest.raises(InvalidRequestError, match=f"this model's tasks are token_classify, not {task}"):
            call("w1")
    with pytest.raises(ConfigError, match="this model's head is for tokens"):
        start(name, pooler_config={"pooling_type": "CLS"})


@pytest.mark.parametrize("name", ["xlm_roberta", "bert_classes"])
def test_numbers_are_calibrated_in_front_of_the_activation(name: str) -> None:
    golden = read_golden(name)
    llm = start(name, pooler_config={"logit_mean": 0.3, "logit_sigma": -0.5})
    texts = [text for pair in golden["pairs"] for text in pair]
    expected = (np.array(golden["logits"]) - 0.3) / -0.5
    raw = llm.classify(texts, pooling_params=PoolingParams(use_activation=False))
    np.testing.assert_allclose([each.probs for each in raw], expected, rtol=0, atol=1e-3)
    probs = [PROBS["sigmoid" if "scores" in golden else "softmax"](line) for line in expected]
    np.testing.assert_allclose([each.probs for each in llm.classify(texts)], probs, rtol=0, atol=1e-3)
    if "scores" in golden:
        plain = np.log(np.array(golden["scores"]) / (1 - np.array(golden["scores"])))  # sigmoids, in pairs
        pairs = zip(*golden["pairs"], strict=True)
        found = llm.score(*map(list, pairs), truncate_prompt_tokens=40)
        np.testing.assert_allclose(
            [each.score for each in found], PROBS["sigmoid"]((plain - 0.3) / -0.5), rtol=0, atol=1e-3
        )


@pytest.mark.parametrize("name", ANSWERS)
def test_two_tokens_of_the_head_are_a_score(name: str) -> None:
    golden = read_golden(name)
    llm = start(name, hf_overrides=ANSWERS[name])
    texts = [text for pair in golden["pairs"] for text in pair]
    logits = np.array(golden["logits"])
    difference = logits[:, 1] - logits[:, 0]
    found = llm.classify(texts)
    np.testing.assert_allclose([each.probs[0] for each in found], 1 / (1 + np.exp(-difference)), rtol=0, atol=1e-5)
    assert "lm_head" not in llm.ready.runner.params, "only two rows are kept"
    plain = start(name, hf_overrides=ANSWERS[name] | {"method": "no_post_processing"})
    raw = plain.classify(texts, pooling_params=PoolingParams(use_activation=False))
    np.testing.assert_allclose([each.probs for each in raw], logits, rtol=0, atol=1e-4)
    assert plain.ready.shapes.model.pooler.classes.labels == ("no", "yes")


def test_a_reranker_with_a_prompt_gets_it_or_is_refused(tmp_path: Path) -> None:
    name = "qwen2_answers"
    bare = start(name, hf_overrides=ANSWERS[name])
    with pytest.raises(TokenizerError, match="its files have no chat template"):
        bare.score("w1 w2", "w3")
    with pytest.raises(TokenizerError, match="shows no message of the role query"):
        bare.score("w1 w2", "w3", chat_template="{{ messages[0].content }}")
    (given,) = bare.score("w1 w2", "w3 w4 w5", chat_template=TEMPLATE)
    ids = bare.get_tokenizer().encode("w1 w2 w3 w4 w5", add_special_tokens=False)
    assert given.prompt_token_ids == [2, *ids, 3]
    assert given.score == pytest.approx(bare.classify({"prompt_token_ids": [2, *ids, 3]})[0].probs[0], abs=1e-6)
    shutil.copytree(FOLDER / name, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    own = start(tmp_path, hf_overrides=ANSWERS[name])
    assert own.score("w1 w2", "w3 w4 w5")[0].prompt_token_ids == [2, *ids, 3]
    (cut,) = own.score("w1 w2", "w3 w4 w5", truncate_prompt_tokens=6)
    assert cut.prompt_token_ids == [2, *ids[:4], 3], "the template's end is the token that is read"
    (cut,) = own.score("w1 w2", "w3 w4 w5", max_tokens_per_doc=1)
    assert cut.prompt_token_ids == [2, *ids[:3], 3]
    with pytest.raises(InvalidRequestError, match="the special token '</s>', which this tokenizer cannot keep"):
        own.score("w1 w2", "w3 </s>")
    with pytest.raises(InvalidRequestError, match="no room for the chat template"):
        own.score("w1 w2", "w3 w4 w5", truncate_prompt_tokens=1)


def test_the_original_qwen3_reranker_brings_its_prompt() -> None:
    llm = start("qwen3_answers", hf_overrides=ANSWERS["qwen3_answers"])
    text = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a '
        "web search query, retrieve relevant passages that answer the query\n<Query>: w1\n<Document>: w2<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    expected = llm.get_tokenizer().encode(text, add_special_tokens=False)
    assert llm.score("w1", "w2", truncate_prompt_tokens=-1)[0].prompt_token_ids == expected


SAVED: dict[str, Any] = {  # by CrossEncoder.save_pretrained of sentence-transformers 6.2
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
    ],
    "sentence_bert_config.json": {
        "transformer_task": "sequence-classification",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
        "module_output_name": "scores",
    },
    "config_sentence_transformers.json": {
        "activation_fn": "torch.nn.modules.linear.Identity",
        "default_prompt_name": None,
        "model_type": "CrossEncoder",
        "prompts": {},
    },
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"sentence_bert_config.json": {"transformer_task": "feature-extraction"}}, "is for another task"),
        ({"sentence_bert_config.json": {"do_lower_case": True}}, "'do_lower_case' is not read"),
        ({"config_sentence_transformers.json": {"default_prompt_name": "query"}}, "default_prompt_name is not read"),
    ],
)
def test_files_that_a_cross_encoder_saves_are_read(changes: dict[str, Any], words: str | None, tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "bert", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["sbert_ce_default_activation_function"]  # newer files have it elsewhere
    for name, content in {**SAVED, **changes, "config.json": config}.items():
        (tmp_path / name).write_text(json.dumps(content))
    options = EngineConfig.from_options(model=str(tmp_path))
    if words is not None:
        with pytest.raises(ConfigError, match=words):
            locate_model(options.model)
        return
    model = resolve_model(options, locate_model(options.model))
    assert model.pooler.classes is not None and model.pooler.classes.activation == "linear"


QUERY_AND_DOCUMENT = (
    "<s> {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} "
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }} </s>"
)


def write_logit_score(folder: Path, **settings: Any) -> Path:
    """A decoder that sentence-transformers 6.2 has saved as a CrossEncoder with LogitScore."""
    shutil.copytree(FOLDER / "qwen3_answers", folder, dirs_exist_ok=True)
    kinds = (
        ("base.modules.transformer.Transformer", ""),
        ("cross_encoder.modules.logit_score.LogitScore", "1_LogitScore"),
    )
    modules = [
        {"idx": at, "path": path, "type": f"sentence_transformers.{kind}"} for at, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    texts = {"transformer_task": "text-generation", "module_output_name": "causal_logits"}
    (folder / "sentence_bert_config.json").write_text(json.dumps(texts))
    named = {"activation_fn": "torch.nn.modules.activation.Sigmoid", "model_type": "CrossEncoder"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(QUERY_AND_DOCUMENT)
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(settings))
    return folder


def test_logits_of_tokens_that_modules_name_are_a_score(tmp_path: Path) -> None:
    llm = start(write_logit_score(tmp_path, true_token_id=4, false_token_id=5))
    found = llm.score(["w1 w2", "w5"], ["w3 w4", "w6 w7 w8"])
    expected = [0.6024594306945801, 0.1689062863588333]  # CrossEncoder.predict of sentence-transformers 6.2
    np.testing.assert_allclose([each.score for each in found], expected, rtol=0, atol=1e-5)
    with pytest.raises(InvalidRequestError, match="tasks are classify, score, not generate"):
        llm.generate("w1")


def test_a_token_of_modules_must_be_one_of_the_model(tmp_path: Path) -> None:
    options = EngineConfig.from_options(model=str(write_logit_score(tmp_path, true_token_id=60)))
    with pytest.raises(ConfigError, match=r"LogitScore needs a decoder with the tokens \[60\]"):
        resolve_model(options, locate_model(options.model))


def test_an_embedding_model_scores_by_cosine() -> None:
    folder, options = GOLDENS / "encoders" / "bert_mean", {"hf_overrides": {"is_matryoshka": True}}
    llm = start(folder, tokenizer=str(FOLDER / "bert"), **options)
    texts = ["w1 w2", "w3", "w2 w1 w4"]
    vectors = np.array([each.embedding for each in llm.embed(texts)])
    one, many = llm.score(texts[0], texts), llm.score(texts, texts[::-1])
    np.testing.assert_allclose([each.score for each in one], vectors @ vectors[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose([each.score for each in many], (vectors * vectors[::-1]).sum(1), rtol=0, atol=1e-5)
    cut = np.array([each.embedding for each in llm.embed(texts, pooling_params=PoolingParams(dimensions=7))])
    np.testing.assert_allclose(cut, vectors[:, :7] / np.linalg.norm(vectors[:, :7], axis=1)[:, None], atol=1e-6)
    assert llm.encode(texts)[1].outputs.data == llm.embed(texts)[1].embedding
    for call, words in (
        (lambda: llm.classify("w1"), "tasks are embed, score, not classify"),
        (lambda: llm.score("w1", "w2", max_tokens_per_doc=3), "max_tokens_per_doc: is for rerankers"),
        (lambda: llm.embed("w1", pooling_params=PoolingParams(use_activation=False)), "vectors have length 1"),
        (lambda: llm.embed("w1", pooling_params=PoolingParams(dimensions=33)), "dimensions: at most 32, got 33"),
        (lambda: llm.encode("w1", pooling_task="reward"), "pooling_task: must be one of embed, classify, token_embed"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            call()


def test_bad_calls_are_named() -> None:
    llm = start("bert")
    for call, words in (
        (
            lambda: llm.generate("w1", SamplingParams(max_tokens=1)),
            "this model's tasks are classify, score, not generate",
        ),
        (lambda: llm.embed("w1"), "tasks are classify, score, not embed"),
        (
            lambda: llm.score(["w1", "w2"], ["w1", "w2", "w3"]),
            r"data_1: must be one text, or as many as data_2 has \(3",
        ),
        (lambda: llm.score([], ["w1"]), "data_1: must be one text"),
        (lambda: llm.score("w1", []), "data_1: must be one text"),
        (lambda: llm.score("w1", ["w2", ""]), r"data_2\[1\]: must be a text"),
        (lambda: llm.score("w1", [7]), r"data_2\[0\]: must be a text"),
        (lambda: llm.score("w1", "w2", max_tokens_per_doc=0), "max_tokens_per_doc: must be at least 1"),
        (lambda: llm.score("w1", "w2 " * 70), "maximum context length is 64 tokens, and the prompt alone has 74"),
        (lambda: llm.classify("w1", pooling_params=PoolingParams(dimensions=1)), "dimensions: is for embeddings"),
        (lambda: PoolingParams(dimensions=0), "dimensions: must be an integer of at least 1"),
        (lambda: PoolingParams(use_activation=1), "use_activation: must be true or false"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            call()
    assert llm.score("w1", "w2 " * 70, truncate_prompt_tokens=-1)[0].prompt_token_ids[-1] == 3


def test_streams_are_not_needed() -> None:
    golden = read_golden("bert")
    queries, documents = zip(*golden["pairs"], strict=True)

    async def check() -> None:
        llm = start("bert", AsyncLLM, compile="used")
        try:
            found = await llm.score(list(queries), list(documents), truncate_prompt_tokens=40)
            np.testing.assert_allclose([each.score for each in found], golden["scores"], rtol=0, atol=1e-5)
            (one,) = await llm.classify(queries[0])
            assert [one.probs] == [each.data for each in await llm.encode(queries[0])]
        finally:
            llm.shutdown()

    asyncio.run(check())


@pytest.mark.parametrize(
    ("name", "options", "field", "words"),
    [
        ("bert", {"runner": "generate"}, "runner", "classifies"),
        ("bert", {"convert": "embed"}, "convert", "classifies"),
        ("bert", {"pooler_config": {"dimensions": 3}}, "pooler_config.dimensions", "is for embeddings"),
        ("qwen2_answers", {"convert": "classify"}, "convert", "has no classes"),
        ("qwen2_answers", {"convert": "classify", "runner": "generate"}, "convert", "runner is generate"),
        ("qwen3_answers", {"hf_overrides": {"classifier_from_token": ["no"]}}, "classifier_from_token", "needs"),
        ("qwen3_answers", {"hf_overrides": {"classifier_from_token": "no"}}, "classifier_from_token", "must be tokens"),
        ("qwen3_answers", {"hf_overrides": {"classifier_from_token": ["a b", "w3"]}}, "classifier_from_token", "'a b'"),
        ("qwen3_answers", {"hf_overrides": {"method": "mean"}}, "method", "known are from_2_way_softmax"),
        ("qwen3_answers", {"skip_tokenizer_init": True}, "classifier_from_token", "a tokenizer is needed"),
        ("bert", {"hf_overrides": {"id2label": {"0": "a", "2": "b"}}}, "id2label", "must name the classes from 0 to 1"),
        ("bert", {"hf_overrides": {"sbert_ce_default_activation_function": "torch.nn.modules.activation.GELU"}},
         "sbert_ce_default_activation_function", "known are Identity, Sigmoid"),
    ],
)  # fmt: skip
def test_what_a_classifier_cannot_be_is_refused(name: str, options: dict[str, Any], field: str, words: str) -> None:
    if name == "qwen3_answers":
        options = {**options, "hf_overrides": ANSWERS[name] | options.get("hf_overrides", {})}
    with pytest.raises(ConfigError, match=words) as raised:
        config = EngineConfig.from_options(model=str(FOLDER / name), load_format="dummy", **options)
        resolve_model(config, locate_model(config.model))
    assert raised.value.field == field


PUBLISHED: dict[str, Any] = {  # from memory of the published files; parameters with BERT's pooler, which is read
    "ms-marco-MiniLM-L6-v2": (
        {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "hidden_size": 384,
         "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536, "vocab_size": 30522,
         "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
         "gradient_checkpointing": False, "position_embedding_type": "absolute", "id2label": {"0": "LABEL_0"},
         "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0.dev0"}},
        "linear", 22_713_601,
    ),
    "bge-reranker-v2-m3": (
        {"architectures": ["XLMRobertaForSequenceClassification"], "model_type": "xlm-roberta", "hidden_size": 1024,
         "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 250002,
         "max_position_embeddings": 8194, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
         "pad_token_id": 1, "output_past": True, "id2label": {"0": "LABEL_0"}, "torch_dtype": "float32"},
        "sigmoid", 567_755_777,
    ),
    "Qwen3-Reranker-0.6B-seq-cls": (
        {"architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3", "hidden_size": 1024,
         "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
         "intermediate_size": 3072, "vocab_size": 151669, "max_position_embeddings": 40960, "rope_theta": 1000000,
         "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True, "use_sliding_window": False,
         "max_window_layers": 28, "id2label": {"0": "LABEL_0"}, "torch_dtype": "bfloat16"},
        "sigmoid", 595_777_536,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    hf_config, activation, count = PUBLISHED[name]
    model = parse_config(hf_config)
    assert sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(model))) == count
    assert model.pooler.classes is not None and model.pooler.classes.activation == activation
    assert list_tasks(model) == ("classify", "score") and not model.generates
