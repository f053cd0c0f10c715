"""Engines of models with recurrent states: fast paths give the tokens of slow ones, and no state outlives a request."""

from __future__ import annotations

import random
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import LLM
from jaxserve.errors import ConfigError
from tests.e2e.engines import Engines
from tests.e2e.helpers import generate_ids, greedy, make_llm
from tests.e2e.test_fast_equals_slow import PARAMS, PROMPTS
from tests.golden_cases import load_case

CASE = "qwen3_next"
THOROUGH = pytest.mark.thorough


@pytest.fixture(scope="module")
def llm(engines: Engines) -> LLM:
    return engines.get(make_llm, CASE)


@pytest.fixture(scope="module")
def alone(engines: Engines) -> list[list[int]]:
    """Every request by itself, with whole prompts."""
    whole = engines.get(make_llm, CASE, max_num_batched_tokens=160, precompile_token_paddings=[160])
    return [generate_ids(whole, [prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"async_scheduling": False}, marks=THOROUGH), {"max_decode_steps": 5}]
)
def test_chunks_beside_neighbours_equal_whole_texts_alone(
    options: dict[str, Any], alone: list[list[int]], engines: Engines
) -> None:
    assert generate_ids(engines.get(make_llm, CASE, **options), PROMPTS, PARAMS) == alone


def test_a_preempted_row_begins_again(alone: list[list[int]], engines: Engines) -> None:
    tight = engines.get(make_llm, CASE, num_kv_pages_override=7)
    outputs = tight.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    assert [output.outputs[0].token_ids for output in outputs] == alone


@pytest.mark.parametrize("case", ["qwen3_5", pytest.param("qwen3_5_moe", marks=THOROUGH)])
def test_other_families_give_the_tokens_of_the_reference(case: str, engines: Engines) -> None:
    golden = load_case(case)
    assert generate_ids(engines.get(make_llm, case), golden.prompts, greedy(64)) == golden.greedy


def test_siblings_compute_their_prompt_alike(llm: LLM) -> None:
    golden = load_case(CASE)
    (output,) = llm.generate({"prompt_token_ids": golden.prompts[4]}, greedy(20, n=3), use_tqdm=False)
    assert [each.token_ids for each in output.outputs] == [golden.greedy[4][:20]] * 3


def test_a_thousand_requests_leave_every_slot_free(llm: LLM) -> None:
    """Some are aborted, and the last tokens are those of the first time."""
    engine, rng, golden = llm.ready.engine, random.Random(1), load_case(CASE)
    requests = llm.ready.requests
    for index in range(1000):
        prompt = [rng.randrange(3, 83) for _ in range(rng.randint(1, 9))]
        engine.add_request(requests.make(prompt, greedy(rng.randint(1, 2)), request_id=f"r{index}"))
    steps = 0
    while engine.has_unfinished:
        engine.step()
        steps += 1
        engine.abort_request(f"r{steps * 7 % 1000}")
    assert not engine.scheduler.batch and not engine.scheduler.batch.is_full
    assert len(engine.scheduler.batch._free_rows) == 4
    assert all(pool.num_referenced == 0 for pool in engine.scheduler.pages.pools)
    assert generate_ids(llm, golden.prompts[3:], greedy(64)) == golden.greedy[3:]


@pytest.mark.thorough
def test_states_in_half_the_bytes_are_near(engines: Engines) -> None:
    golden = load_case(CASE)
    half = engines.get(make_llm, CASE, mamba_ssm_cache_dtype="bfloat16")
    assert half.ready.runner.device.cache[-1]["state"].dtype == "bfloat16"
    found = generate_ids(half, golden.prompts[3:], greedy(8))
    assert [ids[0] for ids in found] == [ids[0] for ids in golden.greedy[3:]]


@pytest.mark.parametrize(
    "scheme", ["int8_per_channel_weight_only", pytest.param("int4_per_group_weight_only", marks=THOROUGH)]
)
def test_projections_have_few_bits_and_what_decays_is_whole(scheme: str, engines: Engines) -> None:
    quantized = engines.get(make_llm, "qwen3_5", quantization=scheme)
    first, _, _, last = quantized.ready.runner.params["layers"]
    assert all(
        leaves[name]["weight"]["values"].dtype.name in ("int8", "int4")
        for leaves, name in ((first, "qkvz"), (last, "qkv"))
    )
    whole = {name: leaf for name, leaf in first.items() if name not in ("qkvz", "o", "gate_up", "down")}
    assert {"ba", "conv", "decay", "decay_bias", "out_norm"} < whole.keys()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(whole)} == {"float32"}
    golden = load_case("qwen3_5")
    tokens = generate_ids(quantized, golden.prompts, greedy(16))
    assert tokens == [generate_ids(quantized, [prompt], greedy(16))[0] for prompt in golden.prompts]
    if scheme.startswith("int8"):
        same = [
            one == other
            for ids, wanted in zip(tokens, golden.greedy, strict=True)
            for one, other in zip(ids, wanted[:16], strict=True)
        ]
        assert np.mean(same) > 0.5


def test_what_such_models_cannot_have_is_refused_by_name() -> None:
    for options in (
        {"kv_offloading_size": 0.01},
        {"deterministic": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ):
        (field,) = options
        with pytest.raises(ConfigError, match="is not for qwen3_next, which keeps a recurrent state") as raised:
            make_llm(CASE, **options)
        assert raised.value.field == field
