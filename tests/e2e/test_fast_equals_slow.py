"""Fast paths give the tokens of slow ones: greedy and seeded, in f32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.families.registry import parse_config
from tests.e2e.engines import Engines
from tests.e2e.helpers import generate_ids, greedy, make_llm, run_on_devices
from tests.golden_cases import load_case

THOROUGH = [pytest.mark.slow, pytest.mark.thorough]
LONGER = ("qwen2_moe", "gpt_oss", "minimax_m2", "gemma4_text_shared", "deepseek_v3")
CASES = ("llama_gqa", *(pytest.param(name, marks=THOROUGH) for name in LONGER))
VOCAB = 83  # the least of the cases'
ROOT = Path(__file__).parents[2]


def make_prompts(count: int = 10, longest: int = 90) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def make_mixed_params(count: int) -> list[SamplingParams]:
    """Greedy and seeded rows side by side, with every parameter of the sampler."""
    rng = random.Random(11)
    params = []
    for index in range(count):
        if index % 3 == 0:
            params.append(greedy(rng.randint(5, 40)))
            continue
        params.append(
            SamplingParams(
                temperature=rng.choice([0.5, 0.9, 1.3]),
                top_k=rng.choice([0, 1, 7, 100]),
                top_p=rng.choice([1.0, 0.9, 0.5]),
                min_p=rng.choice([0.0, 0.05]),
                seed=rng.randrange(2**63),
                max_tokens=rng.randint(5, 40),
                ignore_eos=True,
            )
        )
    return params


PROMPTS = make_prompts()
PARAMS = make_mixed_params(len(PROMPTS))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(case: str, engines: Engines) -> LLM:
    """One row alone, and whole prompts, have programs of their own."""
    buckets = {"precompile_bs_paddings": [1, 4], "precompile_token_paddings": [64, 160]}
    return engines.get(make_llm, case, max_num_batched_tokens=160, **buckets)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """Every request by itself, whole prompts, nothing cached."""
    tokens = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        llm.ready.engine.scheduler.pages.drop_prefix_index()
        tokens += generate_ids(llm, [prompt], params)
    return tokens


def test_batched_equals_alone(llm: LLM, alone: list[list[int]]) -> None:
    assert generate_ids(llm, PROMPTS, PARAMS) == alone


def test_prefix_hit_equals_miss(llm: LLM, alone: list[list[int]]) -> None:
    generate_ids(llm, PROMPTS, PARAMS)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], PARAMS, use_tqdm=False)
    assert sum(output.num_cached_tokens for output in outputs) >= 32 * sum(len(p) > 32 for p in PROMPTS)
    assert [output.outputs[0].token_ids for output in outputs] == alone


def test_order_of_requests_does_not_matter(llm: LLM, alone: list[list[int]]) -> None:
    order = list(range(len(PROMPTS)))
    random.Random(3).shuffle(order)
    shuffled = generate_ids(llm, [PROMPTS[i] for i in order], [PARAMS[i] for i in order])
    assert shuffled == [alone[i] for i in order]


def test_chunked_plain_loop_equals_alone(case: str, alone: list[list[int]], engines: Engines) -> None:
    chunked = engines.get(make_llm, case, async_scheduling=False)
    longest = max(len(prompt) for prompt in PROMPTS)
    assert longest > 64, "some prompt must be cut into chunks"
    assert generate_ids(chunked, PROMPTS, PARAMS) == alone


def test_preempted_equals_not_preempted(case: str, alone: list[list[int]], engines: Engines) -> None:
    tight = engines.get(make_llm, case, num_kv_pages_override=7, enable_prefix_caching=False)
    outputs = tight.generate([{"prompt_token_ids": p} for p in PROMPTS], PARAMS, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    assert [output.outputs[0].token_ids for output in outputs] == alone


def test_windowed_groups_equal_with_and_without_pressure(engines: Engines) -> None:
    case = load_case("gemma2")
    rng = random.Random(5)
    vocab = int(case.config["vocab_size"])
    prompts = [[rng.randrange(3, vocab) for _ in range(rng.randint(10, 30))] for _ in range(6)]
    params = [greedy(70) for _ in prompts]
    wide, tight = engines.get(make_llm, "gemma2"), make_llm(case, num_kv_pages_override=8, page_size=16)
    expected = generate_ids(wide, prompts, params)
    outputs = tight.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert len(tight.ready.shapes.model.kv_groups) == 2
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    assert [output.outputs[0].token_ids for output in outputs] == expected


_TP_SCRIPT = """
import json, sys
from tests.e2e.engines import Engines
from tests.e2e.helpers import generate_ids, make_llm
from tests.e2e.test_fast_equals_slow import PARAMS, PROMPTS
by_expert = {"enable_expert_parallel": True} if sys.argv[2:] else {}
llm = make_llm(sys.argv[1], tensor_parallel_size=4, **by_expert)
assert llm.ready.runner.device.cache[0].sharding.num_devices == 4
print(json.dumps(generate_ids(llm, PROMPTS, PARAMS)))
"""


def test_tensor_parallel_equals_one_device(case: str, alone: list[list[int]]) -> None:
    assert run_on_devices(4, _TP_SCRIPT, case) == alone


@pytest.mark.parametrize(
    "name", ["qwen2_moe", *(pytest.param(name, marks=THOROUGH) for name in ("gpt_oss", "minimax_m2", "deepseek_v3"))]
)
def test_expert_parallel_equals_one_device(name: str, engines: Engines) -> None:
    assert parse_config(load_case(name).config).has_experts
    expected = generate_ids(engines.get(make_llm, name), PROMPTS, PARAMS)
    assert run_on_devices(4, _TP_SCRIPT, name, "by_expert") == expected
