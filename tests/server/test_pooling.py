"""`/rerank`, `/score`, `/classify`, `/pooling` and `/v2/embed`, in process, with tiny models."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from jaxserve import AsyncLLM
from jaxserve.server.app import make_app
from jaxserve.server.options import ServerConfig
from jaxserve.server.server_state import ServerState
from tests.families.test_classifiers import ANSWERS, FOLDER, TEMPLATE, read_golden, start
from tests.golden_cases import GOLDENS
from tests.server.asgi import make_state

GOLDEN = read_golden("bert")
CUT = {"is_matryoshka": True}
QUERY, DOCUMENTS = GOLDEN["pairs"][1][0], [pair[1] for pair in GOLDEN["pairs"]]


def make_server(name: str | Path, **options: Any) -> ServerState:
    state = make_state(access_log=False)
    state.llm = start(name, AsyncLLM, compile="used", **options)
    return state


@pytest.fixture(scope="module")
def reranker() -> Iterator[ServerState]:
    state = make_server("bert")
    yield state
    state.llm.shutdown()


@pytest.fixture(scope="module")
def classifier() -> Iterator[ServerState]:
    state = make_server("bert_classes")
    yield state
    state.llm.shutdown()


@pytest.fixture(scope="module")
def embedder() -> Iterator[ServerState]:
    state = make_server(GOLDENS / "encoders" / "bert_mean", tokenizer=str(FOLDER / "bert"), hf_overrides=CUT)
    yield state
    state.llm.shutdown()


def ask(state: ServerState, path: str, body: dict[str, Any] | None, status: int = 200) -> Any:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    answer = asyncio.run(send())
    assert answer.status_code == status, answer.text
    return answer.json() if answer.headers["content-type"] == "application/json" else answer.text


def score(state: ServerState, query: str, documents: list[str], **options: Any) -> list[float]:
    found = asyncio.run(state.engine.score(query, documents, truncate_prompt_tokens=40, **options))
    return [each.score for each in found]


BODY: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS, "truncate_prompt_tokens": 40}


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_best_first(reranker: ServerState, path: str) -> None:
    expected = score(reranker, QUERY, DOCUMENTS)
    found = ask(reranker, path, BODY)
    order = np.argsort([-each for each in expected], kind="stable").tolist()
    assert [each["index"] for each in found["results"]] == order
    np.testing.assert_allclose(
        [each["relevance_score"] for each in found["results"]], np.array(expected)[order], atol=1e-6
    )
    assert [each["document"] for each in found["results"]] == [{"text": DOCUMENTS[index]} for index in order]
    assert found["id"].startswith("rerank-") and found["model"] == "demo"
    total = found["usage"]["total_tokens"]
    assert total == found["usage"]["prompt_tokens"] > sum(len(text.split()) for text in DOCUMENTS)
    two = ask(
        reranker,
        path,
        {**BODY, "top_n": 2, "return_documents": False, "documents": [{"text": each} for each in DOCUMENTS]},
    )
    assert two["results"] == [{key: each[key] for key in ("index", "relevance_score")} for each in found["results"][:2]]
    alike = ask(reranker, path, {"query": "w1", "documents": ["w2"] * 3})
    assert [each["index"] for each in alike["results"]] == [0, 1, 2]
    cut = ask(reranker, path, {**BODY, "max_tokens_per_doc": 2})["usage"]["total_tokens"]
    assert cut == sum(3 + 3 + min(2, len(text.split())) for text in DOCUMENTS)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_scores_come_in_order(reranker: ServerState, path: str, names: tuple[str, str]) -> None:
    queries = [pair[0] for pair in GOLDEN["pairs"]]
    cut = {"truncate_prompt_tokens": 40}
    found = ask(reranker, path, {names[0]: queries, names[1]: DOCUMENTS, **cut})
    np.testing.assert_allclose([each["score"] for each in found["data"]], GOLDEN["scores"], atol=1e-5)
    assert [(each["index"], each["object"]) for each in found["data"]] == [(index, "score") for index in range(5)]
    one = ask(reranker, path, {names[0]: QUERY, names[1]: DOCUMENTS, **cut})
    np.testing.assert_allclose([each["score"] for each in one["data"]], score(reranker, QUERY, DOCUMENTS), atol=1e-6)
    assert len(ask(reranker, path, {names[0]: "w1", names[1]: "w2"})["data"]) == 1


def test_classes_have_names(classifier: ServerState) -> None:
    golden = read_golden("bert_classes")
    texts = [text for pair in golden["pairs"] for text in pair]
    found = ask(classifier, "/classify", {"input": texts})
    powers = np.exp(golden["logits"])
    np.testing.assert_allclose([each["probs"] for each in found["data"]], powers / powers.sum(1)[:, None], atol=1e-5)
    assert [each["label"] for each in found["data"]] == ["bac"[index] for index in np.argmax(powers, 1)]
    assert {each["num_classes"] for each in found["data"]} == {3} and found["object"] == "list"
    raw = ask(classifier, "/pooling", {"input": texts, "use_activation": False, "task": "classify"})
    np.testing.assert_allclose([each["data"] for each in raw["data"]], golden["logits"], atol=1e-4)
    assert ask(classifier, "/v1/models", None)["data"][0]["tasks"] == ["classify"]
    page = ask(classifier, "/metrics", None)
    assert 'jaxserve:pooled_texts_total{engine="0",model_name="demo",task="classify"} 10.0' in page


def test_each_token_has_a_vector() -> None:
    options = {"tokenizer": str(FOLDER / "bert"), "pooler_config": {"pooling_type": "ALL"}}
    state = make_server(GOLDENS / "encoders" / "bert_mean", **options)
    try:
        (direct,) = asyncio.run(state.engine.encode(["w1 w2"]))
        for body in ({}, {"task": "token_embed"}):
            found = ask(state, "/pooling", {"input": ["w1 w2", "w3"], **body})
            assert [len(each["data"]) for each in found["data"]] == [4, 3]
            np.testing.assert_allclose(found["data"][0]["data"], direct.data, atol=1e-6)
        assert ask(state, "/v1/models", None)["data"][0]["tasks"] == ["token_embed"]
        for path, body in (("/v1/embeddings", {"input": "w1"}), ("/pooling", {"input": "w1", "task": "embed"})):
            assert "tasks are token_embed, not embed" in ask(state, path, body, 400)["error"]["message"]
        state.config = ServerConfig.from_options(max_pooled_numbers=7 * 32 - 1)
        error = ask(state, "/pooling", {"input": ["w1 w2", "w3"]}, 400)["error"]
        assert error["param"] == "input" and "224 numbers together, and one answer may have 223" in error["message"]
    finally:
        state.llm.shutdown()


def test_coheres_embeddings(embedder: ServerState) -> None:
    texts = ["w1 w2", "w3"]
    plain = [each["embedding"] for each in ask(embedder, "/v1/embeddings", {"input": texts})["data"]]
    found = ask(embedder, "/v2/embed", {"texts": texts, "input_type": "search_query"})
    assert found["embeddings"] == {"float": plain} and found["texts"] == texts
    assert found["meta"]["billed_units"] == {"input_tokens": 7} and found["response_type"] == "embeddings_by_type"
    both = ask(embedder, "/v2/embed", {"texts": texts, "embedding_types": ["base64", "float"], "output_dimension": 5})
    decoded = [np.frombuffer(base64.b64decode(each), np.float32) for each in both["embeddings"]["base64"]]
    np.testing.assert_array_equal(decoded, np.array(both["embeddings"]["float"], np.float32))
    np.testing.assert_allclose(np.linalg.norm(decoded, axis=1), 1, atol=1e-6)
    pooled = ask(embedder, "/pooling", {"input": texts, "dimensions": 5})
    assert [each["data"] for each in pooled["data"]] == both["embeddings"]["float"]
    long = "w1 " * 70
    assert ask(embedder, "/v2/embed", {"texts": [long]})["meta"]["billed_units"] == {"input_tokens": 64}
    assert ask(embedder, "/v2/embed", {"texts": [long], "max_tokens": 9})["meta"]["billed_units"] == {"input_tokens": 9}
    ranked = ask(embedder, "/rerank", {"query": "w1 w2", "documents": ["w3", "w1 w2"]})["results"]
    assert [each["index"] for each in ranked] == [1, 0] and ranked[0]["relevance_score"] == pytest.approx(1, abs=1e-5)


def test_coheres_purposes_choose_the_models_prompts(tmp_path: Path) -> None:
    for file in (GOLDENS / "encoders" / "bert_mean").iterdir():
        (tmp_path / file.name).symlink_to(file)
    prompts = {"query": "w5 w6 ", "passage": "w7 ", "Clustering": "w8 w8 w8 "}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    state = make_server(tmp_path, tokenizer=str(FOLDER / "bert"))

    def embed(**fields: str) -> Any:
        return ask(state, "/v2/embed", {"texts": ["w1"], **fields})["embeddings"]["float"]

    def embed_text(text: str) -> Any:
        return ask(state, "/v2/embed", {"texts": [text]})["embeddings"]["float"]

    try:
        assert embed(input_type="search_query") == embed_text("w5 w6 w1")
        assert embed(input_type="search_document") == embed_text("w7 w1")
        assert embed(input_type="clustering") == embed_text("w8 w8 w8 w1")
        assert embed(input_type="classification") == embed() == embed_text("w1")
    finally:
        state.llm.shutdown()


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("reranker", "/rerank", {"query": "", "documents": ["w1"]}, "query"),
    ("reranker", "/rerank", {"query": "w1", "documents": []}, "documents"),
    ("reranker", "/rerank", {"query": "w1", "documents": ["w1", ""]}, "documents[1]"),
    ("reranker", "/rerank", {"query": "w1", "documents": [{"txt": "w1"}]}, "documents[0]"),
    ("reranker", "/rerank", {"query": "w1", "documents": ["w1"], "top_n": 0}, "top_n"),
    ("reranker", "/rerank", {"query": "w1", "documents": ["w1"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
    ("reranker", "/rerank", {"query": "w1", "documents": ["w1 " * 70]}, "documents"),
    ("reranker", "/rerank", {"query": "w1", "documents": ["w1 " * 9000]}, "documents"),
    ("reranker", "/rerank", {"query": "w1", "documents": ["w1"] * 2049}, "documents"),
    ("reranker", "/rerank", {"query": "w1", "documents": ["w1"], "chat_template": "x"}, "chat_template"),
    ("reranker", "/rerank", {"query": "w1", "documents": ["w1"], "rank_fields": ["title"]}, "rank_fields"),
    ("reranker", "/rerank", {"query": "w1", "documents": ["w1"], "top_k": 3}, "top_k"),
    ("reranker", "/score", {"text_1": ["w1", "w2"], "text_2": ["w1", "w2", "w3"]}, "text_1"),
    ("reranker", "/score", {"text_1": "w1"}, "text_2"),
    ("reranker", "/score", {"queries": "w1", "text_2": "w2"}, "text_1"),
    ("reranker", "/score", {}, "text_1"),
    ("reranker", "/score", {"queries": ["w1", ""], "documents": ["w1", "w2"]}, "queries[1]"),
    ("reranker", "/v1/embeddings", {"input": "w1"}, "model"),
    ("reranker", "/v2/embed", {"texts": ["w1"]}, "model"),
    ("reranker", "/v1/completions", {"prompt": "w1"}, "model"),
    ("reranker", "/pooling", {"input": "w1", "task": "token_classify"}, "model"),
    ("reranker", "/pooling", {"input": "w1", "task": "reward"}, "task"),
    ("reranker", "/pooling", {"input": "w1", "task": "token_embed"}, "model"),
    ("embedder", "/pooling", {"input": "w1", "task": "token_embed"}, "model"),
    ("reranker", "/pooling", {"input": "w1", "dimensions": 1}, "dimensions"),
    ("classifier", "/rerank", {"query": "w1", "documents": ["w1"]}, "model"),
    ("classifier", "/classify", {"input": ""}, "input"),
    ("classifier", "/classify", {"input": []}, "input"),
    ("embedder", "/classify", {"input": "w1"}, "model"),
    ("embedder", "/rerank", {"query": "w1", "documents": ["w1"], "use_activation": True}, "use_activation"),
    ("embedder", "/rerank", {"query": "w1", "documents": ["w1"], "max_tokens_per_doc": 3}, "max_tokens_per_doc"),
    ("embedder", "/v2/embed", {"texts": []}, "texts"),
    ("embedder", "/v2/embed", {"texts": ["w1"], "embedding_types": ["int8"]}, "embedding_types[0]"),
    ("embedder", "/v2/embed", {"texts": ["w1"], "output_dimension": 33}, "output_dimension"),
    ("embedder", "/v2/embed", {"texts": ["w1"], "truncate": "START"}, "truncate"),
    ("embedder", "/v2/embed", {"texts": ["w1 " * 70], "truncate": "NONE"}, "texts"),
    ("embedder", "/v2/embed", {"texts": ["w1"], "images": ["data:"]}, "images"),
    ("embedder", "/pooling", {"input": "w1", "use_activation": False}, "use_activation"),
]


@pytest.mark.parametrize(("server", "path", "body", "param"), REFUSED)
def test_bad_bodies_are_named(
    server: str, path: str, body: dict[str, Any], param: str, request: pytest.FixtureRequest
) -> None:
    error = ask(request.getfixturevalue(server), path, body, 400)["error"]
    assert error["param"] == param, error
    assert param != "model" or "tasks are" in error["message"], error


def test_the_servers_template_is_that_of_prompts() -> None:
    state = make_server("qwen2_answers", hf_overrides=ANSWERS["qwen2_answers"])
    try:
        error = ask(state, "/rerank", {"query": "w1", "documents": ["w2"]}, 400)["error"]
        assert error["param"] == "chat_template" and "noise" in error["message"]
        expected = score(state, "w1", DOCUMENTS, chat_template=TEMPLATE)
        state.chat_template = TEMPLATE
        found = ask(state, "/score", {"text_1": "w1", "text_2": DOCUMENTS, "truncate_prompt_tokens": 40})
        np.testing.assert_allclose([each["score"] for each in found["data"]], expected, atol=1e-6)
    finally:
        state.llm.shutdown()
