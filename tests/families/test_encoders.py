"""Embedding models against transformers and sentence-transformers: encoders, and decoders without a head."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers

from jaxserve import AsyncLLM, SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.core.runtime.startup import plan_pools
from jaxserve.core.weights.json_files import read_hf_config
from jaxserve.core.weights.sentence_transformers import Prompts
from jaxserve.engine.model_files import locate_model, resolve_model
from jaxserve.engine.pooling import choose_pooling, require_dimensions
from jaxserve.engine.prompt_forms import add_prompt
from jaxserve.errors import ConfigError, InvalidRequestError, NonFiniteLogitsError
from jaxserve.families.registry import param_specs, parse_config, weight_sources
from jaxserve.features.choose import make_shapes
from jaxserve.pooling_options import PoolingOptions
from tests.e2e.helpers import CACHE
from tests.families.encoders import CASES, FOLDER, LIMIT, ROWS, embed, read_golden, start
from tests.families.naive import NaiveRunner, build_params, read_tensors, unused_tensors
from tests.golden_cases import GOLDENS


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_equal_the_reference(name: str) -> None:
    folder = FOLDER / name
    config = replace(parse_config(read_hf_config(folder)), dtype="float32").with_max_model_len(LIMIT)
    config = choose_pooling(config, PoolingOptions(), None)
    tensors = read_tensors(folder)
    assert all("pooler" in each for each in unused_tensors(config, tensors)), "and BERT's pooler makes no embedding"
    texts, hidden, _ = read_golden(name)
    runner = NaiveRunner(config, build_params(config, tensors), len(texts))
    for found, expected in zip(runner.run(texts, pad_to=160), hidden, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["modernbert_cls", "embedding_gemma"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_radius_that_is_off_by_one_would_be_seen(name: str, change: int) -> None:
    config = replace(parse_config(read_hf_config(FOLDER / name)), dtype="float32").with_max_model_len(LIMIT)
    layers = (replace(kind, window=kind.window and kind.window + change) for kind in config.layers)
    config = choose_pooling(replace(config, layers=tuple(layers)), PoolingOptions(), None)
    texts, hidden, _ = read_golden(name)
    assert len(texts[-1]) > 3 * (2 * min(kind.window for kind in config.layers if kind.window) + 1)
    runner = NaiveRunner(config, build_params(config, read_tensors(FOLDER / name)), 1)
    assert np.abs(runner.run(texts[-1:], pad_to=160)[0] - hidden[-1]).max() > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_vectors_equal_the_reference_and_no_neighbour_changes_a_bit(name: str) -> None:
    texts, _, expected = read_golden(name)
    llm = start(FOLDER / name)
    found = embed(llm, texts)
    for vector, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(vector, reference, rtol=0, atol=1e-5 * max(1.0, float(np.abs(reference).max())))
    assert llm.ready.shapes.model.embedding_size == len(expected[0])
    for text, vector in zip(texts, found, strict=True):
        for beside in ([text], [texts[-1], text, text]):
            again = embed(llm, beside)[-1]
            np.testing.assert_allclose(again, vector, rtol=0, atol=1e-6)
            is_one_program = sum(map(len, beside)) > ROWS and llm.ready.shapes.model.reads_whole
            assert not is_one_program or np.array_equal(again, vector)
    with pytest.raises(InvalidRequestError, match="tasks are embed, score, not generate"):
        llm.generate({"prompt_token_ids": texts[0]}, SamplingParams(max_tokens=1))


def test_a_decoder_pools_its_last_token_behind_chunks_and_cached_prefixes() -> None:
    texts, _, expected = read_golden("qwen3_last")
    llm = start(FOLDER / "qwen3_last", max_num_batched_tokens=48, precompile_token_paddings=[48])
    for _ in range(2):
        for vector, reference in zip(embed(llm, texts), expected, strict=True):
            np.testing.assert_allclose(vector, reference, rtol=0, atol=1e-5)
    assert llm.embed({"prompt_token_ids": texts[-1]})[0].num_cached_tokens > 0


@pytest.mark.parametrize("name", ["bert_cls", "roberta_mean", "distilbert_mean"])
def test_sixteen_bits_keep_the_direction(name: str) -> None:
    texts, _, expected = read_golden(name)
    for vector, reference in zip(embed(start(FOLDER / name, dtype="bfloat16"), texts), expected, strict=True):
        assert vector @ reference >= 0.9999


def test_an_engine_that_embeds_is_healthy() -> None:
    async def check() -> None:
        sizes = {"max_num_batched_tokens": 256, "precompile_token_paddings": [256], "precompile_bs_paddings": [ROWS]}
        llm = AsyncLLM(str(FOLDER / "bert_mean"), skip_tokenizer_init=True, max_num_seqs=ROWS, **sizes, **CACHE)
        try:
            await llm.check_health()
        finally:
            llm.shutdown()

    asyncio.run(check())


def test_a_mean_that_is_not_finite_fails_alone() -> None:
    llm = start(FOLDER / "bert_mean")
    texts, _, _ = read_golden("bert_mean")
    bad, good = [5, 11, 6], [ids for ids in texts[1] if ids != 11]
    expected = embed(llm, [good])[0]
    table = jax.device_get(llm.ready.runner.params["embed"]["weight"]).copy()
    table[11] = np.nan
    llm.ready.runner.write_params({"embed.weight": table})
    engine, make, done = llm.ready.engine, llm.ready.requests.make_embedding, {}
    for name, ids in (("bad", bad), ("good", good)):
        engine.add_request(make(ids, request_id=name))
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert isinstance(done["bad"].error, NonFiniteLogitsError) and done["bad"].embedding is None
    np.testing.assert_allclose(done["good"].embedding, expected, rtol=0, atol=1e-6)


PUBLISHED = json.loads((Path(__file__).parent / "embedding_models.json").read_text())


def write_files(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        if name.endswith(".json"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name: str, tmp_path: Path) -> None:
    files = PUBLISHED[name]
    config = EngineConfig.from_options(model=str(write_files(tmp_path, files)), load_format="dummy")
    found = locate_model(config.model)
    model, expected = resolve_model(config, found), files["expected"]
    size, has_pooler = model.hidden_size, model.family in ("bert", "roberta", "xlm-roberta")
    count = files["parameters"] - files.get("unread", has_pooler * (size * size + size))
    assert sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(model))) == count
    shapes = [shape for source in weight_sources(model).values() for shape in source.shapes]
    assert sum(map(math.prod, shapes)) == count
    assert model.pooler.pooling_type == expected["pooling_type"] and model.pooler.normalizes == expected["normalizes"]
    assert model.embedding_size == expected["size"] and model.max_model_len == expected["max_model_len"]
    assert not model.generates and model.reads_whole == (expected["pooling_type"] != "LAST")
    assert found.modules is not None and found.modules.lowercases == (name == "bge-small-en-v1.5")
    assert model.causal or len(set(model.page_owners)) == len(set(model.windows)), "equal layers write the same pages"


def test_a_long_model_gets_steps_of_its_length(tmp_path: Path) -> None:
    config = EngineConfig.from_options(model=str(write_files(tmp_path, PUBLISHED["bge-m3"])), load_format="dummy")
    model = resolve_model(config, locate_model(config.model))
    shapes = make_shapes(config, model, "gpu", "NVIDIA H200")
    assert shapes.config.scheduler.max_num_batched_tokens == 8192
    plan = plan_pools(shapes, budget=2**40)
    tokens = (plan.num_pages[0] - 1) * plan.page_size
    assert 2 * 8192 <= tokens < 8 * 8192, "nothing stays behind a step"
    assert plan.bytes_per_device == plan.num_pages[0] * plan.page_size * 2 * 1024 * 4, "one layer's keys and values"
    less = EngineConfig.from_options(model=str(tmp_path), load_format="dummy", max_num_batched_tokens=1024)
    assert resolve_model(less, locate_model(less.model)).max_model_len == 1024


def with_modules(*modules: tuple[str, str]) -> dict[str, Any]:
    listed = [{"idx": index, "path": path, "type": kind} for index, (path, kind) in enumerate(modules)]
    return {"modules.json": listed}


PACKAGE = "sentence_transformers.models"
BASE = (("", f"{PACKAGE}.Transformer"), ("1_Pooling", f"{PACKAGE}.Pooling"))
DENSE = {**with_modules(*BASE, ("2_Dense", f"{PACKAGE}.Dense"))}
SPLADE = "sentence_transformers.sparse_encoder.models.{}"
JINA_V2 = {
    "architectures": ["JinaBertForMaskedLM"],
    "position_embedding_type": "alibi",
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
}
JINA_V3 = {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "lora_adaptations": ["retrieval.query"]}
NOMIC_V2 = PUBLISHED["nomic-embed-text-v1.5"]["config.json"] | {
    "moe_every_n_layers": 2,
    "position_embedding_type": None,
}
SIZES = {"in_features": 384, "out_features": 8}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (with_modules(*BASE, ("2_LSTM", f"{PACKAGE}.LSTM")), "LSTM.*is not read; known are Transformer"),
        (with_modules(*BASE[:1], ("1_Pooling", "other.models.Pooling")), "other.models.Pooling"),
        (with_modules(*BASE[:1]), "has the modules Transformer; read are"),
        (with_modules(*BASE, *BASE[1:]), "has the modules Transformer, Pooling, Pooling"),
        (with_modules(("0_Transformer", BASE[0][1]), BASE[1]), "in the folder '0_Transformer'"),
        (with_modules(BASE[0], ("../1_Pooling", BASE[1][1])), "must have a name like 1_Pooling"),
        ({"modules.json": {}}, "modules.json.*holds a dict where a list is expected"),
        (
            {"1_Pooling/config.json": {"pooling_mode": "median"}},
            "pools by 'median'; read are cls, mean, lasttoken, max",
        ),
        ({"1_Pooling/config.json": {"pooling_mode": ["cls", {}]}}, "pools by"),
        (
            {
                "1_Pooling/config.json": {"pooling_mode": "cls", "include_prompt": False},
                "config_sentence_transformers.json": {"prompts": {"q": "query: "}, "default_prompt_name": "q"},
            },
            "include_prompt: false",
        ),
        (
            {**with_modules(BASE[0], ("1_LogitScore", "sentence_transformers.cross_encoder.modules.LogitScore"))},
            "1_LogitScore/config.json",
        ),
        (
            {
                **with_modules(BASE[0], ("1_LogitScore", "sentence_transformers.cross_encoder.modules.LogitScore")),
                "1_LogitScore/config.json": {"true_token_id": 9693, "false_token_id": 2152},
            },
            "LogitScore needs a decoder",
        ),
        (
            with_modules(*BASE, ("2_Normalize", f"{PACKAGE}.Normalize"), ("3_Dense", f"{PACKAGE}.Dense")),
            "has the modules",
        ),
        ({"config.json": {"matryoshka_dimensions": 64}}, "must be a list of sizes, not 64"),
        ({"1_Pooling/config.json": {"pooling_mode": "cls", "odd": 3}}, "'odd' is not read"),
        ({"config_sentence_transformers.json": {"default_prompt_name": "query"}}, "'query' is none of its prompts"),
        ({"config_sentence_transformers.json": {"prompts": {"query": 3}}}, "prompts must be texts by name"),
        ({"sentence_bert_config.json": {"max_seq_length": "long"}}, "max_seq_length must be a number of tokens"),
        ({"sentence_bert_config.json": {"query_expansion": {"n": 1}}}, "'query_expansion' is not read"),
        (
            {**DENSE, "2_Dense/config.json": {**SIZES, "init_weight": [1]}},
            "'init_weight' is not read",
        ),
        (
            {
                **DENSE,
                "2_Dense/config.json": {**SIZES, "activation_function": "os.system"},
            },
            "the activation 'os.system' is not read",
        ),
        ({**DENSE, "2_Dense/config.json": {"in_features": 99, "out_features": 8}}, "takes vectors of 99.*gets 384"),
        ({"config.json": {"position_embedding_type": "relative_key"}}, "position_embedding_type"),
        ({"config.json": {"is_decoder": True}}, "is_decoder"),
        ({"config.json": {"architectures": ["BertForMultipleChoice"]}}, "BertForMultipleChoice"),
        ({"config.json": {"model_type": "mpnet", "architectures": ["MPNetModel"]}}, "mpnet.*relative positions"),
        ({"config.json": {"model_type": "t5", "architectures": ["T5EncoderModel"]}}, "t5.*relative positions"),
        ({"config.json": {"model_type": "deberta-v2", "architectures": ["DebertaV2Model"]}}, "DeBERTa"),
        ({"config.json": JINA_V2}, "ALiBi.*auto_map names is never run"),
        ({"config.json": {"architectures": ["HF_ColBERT"]}}, "for late interaction"),
        (with_modules(BASE[0], ("1_Dense", "pylate.models.Dense.Dense")), "module 'pylate.models.Dense.Dense' is not"),
        (
            with_modules(("", SPLADE.format("MLMTransformer")), ("1_SpladePooling", SPLADE.format("SpladePooling"))),
            "MLM",
        ),
        (with_modules(*BASE, ("2_CNN", f"{PACKAGE}.CNN")), "CNN' is not read"),
        ({"config.json": JINA_V3}, "lora_adaptations"),
        ({"config.json": NOMIC_V2}, "moe_every_n_layers"),
    ],
)
def test_what_is_not_read_is_refused_by_name(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    files = dict(PUBLISHED["all-MiniLM-L6-v2"])
    if "config.json" in changes:
        changes = {"config.json": {**files["config.json"], **changes["config.json"]}}
    config = EngineConfig.from_options(model=str(write_files(tmp_path, {**files, **changes})), load_format="dummy")
    with pytest.raises(ConfigError, match=words):
        resolve_model(config, locate_model(config.model))


@pytest.mark.parametrize(
    ("name", "options", "generates", "pooling_type"),
    [
        ("qwen3", {}, True, "LAST"),
        ("qwen3", {"runner": "pooling"}, False, "LAST"),
        ("qwen3", {"convert": "embed"}, False, "LAST"),
        ("qwen3", {"pooler_config": {"pooling_type": "LAST", "use_activation": False}}, True, "LAST"),
        ("qwen3", {"pooler_config": {"pooling_type": "MEAN"}}, False, "MEAN"),
        ("Qwen3-Embedding-0.6B", {"runner": "generate"}, True, "LAST"),
        ("Qwen3-Embedding-0.6B", {"convert": "none"}, True, "LAST"),
        ("all-MiniLM-L6-v2", {"runner": "pooling", "pooler_config": {"pooling_type": "CLS"}}, False, "CLS"),
        ("all-MiniLM-L6-v2", {"runner": "generate"}, "runner", "has no head"),
        ("all-MiniLM-L6-v2", {"pooler_config": {"dimensions": 385}}, "pooler_config.dimensions", "at most 384"),
        ("qwen3", {"runner": "generate", "pooler_config": {"pooling_type": "MEAN"}}, "runner", "computed whole"),
        ("qwen3", {"convert": "none", "pooler_config": {"pooling_type": "CLS"}}, "convert", "computed whole"),
        ("qwen3", {"runner": "generate", "convert": "embed"}, "convert", "runner is generate"),
        ("qwen3", {"runner": "pooling", "convert": "none"}, "convert", "runner is pooling"),
        ("qwen3", {"convert": "classify"}, "convert", "has no classes"),
        ("qwen3", {"pooler_config": {"pooling_type": "ALL"}}, False, "ALL"),
        ("qwen3", {"pooler_config": {"pooling_type": "STEP"}}, "pooler_config.pooling_type", "known are LAST, CLS"),
        ("qwen3", {"pooler_config": {"logit_mean": 1}}, "pooler_config.logit_mean", "is for classes"),
        ("qwen3", {"pooler_config": {"logit_sigma": 0}}, "pooler_config.logit_sigma", "is not supported"),
        ("qwen3", {"pooler_config": {"logit_sigma": "1"}}, "pooler_config.logit_sigma", "is not supported"),
        ("qwen3", {"pooler_config": {"logit_mean": math.nan}}, "pooler_config.logit_mean", "is not supported"),
        ("qwen3", {"pooler_config": {"logit_scale": 2}}, "pooler_config.logit_scale", "logit_sigma, which is 1 / "),
        ("qwen3", {"pooler_config": {"task": "token_embed"}}, "pooler_config.task", "pooling_type ALL"),
        ("qwen3", {"pooler_config": {"dimensions": 0}}, "pooler_config.dimensions", "an integer of at least 1"),
    ],
)
def test_options_choose_what_a_model_does(
    name: str, options: dict[str, Any], generates: bool | str, pooling_type: str, tmp_path: Path
) -> None:
    folder = GOLDENS / name if name not in PUBLISHED else write_files(tmp_path, PUBLISHED[name])
    if isinstance(generates, bool):
        config = EngineConfig.from_options(model=str(folder), load_format="dummy", **options)
        model = resolve_model(config, locate_model(config.model))
        assert (model.generates, model.pooler.pooling_type) == (generates, pooling_type)
        assert ("lm_head" in param_specs(model)) == (generates and not model.embedding.tied)
        return
    with pytest.raises(ConfigError, match=pooling_type) as raised:
        config = EngineConfig.from_options(model=str(folder), load_format="dummy", **options)
        resolve_model(config, locate_model(config.model))
    assert raised.value.field == generates


def write_tokenizer(folder: Path) -> None:
    """Letters are tokens 4 to 11, between [CLS] (2) and [SEP] (3)."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh"]
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    around = [("[CLS]", 2), ("[SEP]", 3)]
    library.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    library.add_special_tokens(words[:4])
    library.save(str(folder / "tokenizer.json"))


def test_prompts_of_the_files_stand_in_front_of_texts(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    shutil.copytree(FOLDER / "bert_cls", tmp_path, dirs_exist_ok=True)
    prompts = {"prompts": {"query": "a b ", "document": "", "long": "c c "}, "default_prompt_name": "long"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    llm = start(tmp_path, skip_tokenizer_init=False)
    for options, expected in (({"prompt_name": "query"}, [2, 4, 5, 7, 3]), ({"prompt_name": "document"}, [2, 7, 3])):
        assert llm.embed("d", **options)[0].prompt_token_ids == expected
    assert llm.embed("d")[0].prompt == "c c d" and llm.embed([[2, 7, 3]])[0].prompt_token_ids == [2, 7, 3]
    with pytest.raises(InvalidRequestError, match=r"model's prompts \(query, document, long\), got 'q'"):
        llm.embed("d", prompt_name="q")
    with pytest.raises(InvalidRequestError, match="is for texts, and these are token ids"):
        llm.embed([[2, 7, 3]], prompt_name="query")
    with pytest.raises(InvalidRequestError, match="pools no tokens of prompts"):
        add_prompt("d", Prompts({"query": "a "}, None, are_pooled=False), "query")


@pytest.mark.parametrize(
    ("config", "dimensions", "words"),
    [
        ({}, 384, None),
        ({}, 64, "does not say that they may be cut"),
        ({"is_matryoshka": True}, 64, None),
        ({"is_matryoshka": True}, 385, "at most 384"),
        ({"matryoshka_dimensions": [64, 128]}, 64, None),
        ({"matryoshka_dimensions": [64, 128]}, 384, None),
        ({"matryoshka_dimensions": [64, 128]}, 65, "must be one of 64, 128, 384, got 65"),
    ],
)
def test_vectors_are_cut_if_the_model_was_trained_so(
    config: dict[str, Any], dimensions: int, words: str | None
) -> None:
    model = parse_config(PUBLISHED["all-MiniLM-L6-v2"]["config.json"] | config)
    model = choose_pooling(model, PoolingOptions(), None, config)
    if words is None:
        return require_dimensions(model, dimensions)
    with pytest.raises(InvalidRequestError, match=words):
        require_dimensions(model, dimensions)


def test_a_text_is_cut_at_its_end_and_written_in_small_letters(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    shutil.copytree(FOLDER / "bert_cls", tmp_path, dirs_exist_ok=True)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 6, "do_lower_case": True}))
    llm = start(tmp_path, skip_tokenizer_init=False)
    (cut,) = llm.embed("A b C d e f g h", truncate_prompt_tokens=-1)
    assert cut.prompt_token_ids == [2, 4, 5, 6, 7, 3]
    (ids,) = llm.embed({"prompt_token_ids": list(range(10))}, truncate_prompt_tokens=3)
    assert ids.prompt_token_ids == [0, 1, 2]
    with pytest.raises(InvalidRequestError, match="maximum context length is 6 tokens, and the prompt alone has 10"):
        llm.embed("a b c d e f g h")
