"""A decoder generates and embeds many texts at once, with few pages: each answer is that of its lone run."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from jaxserve import LLM
from jaxserve.engine.stats import read_stats
from jaxserve.request import Request, RequestOutput
from tests.e2e.engines import Engines
from tests.e2e.helpers import greedy, make_llm

VOCAB = 300
PROMPT, ABORTED = 4, 10  # every so many texts one is a prompt to be answered, or is aborted on its way


def draw(rng: np.random.Generator, count: int) -> Iterable[list[int]]:
    """Texts of 1 to 150 tokens; half of them begin like one of four others, with pages that may be cached."""
    stems = rng.integers(3, VOCAB, (4, 64)).tolist()
    for index in range(count):
        own = rng.integers(3, VOCAB, int(rng.integers(1, 86))).tolist()
        yield (stems[index % 4] if index % 2 else []) + own


def run(llm: LLM, waiting: list[Request], aborted: set[str], most: int) -> dict[str, RequestOutput]:
    """Returns the outputs of requests, of which at most so many are in the engine, by name."""
    engine, done = llm.ready.engine, dict[str, RequestOutput]()
    queue, begun = waiting[::-1], set[str]()
    while queue or engine.has_unfinished:
        while queue and len(begun) < most:
            name = queue[-1].request_id
            engine.add_request(queue.pop())
            begun.add(name)
            if name in aborted:
                break  # it has one step
        done |= {output.request_id: output for output in engine.step() if output.finished}
        for name in begun & aborted:
            engine.abort_request(name)
        begun -= done.keys() | aborted
        engine.scheduler.pages.check()
    return done


@pytest.mark.slow  # it compiles all programs of an engine
@pytest.mark.parametrize("count", [80, pytest.param(1000, marks=pytest.mark.thorough)])
def test_each_answer_is_that_of_its_lone_run(count: int, engines: Engines) -> None:
    llm = engines.get(make_llm, "llama_gqa", compile="all", num_kv_pages_override=14)
    requests, rng = llm.ready.requests, np.random.default_rng(count)
    made, aborted = list[Request](), set[str]()
    for index, text in enumerate(draw(rng, count * 3 // 2)):
        prompt, name = {"prompt_token_ids": text}, str(index)
        made.append(
            requests.make_embedding(prompt, request_id=name)
            if index % PROMPT
            else requests.make(prompt, greedy(40), request_id=name)
        )
        aborted |= {name} if index % ABORTED == 6 else set()
    before = read_stats(llm.ready.engine)
    together = run(llm, made, aborted, most=40)
    after = read_stats(llm.ready.engine)
    assert after.num_preemptions > before.num_preemptions and after.num_compiles == before.num_compiles == 0
    assert all(pool.num_referenced == 0 for pool in llm.ready.engine.scheduler.pages.pools)
    num_embedded = 0
    for request in made:
        name, found = request.request_id, together.get(request.request_id)
        if found is None or found.outputs[0].finish_reason == "abort":
            assert name in aborted
            continue
        llm.reset_prefix_cache()
        (alone,) = run(llm, [request], set(), most=1).values()
        assert found.error is None and found.outputs[0].token_ids == alone.outputs[0].token_ids
        if alone.embedding is None:
            assert found.embedding is None and len(found.outputs[0].token_ids) == 40
            continue
        num_embedded += 1
        np.testing.assert_allclose(found.embedding, alone.embedding, rtol=0, atol=1e-5)
    assert num_embedded >= count
