"""Models that read images against transformers; and fast paths, which give the tokens of slow ones."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from jaxserve import LLM
from tests.e2e.engines import Engines
from tests.e2e.helpers import LogitsRecorder, greedy, run_on_devices
from tests.e2e.image_prompts import (
    IMAGE,
    PAGE,
    WHOLE,
    answer,
    load_prompts,
    make_mixed_prompts,
    make_seeing,
    picture,
    run,
    show,
)
from tests.e2e.test_fast_equals_slow import make_mixed_params

MODELS = ("qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma4", "mistral3", "qwen3_5")
THOROUGH = pytest.mark.thorough
OTHERS = tuple(pytest.param(name, marks=THOROUGH) for name in ("llava", "qwen3_5_moe"))
CLOSE = 1e-4  # of the largest logit
PROMPTS = make_mixed_prompts(8)
PARAMS = make_mixed_params(8)


@pytest.fixture(scope="module")
def llm(engines: Engines) -> LLM:
    return engines.get(make_seeing)


@pytest.fixture(scope="module")
def alone(engines: Engines) -> list[list[int]]:
    """Every request by itself, whole prompts, nothing cached."""
    whole = engines.get(make_seeing, enable_prefix_caching=False, **WHOLE)
    return [answer(whole, [prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("model", [*MODELS, *OTHERS])
def test_logits_and_tokens_are_those_of_transformers(model: str, engines: Engines) -> None:
    """In chunks, which cut images where they may, beside each other."""
    golden, llm, num_cut = load_prompts(model), engines.get(make_seeing, model), 0
    with LogitsRecorder(llm) as recorder:
        outputs = run(llm, [each.prompt for each in golden.values()], greedy(64))
    for label, output, seen in zip(golden, outputs, golden.values(), strict=True):
        ids = tuple(output.prompt_token_ids)
        assert len(ids) == len(seen.logits) and output.outputs[0].token_ids == seen.greedy, label
        found = {place: row for (prompt, place), row in recorder.logits.items() if prompt == ids and place < len(ids)}
        assert len(ids) - 1 in found
        limit = CLOSE * np.abs(seen.logits).max()
        assert max(np.abs(row - seen.logits[place]).max() for place, row in found.items()) <= limit, label
        num_cut += sum(ids[place : place + 2] == (IMAGE, IMAGE) for place in found)
    assert (num_cut >= 2) == (not model.startswith("gemma")), "chunks that end inside an image"


@pytest.mark.parametrize("model", [MODELS[0], pytest.param(MODELS[1], marks=THOROUGH), *MODELS[2:], *OTHERS])
def test_every_token_of_a_prompt_has_the_logits_of_transformers(model: str, engines: Engines) -> None:
    """As log-probabilities of the prompt, in which a placeholder is a token as any other."""
    golden, llm = load_prompts(model), engines.get(make_seeing, model)
    outputs = run(llm, [each.prompt for each in golden.values()], greedy(1, prompt_logprobs=3))
    for label, output, seen in zip(golden, outputs, golden.values(), strict=True):
        wanted, limit = log_softmax(seen.logits.astype(np.float64), axis=-1), CLOSE * np.abs(seen.logits).max()
        first, *others = output.prompt_logprobs
        assert first is None and len(others) == len(wanted) - 1
        for token_id, line, row in zip(output.prompt_token_ids[1:], others, wanted, strict=False):
            assert token_id in line
            assert max(abs(each.logprob - row[id_]) for id_, each in line.items()) <= limit, label


@pytest.mark.parametrize("options", [{}, pytest.param({"async_scheduling": False}, marks=THOROUGH)])
def test_chunks_beside_neighbours_equal_whole_prompts_alone(
    options: dict[str, Any], alone: list[list[int]], engines: Engines
) -> None:
    assert answer(engines.get(make_seeing, **options), PROMPTS, PARAMS) == alone


def test_whole_prompts_of_transformers_are_answered_alone(engines: Engines) -> None:
    whole = engines.get(make_seeing, enable_prefix_caching=False, **WHOLE)
    for label, seen in load_prompts("qwen3_vl").items():
        assert answer(whole, [seen.prompt], greedy(64)) == [seen.greedy], label


def test_a_prefix_hit_equals_a_miss(llm: LLM, alone: list[list[int]]) -> None:
    """Hits end inside images, too."""
    for hit in (False, True):
        outputs = run(llm, PROMPTS, PARAMS)
        assert [output.outputs[0].token_ids for output in outputs] == alone
        if hit:
            wanted = [(len(output.prompt_token_ids) - 1) // PAGE * PAGE for output in outputs]
            assert [output.num_cached_tokens for output in outputs] == wanted


def test_a_hit_that_ends_inside_an_image_goes_on_with_its_rows(llm: LLM) -> None:
    """Its vectors are there or are computed again, when others have taken the rows."""
    prompt = show(10, picture(64, 64), 3)  # ids 11 to 74 are the image
    (first,) = run(llm, [prompt], greedy(20))
    assert len(first.prompt_token_ids) == 79
    longer = show(10, picture(64, 64), 3)
    longer["prompt_token_ids"] = [*prompt["prompt_token_ids"][:-1], 5, 6]
    for others in ([], [show(2, picture(64, 64, seed), 2) for seed in (1, 2, 3)]):
        answer(llm, others, greedy(1))
        (second,) = run(llm, [longer], greedy(20))
        assert second.num_cached_tokens == 64
        llm.reset_prefix_cache()
        assert answer(llm, [longer], greedy(20)) == [second.outputs[0].token_ids]
        answer(llm, [prompt], greedy(1))


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=THOROUGH)])
def test_preempted_equals_undisturbed(caching: bool, alone: list[list[int]], engines: Engines) -> None:
    tight = engines.get(make_seeing, num_kv_pages_override=8, enable_prefix_caching=caching)
    outputs = run(tight, PROMPTS, PARAMS)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    assert [output.outputs[0].token_ids for output in outputs] == alone


def test_a_state_inside_an_image_is_that_of_its_picture(engines: Engines) -> None:
    """The snapshot behind 64 tokens has seen the first rows of the picture."""
    llm = engines.get(make_seeing, "qwen3_5")
    prompts = [show(40, picture(48, 48, seed), 9) for seed in (1, 2)]  # ids 41 to 76 are the image
    found = []
    for prompt in [*prompts, *prompts]:
        with LogitsRecorder(llm) as recorder:
            (output,) = run(llm, [prompt], greedy(20))
        ids = tuple(output.prompt_token_ids)
        found.append((output, recorder.logits[ids, len(ids) - 1]))
    assert [output.num_cached_tokens for output, _ in found] == [0, 0, 64, 64], "pictures of one size share none"
    for (cold, row), (warm, other) in zip(found[:2], found[2:], strict=True):
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        assert np.abs(other - row).max() <= CLOSE * np.abs(row).max()
    assert found[0][0].outputs[0].token_ids != found[1][0].outputs[0].token_ids


_TP_SCRIPT = """
import json, sys
from tests.e2e.helpers import greedy
from tests.e2e.image_prompts import answer, load_prompts, make_seeing
from tests.e2e.test_images import PARAMS, PROMPTS
llm = make_seeing(sys.argv[1], tensor_parallel_size=2)
assert llm.ready.runner.device.cache[0].sharding.num_devices == 2
golden = load_prompts(sys.argv[1]).values()
print(json.dumps([answer(llm, PROMPTS, PARAMS), answer(llm, [each.prompt for each in golden], greedy(64))]))
"""


@pytest.mark.parametrize("model", [MODELS[0], *[pytest.param(model, marks=THOROUGH) for model in MODELS[1:]]])
def test_two_devices_equal_one(model: str, engines: Engines) -> None:
    wanted = answer(engines.get(make_seeing, model), PROMPTS, PARAMS)
    found = run_on_devices(2, _TP_SCRIPT, model)
    assert found == json.loads(json.dumps([wanted, [each.greedy for each in load_prompts(model).values()]]))
