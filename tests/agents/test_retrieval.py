"""Clients of rerankers and of embeddings that speak Cohere's and Jina's protocols: a tiny model of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.golden_cases import GOLDENS
from tests.server.conftest import FEW_PROGRAMS
from tests.server.running import RunningServer, run_server

WHERE = "it is in the environment of make test-agents"
cohere = pytest.importorskip("cohere", reason=WHERE)
langchain_cohere = pytest.importorskip("langchain_cohere", reason=WHERE)
jinaai_rerank = pytest.importorskip("llama_index.postprocessor.jinaai_rerank", reason=WHERE)

RERANKER = GOLDENS / "classifiers" / "bert"
GOLDEN = json.loads((RERANKER / "golden.json").read_text())
SIZES = ("--dtype", "float32", "--max-num-seqs", "8", "--max-num-batched-tokens", "128", *FEW_PROGRAMS)
MODEL = {"model": "demo"}


@pytest.fixture(scope="module")
def reranker() -> Iterator[RunningServer]:
    with run_server("--model", str(RERANKER), "--served-model-name", "demo", *SIZES) as server:
        yield server


@pytest.fixture(scope="module")
def embedder() -> Iterator[RunningServer]:
    model = ("--model", str(GOLDENS / "encoders" / "bert_mean"), "--tokenizer", str(RERANKER))
    with run_server(*model, "--served-model-name", "demo", *SIZES) as server:
        yield server


def list_queries() -> list[tuple[str, str, float]]:
    """The pairs that need no cut, and the scores of CrossEncoder."""
    both = zip(GOLDEN["pairs"], GOLDEN["scores"], strict=True)
    short = [(*pair, score) for pair, score in both if sum(len(text.split()) for text in pair) + 3 <= 40]
    assert len(short) >= 3
    return short


def rank(server: RunningServer, query: str, documents: list[str]) -> list[tuple[int, float]]:
    found = httpx.post(f"{server.url}/rerank", json={"query": query, "documents": documents}).json()["results"]
    return [(each["index"], each["relevance_score"]) for each in found]


@pytest.mark.parametrize("kind", ["Client", "ClientV2"])
def test_cohere_reranks(reranker: RunningServer, kind: str) -> None:
    client = getattr(cohere, kind)("none", base_url=reranker.url)
    queries = list_queries()
    for query, document, score in queries:
        (alone,) = client.rerank(query=query, documents=[document], **MODEL).results
        assert alone.relevance_score == pytest.approx(score, abs=1e-5)
    query, documents = queries[0][0], [document for _, document, _ in queries]
    found = client.rerank(query=query, documents=documents, top_n=2, **MODEL)
    expected = rank(reranker, query, documents)[:2]
    assert [each.index for each in found.results] == [index for index, _ in expected] and found.id
    np.testing.assert_allclose([each.relevance_score for each in found.results], [each for _, each in expected])
    with pytest.raises(cohere.BadRequestError, match="top_n"):
        client.rerank(query=query, documents=documents, top_n=0, **MODEL)


def test_cohere_embeds(embedder: RunningServer) -> None:
    client, texts = cohere.ClientV2("none", base_url=embedder.url), ["w1 w2", "w3"]
    answer = httpx.post(f"{embedder.url}/v1/embeddings", json={"input": texts}).json()["data"]
    vectors = [each["embedding"] for each in answer]
    found = client.embed(texts=texts, input_type="search_query", embedding_types=["float"], **MODEL)
    np.testing.assert_allclose(found.embeddings.float_, vectors, atol=1e-6)
    assert found.meta.billed_units.input_tokens == 7
    ranked = client.rerank(query="w1 w2", documents=["w3", "w1 w2"], **MODEL).results
    assert [each.index for each in ranked] == [1, 0], "by cosine"
    with pytest.raises(cohere.BadRequestError, match="output_dimension"):
        client.embed(texts=texts, input_type="search_query", output_dimension=33, embedding_types=["float"], **MODEL)


def test_langchain_compresses_documents(reranker: RunningServer) -> None:
    from langchain_core.documents import Document

    query, documents = list_queries()[0][0], [document for _, document, _ in list_queries()]
    client = langchain_cohere.CohereRerank(cohere_api_key="none", base_url=reranker.url, top_n=2, **MODEL)
    found = client.compress_documents([Document(text) for text in documents], query)
    expected = rank(reranker, query, documents)[:2]
    assert [each.page_content for each in found] == [documents[index] for index, _ in expected]
    scores: list[Any] = [each.metadata["relevance_score"] for each in found]
    np.testing.assert_allclose(scores, [score for _, score in expected])


def test_llama_index_reranks_nodes(reranker: RunningServer) -> None:
    from llama_index.core.schema import NodeWithScore, TextNode

    query, documents = list_queries()[0][0], [document for _, document, _ in list_queries()]
    client = jinaai_rerank.JinaRerank(top_n=2, base_url=f"{reranker.url}/v1", api_key="none", **MODEL)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in documents]
    found = client.postprocess_nodes(nodes, query_str=query)
    expected = rank(reranker, query, documents)[:2]
    assert [each.node.get_content() for each in found] == [documents[index] for index, _ in expected]
    np.testing.assert_allclose([each.score for each in found], [score for _, score in expected])
