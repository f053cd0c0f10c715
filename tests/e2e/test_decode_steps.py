"""Several decode steps in one dispatch give the answers of one step at a time."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import ConfigError
from tests.e2e.engines import Engines
from tests.e2e.helpers import MAX_MODEL_LEN, generate_ids, greedy, make_llm
from tests.e2e.test_fast_equals_slow import PARAMS, make_prompts

PROMPTS = [[token % 80 for token in prompt] for prompt in make_prompts()]  # one of the models knows 83 tokens
SHAPED = [
    {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"frequency_penalty": 0.5, "temperature": 0.7, "seed": 3},
    {"logit_bias": {5: 4.0, 6: -100.0}, "min_tokens": 4, "stop_token_ids": [5]},
    {"allowed_token_ids": list(range(3, 60)), "temperature": 1.0, "seed": 9},
]


def watch_widths(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the width of each step from now on."""
    widths: list[int] = []
    start = llm.ready.runner.start

    def note(plan: Any) -> Any:
        widths.append(plan.width)
        return start(plan)

    monkeypatch.setattr(llm.ready.runner, "start", note)
    return widths


@pytest.fixture(params=["llama_gqa", pytest.param("qwen3_bias_window", marks=pytest.mark.thorough)])
def pair(request: pytest.FixtureRequest, engines: Engines) -> tuple[LLM, LLM]:
    """An engine that decodes step by step, and one that loops."""
    return engines.get(make_llm, request.param), engines.get(make_llm, request.param, max_decode_steps=5)


@pytest.mark.parametrize("count", [10, 3, 1])
def test_loops_give_the_tokens_of_single_steps(
    pair: tuple[LLM, LLM], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, looping = pair
    widths = watch_widths(looping, monkeypatch)
    found = generate_ids(looping, PROMPTS[:count], PARAMS[:count])
    assert found == generate_ids(plain, PROMPTS[:count], PARAMS[:count])
    assert 5 in widths


def test_shaped_logits_follow_the_tokens_of_a_loop(pair: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, looping = pair
    params = [SamplingParams(**({"temperature": 0, "max_tokens": 40, "ignore_eos": True} | case)) for case in SHAPED]
    widths = watch_widths(looping, monkeypatch)
    assert generate_ids(looping, PROMPTS[:4], params) == generate_ids(plain, PROMPTS[:4], params)
    assert 5 in widths


def test_rows_end_at_the_models_length_inside_a_loop(pair: tuple[LLM, LLM]) -> None:
    plain, looping = pair
    prompts = [[7] * (MAX_MODEL_LEN - left) for left in (1, 3, 4, 9, 21)]
    found = generate_ids(looping, prompts, greedy(99))
    assert [len(ids) for ids in found] == [1, 3, 4, 9, 21]
    assert found == generate_ids(plain, prompts, greedy(99))


def test_rows_that_the_host_must_see_decode_step_by_step(
    pair: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, looping = pair
    params = greedy(20, logprobs=2)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:3]]
    widths = watch_widths(looping, monkeypatch)
    outputs = [llm.generate(prompts, params, use_tqdm=False) for llm in (looping, plain)]
    assert [o.outputs[0].token_ids for o in outputs[0]] == [o.outputs[0].token_ids for o in outputs[1]]
    assert set(widths) == {1}


@pytest.mark.thorough
def test_tight_pools_preempt_and_lose_nothing() -> None:
    sizes: dict[str, Any] = {"page_size": 8, "num_kv_pages_override": 34}
    plain, looping = make_llm("llama_gqa", **sizes), make_llm("llama_gqa", max_decode_steps=16, **sizes)
    params = greedy(70)
    outputs = looping.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    assert [output.outputs[0].token_ids for output in outputs] == generate_ids(plain, PROMPTS, params)
    looping.ready.engine.scheduler.pages.check()


@pytest.mark.thorough
def test_nothing_compiles_after_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    looping = make_llm("llama_gqa", max_decode_steps=3, compile="all")
    widths = watch_widths(looping, monkeypatch)
    generate_ids(looping, PROMPTS, PARAMS)
    assert 3 in widths and looping.ready.runner.num_compiles == 0


def test_too_many_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_decode_steps: must be at most 16, got 17"):
        make_llm("llama_gqa", max_decode_steps=17)
