"""Answers of a deterministic engine are the same bits alone and among others; and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve import LLM
from jaxserve.core.runtime.rows import SampleVariant
from jaxserve.errors import CapacityError, ConfigError
from jaxserve.request import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from jaxserve.tools.cli import main
from jaxserve.tools.determinism import Comparison, compare_neighbourhoods, find_difference
from tests.e2e.helpers import DEMO, list_flags, make_demo, make_llm


def compare(llm: LLM, count: int) -> list[Comparison]:
    *_, last = compare_neighbourhoods(llm.ready, count)
    return last


def list_differences(comparisons: list[Comparison]) -> list[str]:
    return [difference for comparison in comparisons for difference in comparison.differences]


THOROUGH = [pytest.mark.slow, pytest.mark.thorough]
SHORT_STATES = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "bfloat16"}
MORE = ("qwen3_5", "qwen3_5_moe", "lfm2", "lfm2_moe", "granite_hybrid", "nemotron_h", "olmo_hybrid")


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("mistral_window", {}),
        ("qwen3_next", {}),  # a cut at 32 tokens in place of 64 changes its bits
        pytest.param("llama_bf16", {"dtype": "bfloat16"}, marks=THOROUGH),
        pytest.param("qwen3_next", {"enable_prefix_caching": False}, marks=THOROUGH),
        pytest.param("qwen3_next", SHORT_STATES, marks=THOROUGH),
        pytest.param("granite_hybrid", SHORT_STATES, marks=THOROUGH),
        *(pytest.param(case, {}, marks=THOROUGH) for case in MORE),
    ],
)
def test_a_dozen_neighbourhoods(case: str, options: dict[str, Any]) -> None:
    llm = make_llm(case, deterministic=True, **options)
    comparisons = compare(llm, 12)
    assert list_differences(comparisons) == []
    assert sum(each.num_runs for each in comparisons) == 12
    assert bool(sum(each.num_hits for each in comparisons)) == options.get("enable_prefix_caching", True)
    assert llm.ready.engine.scheduler.counts.num_preemptions == 0
    sizes = {(bucket.tokens, bucket.rows) for bucket in llm.ready.runner.counts.steps}
    assert sizes == {(4, 4), (64, 4)}, "two forward programs"
    programs = llm.ready.runner.device.programs
    assert set(programs.of_kind("sample")) == {(4, 1, SampleVariant.GREEDY), (4, 1, SampleVariant.MASKED)}


@pytest.mark.slow
@pytest.mark.thorough
def test_two_hundred_neighbourhoods_of_the_demo_model() -> None:
    comparisons = compare(make_demo(dtype="auto", deterministic=True), 200)
    assert list_differences(comparisons) == []


@pytest.mark.slow
def test_the_command_sees_that_an_ordinary_engine_differs(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify-determinism", "demo", "--neighbourhoods", "7", *list_flags(DEMO)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "deterministic on" in shown and "All 7 answers" in shown
    assert main([*command, "--no-deterministic"]) == 1
    shown = capsys.readouterr().out
    assert "deterministic off" in shown and "of 7 answers differ" in shown


def test_the_command_wants_neighbourhoods(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-determinism", "--neighbourhoods", "0"]) == 2
    assert "neighbourhoods: must be at least 1, got 0" in capsys.readouterr().err


def test_loops_of_decode_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_decode_steps: must be 1 with deterministic"):
        make_llm("llama_gqa", deterministic=True, max_decode_steps=4)
    with pytest.raises(ConfigError, match=r"priority_scheduling_preemption_threshold: must be left out with determ"):
        make_llm("llama_gqa", deterministic=True, priority_scheduling_preemption_threshold=5)


def test_a_pool_below_one_whole_need_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"max_model_len=160 are 5, and the pool has 4") as caught:
        make_llm("llama_gqa", enable_deterministic_inference=True, num_kv_pages_override=5)
    assert caught.value.field == "deterministic"


def make_output(token_ids: list[int], logprobs: list[float] | None = None) -> RequestOutput:
    lines: list[TokenLogprobs] | None = None
    if logprobs is not None:
        lines = [{token: Logprob(value)} for token, value in zip(token_ids, logprobs, strict=True)]
    return RequestOutput("r", None, [1], [CompletionOutput(0, "", token_ids, logprobs=lines)], finished=True)


def test_the_first_difference_is_named() -> None:
    alone = make_output([3, 4], [-0.5, -0.25])
    assert find_difference(alone, make_output([3, 4], [-0.5, -0.25])) is None
    assert find_difference(alone, make_output([3, 5], [-0.5, -0.25])) == "completion 0, token 1 is another one"
    assert find_difference(alone, make_output([3], [-0.5])) == "completion 0, token 1 is another one"
    least = -0.25 + 2**-54
    assert find_difference(alone, make_output([3, 4], [-0.5, least])) == (
        "completion 0, token 1 has another log-probability"
    )
    alone.embedding = [1.0]
    assert find_difference(alone, make_output([3, 4], [-0.5, -0.25])) == "the embedding differs"
