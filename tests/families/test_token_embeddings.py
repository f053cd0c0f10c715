"""A vector for each token: `pooler_config={"pooling_type": "ALL"}`, of encoders and of decoders."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import LLM, PoolingParams
from jaxserve.config import EngineConfig
from jaxserve.core.runtime.startup import estimate_use
from jaxserve.engine.model_files import locate_model, resolve_model
from jaxserve.engine.pooling import choose_pooling
from jaxserve.errors import ConfigError, InvalidRequestError, NonFiniteLogitsError
from jaxserve.features.choose import make_shapes
from jaxserve.pooling_options import PoolerOverrides, PoolingOptions
from tests.families.encoders import FOLDER, ROWS, read_golden, start
from tests.golden_cases import GOLDENS

ALL = {"pooling_type": "ALL"}


def encode(llm: LLM, texts: list[list[int]], **options: Any) -> list[np.ndarray]:
    found = llm.encode([{"prompt_token_ids": ids} for ids in texts], **options)
    assert all(isinstance(each.data[0], list) for each in found) and not any(each.num_cached_tokens for each in found)
    return [np.array(each.data, np.float32) for each in found]


@pytest.mark.parametrize("name", ["bert_mean", "modernbert_cls", "qwen3_last"])
def test_vectors_of_tokens_are_the_references_states(name: str) -> None:
    texts, hidden, _ = read_golden(name)
    llm = start(FOLDER / name, pooler_config=ALL)
    together = encode(llm, texts, pooling_task="token_embed")
    for found, states in zip(together, hidden, strict=True):
        expected = states / np.linalg.norm(states, axis=1, keepdims=True)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    filler = texts[-1]  # so that short texts run in the same program
    for text, vectors in zip(texts, together, strict=True):  # a decoder would hit the prefixes of the first call
        assert np.array_equal(encode(llm, [filler, text])[1], vectors)
    with pytest.raises(InvalidRequestError, match="tasks are token_embed, not embed"):
        llm.embed({"prompt_token_ids": texts[0]})
    with pytest.raises(InvalidRequestError, match="tasks are token_embed, not score"):
        llm.score("a", "b")


def test_vectors_keep_their_length_or_are_cut() -> None:
    texts, hidden, _ = read_golden("bert_mean")
    options = {"hf_overrides": {"is_matryoshka": True}, "pooler_config": {**ALL, "use_activation": False}}
    llm = start(FOLDER / "bert_mean", **options)
    for found, states in zip(encode(llm, texts), hidden, strict=True):
        np.testing.assert_allclose(found, states, rtol=0, atol=1e-4)
    cut = encode(llm, texts[:2], pooling_params=PoolingParams(dimensions=5, use_activation=True))
    for found, states in zip(cut, hidden, strict=False):
        expected = states[:, :5] / np.linalg.norm(states[:, :5], axis=1, keepdims=True)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_states_that_are_not_finite_fail_alone_and_nothing_is_compiled_late() -> None:
    llm = start(FOLDER / "bert_mean", pooler_config=ALL, compile="all")
    runner, engine, done = llm.ready.runner, llm.ready.engine, {}
    assert set(runner.device.programs.of_kind("embed")) == {each.tokens for each in llm.ready.shapes.buckets.buckets}
    texts, _, _ = read_golden("bert_mean")
    bad, good = [5, 11, 6], [ids for ids in texts[1] if ids != 11]
    (expected,) = encode(llm, [good])
    one, _ = encode(llm, [[5], [6]])  # the smallest step: as many tokens as rows
    assert one.shape == (1, expected.shape[1])
    table = jax.device_get(runner.params["embed"]["weight"]).copy()
    table[11] = np.nan
    runner.write_params({"embed.weight": table})
    for name, ids in (("bad", bad), ("good", good), ("behind", bad)):
        engine.add_request(llm.ready.requests.make_embedding(ids, request_id=name))
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    for name in ("bad", "behind"):
        assert isinstance(done[name].error, NonFiniteLogitsError) and done[name].embedding is None
    np.testing.assert_allclose(done["good"].embedding, expected, rtol=0, atol=1e-6)
    assert runner.num_compiles == 0 and all(pool.num_referenced == 0 for pool in engine.scheduler.pages.pools)


def test_the_memory_plan_knows_the_vectors_of_two_steps() -> None:
    tokens = 4096
    options: dict[str, Any] = {"load_format": "dummy", "max_num_batched_tokens": tokens, "max_num_seqs": ROWS}
    state = {}
    for kind in ("ALL", "MEAN"):
        config = EngineConfig.from_options(
            model=str(FOLDER / "bert_mean"), pooler_config={"pooling_type": kind}, **options
        )
        model = dataclasses.replace(resolve_model(config, locate_model(config.model)), dtype="bfloat16")
        state[kind] = estimate_use(make_shapes(config, model, "gpu", "NVIDIA H200")).state
    assert state["ALL"] - state["MEAN"] == 2 * model.hidden_size * (tokens * (2 + 4) - 4 * ROWS)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("qwen3", {"runner": "generate"}, "of type ALL, for which texts are computed whole"),
        ("classifiers/bert", {}, "this model's head is for texts"),
    ],
)
def test_engines_that_cannot_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    folder = GOLDENS / name
    config = EngineConfig.from_options(model=str(folder), load_format="dummy", pooler_config=ALL, **options)
    with pytest.raises(ConfigError, match=words):
        resolve_model(config, locate_model(config.model))


def test_a_decoder_with_a_head_gives_it_up() -> None:
    config = EngineConfig.from_options(model=str(GOLDENS / "qwen3"), load_format="dummy")
    model = resolve_model(config, locate_model(config.model))
    chosen = choose_pooling(model, PoolingOptions(pooler_config=PoolerOverrides("ALL")), None)
    assert model.generates and not chosen.generates and chosen.reads_whole


def test_others_name_what_allows_it() -> None:
    llm = start(FOLDER / "bert_mean")
    with pytest.raises(InvalidRequestError, match=r"tasks are embed, score, not token_embed; start .*'ALL'"):
        llm.encode({"prompt_token_ids": [5]}, pooling_task="token_embed")
    with pytest.raises(InvalidRequestError, match="tasks are embed, score, not token_classify"):
        llm.encode({"prompt_token_ids": [5]}, pooling_task="token_classify")
