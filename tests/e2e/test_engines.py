"""What a test leaves in a shared engine is found at its end."""

from __future__ import annotations

from collections.abc import Callable

import jax
import pytest

from jaxserve import LLM
from jaxserve.request import Request
from tests.e2e.engines import Engines
from tests.e2e.helpers import generate_ids, greedy, make_llm, read_weights


def leave_requests(llm: LLM) -> Callable[[], object]:
    engine = llm.ready.engine
    for index in range(6):
        engine.add_request(Request(str(index), (5, 6, 7), greedy(8)))
    engine.step()
    return lambda: (engine.abort_all(), engine.drain())


def leave_method(llm: LLM) -> Callable[[], object]:
    runner = llm.ready.runner
    runner.start = None  # type: ignore[method-assign, assignment]
    return lambda: vars(runner).pop("start")


def leave_weights(llm: LLM) -> Callable[[], object]:
    params = read_weights(llm)
    llm.update_weights(jax.tree.map(lambda leaf: 2 * leaf, params))
    return lambda: llm.update_weights(params)


def leave_page(llm: LLM) -> Callable[[], object]:
    (pool,) = llm.ready.engine.scheduler.pages.pools
    page, _ = pool.allocate()
    return lambda: pool.release([page])


@pytest.mark.parametrize(
    ("leave", "message"),
    [
        (leave_requests, "4 sequences have rows and 2 wait"),
        (leave_method, "ModelRunner.start is replaced"),
        (leave_weights, "other weights"),
        (leave_page, r"pages with an owner: \[1\]"),
    ],
)
def test_what_is_left_is_named_and_the_engine_is_forgotten(
    leave: Callable[[LLM], Callable[[], object]], message: str, engines: Engines
) -> None:
    made, mine = [], Engines()

    def make() -> LLM:
        made.append(engines.get(make_llm, "llama_gqa"))
        return made[-1]

    llm = mine.get(make)
    generate_ids(llm, [[5, 6, 7]], greedy(4))
    mine.check_rest()
    clean_up = leave(llm)
    with pytest.raises(AssertionError, match=message):
        mine.check_rest()
    clean_up()
    mine.check_rest()
    assert len(made) == 1 and mine.get(make) is mine.get(make) and len(made) == 2


def test_engines_of_other_options_are_others(engines: Engines) -> None:
    one, other = engines.get(make_llm, "llama_gqa"), engines.get(make_llm, "llama_gqa", enable_prefix_caching=False)
    assert one is engines.get(make_llm, "llama_gqa") and one is not other


def test_a_test_finds_nothing_cached(engines: Engines) -> None:
    llm = engines.get(make_llm, "llama_gqa")
    prompt = {"prompt_token_ids": [5] * 70}
    hits = [llm.generate(prompt, greedy(1), use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    engines.reset_prefix_caches()
    hits.append(llm.generate(prompt, greedy(1), use_tqdm=False)[0].num_cached_tokens)
    assert hits == [0, 64, 0]
