"""Embeddings: the state that transformers has, whatever else is in the batch and however the prompt was computed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve import LLM
from jaxserve.engine.stats import read_stats
from jaxserve.errors import InvalidRequestError, NonFiniteLogitsError
from jaxserve.request import RequestOutput
from tests.e2e.engines import Engines
from tests.e2e.helpers import MAX_MODEL_LEN, PROGRAMS, generate_ids, greedy, make_llm, read_weights, run_on_devices
from tests.golden_cases import GoldenCase, load_case

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-5  # of numbers in [-1, 1]; steps of other shapes add up in another order
LONG = [(7 * i) % 300 + 3 for i in range(150)]  # three chunks in steps of 64 tokens


@pytest.fixture
def llm(engines: Engines) -> LLM:
    return engines.get(make_llm, "llama_gqa")


def embed(llm: LLM, *prompts: list[int]) -> np.ndarray:
    outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
    return np.array([output.embedding for output in outputs], np.float32)


def assert_close(left: np.ndarray, right: np.ndarray) -> None:
    np.testing.assert_allclose(left, right, rtol=0, atol=TOLERANCE)


def recover_state(llm: LLM, case: GoldenCase, prompt: int) -> np.ndarray:
    """The last token's normed state as transformers has it, from the logits that it gives: they are linear in it."""
    at = case.logit_positions[prompt].tolist().index(len(case.prompts[prompt]) - 1)
    logits = case.logits[prompt][at].astype(np.float64)
    if (cap := case.config.get("final_logit_softcapping")) is not None:
        logits = cap * np.arctanh(logits / cap)
    params = read_weights(llm)
    head = np.asarray(params.get("lm_head", params["embed"])["weight"], np.float64)
    state, *_ = np.linalg.lstsq(head, logits, rcond=None)
    return state / np.linalg.norm(state)


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", pytest.param("qwen3", marks=pytest.mark.thorough)])
def test_equals_transformers(name: str, engines: Engines) -> None:
    case, served = load_case(name), engines.get(make_llm, name)
    found = embed(served, *case.prompts)
    expected = [recover_state(served, case, prompt) for prompt in range(len(case.prompts))]
    np.testing.assert_allclose(found, np.array(expected), rtol=0, atol=2e-4)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    assert np.abs(found[0] - found[1]).max() > 0.01, "prompts differ, and so do their embeddings"


def test_batch_equals_alone(llm: LLM) -> None:
    prompts = [[5], LONG[:33], [7, 8], LONG[20:90], LONG[3:67], [9] * 32]
    llm.ready.engine.scheduler.pages.drop_prefix_index()
    together = embed(llm, *prompts)
    llm.ready.engine.scheduler.pages.drop_prefix_index()
    assert_close(together, np.concatenate([embed(llm, prompt) for prompt in prompts]))


def test_chunks_equal_the_whole(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, counts = llm.ready.engine.scheduler, llm.ready.runner.counts
    for budget, num_steps in ((64, 1), (35, 2)):
        scheduler.pages.drop_prefix_index()
        limits = dataclasses.replace(scheduler.limits, max_num_batched_tokens=budget)
        monkeypatch.setattr(scheduler.planner, "limits", limits)
        before = sum(counts.steps.values())
        found = embed(llm, LONG[:60])
        assert sum(counts.steps.values()) - before == num_steps
        if num_steps == 1:
            expected = found
    assert_close(found, expected)


def test_hits_equal_misses(llm: LLM) -> None:
    llm.ready.engine.scheduler.pages.drop_prefix_index()
    before = llm.ready.runner.counts.useful_tokens
    first, again = (llm.embed({"prompt_token_ids": LONG}, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 128)
    assert llm.ready.runner.counts.useful_tokens - before == 150 + 22
    assert_close(np.array([first.embedding]), np.array([again.embedding]))
    generated = generate_ids(llm, [LONG], greedy(8))
    llm.ready.engine.scheduler.pages.drop_prefix_index()
    assert generate_ids(llm, [LONG], greedy(8)) == generated, "pages of an embedding serve generations as well"


def test_embeddings_and_generations_share_steps(llm: LLM) -> None:
    texts, prompts = [[11, 12, 13], LONG[:70]], [[4, 5], LONG[40:120]]
    generated, expected = generate_ids(llm, texts, greedy(40)), embed(llm, *prompts)
    llm.ready.engine.scheduler.pages.drop_prefix_index()
    engine, requests = llm.ready.engine, llm.ready.requests
    ids = [requests.make({"prompt_token_ids": text}, greedy(40)) for text in texts]
    vectors = [requests.make_embedding({"prompt_token_ids": prompt}) for prompt in prompts]
    for request in (ids[0], vectors[0], ids[1], vectors[1]):
        engine.add_request(request)
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert [done[request.request_id].outputs[0].token_ids for request in ids] == generated
    assert all(done[request.request_id].embedding is None for request in ids)
    outputs = [done[request.request_id] for request in vectors]
    assert_close(np.array([output.embedding for output in outputs]), expected)
    for output in outputs:
        (completion,) = output.outputs
        assert (completion.token_ids, completion.text, completion.finish_reason) == ([], "", "stop")


def test_nothing_is_compiled_and_nothing_stays_behind(llm: LLM) -> None:
    prompts = [5], LONG, [6, 7]
    embed(llm, *prompts)
    llm.reset_prefix_cache()
    before = read_stats(llm.ready.engine).num_compiles  # of this engine's first steps, and of others
    with jax.transfer_guard("disallow"):
        embed(llm, *prompts)
    assert read_stats(llm.ready.engine).num_compiles == before
    assert len(llm.ready.runner.device.programs.of_kind("embed")) == len(llm.ready.shapes.buckets.row_counts)
    assert all(pool.num_referenced == 0 for pool in llm.ready.engine.scheduler.pages.pools)


def test_bad_prompts_are_named_and_long_ones_can_be_cut(llm: LLM) -> None:
    too_long = {"prompt_token_ids": [5] + [(3 * i) % 300 + 3 for i in range(MAX_MODEL_LEN)]}
    with pytest.raises(InvalidRequestError, match=f"prompt: .*maximum context length is {MAX_MODEL_LEN} tokens"):
        llm.embed([{"prompt_token_ids": [5]}, too_long], use_tqdm=False)
    for bad, field in ((0, "truncate_prompt_tokens"), ("1", "truncate_prompt_tokens")):
        with pytest.raises(InvalidRequestError, match=field):
            llm.embed(too_long, truncate_prompt_tokens=bad, use_tqdm=False)  # type: ignore[arg-type]
    (cut,) = llm.embed(too_long, truncate_prompt_tokens=-1, use_tqdm=False)
    assert cut.prompt_token_ids == too_long["prompt_token_ids"][-MAX_MODEL_LEN:], "no answer needs room"
    (last,) = llm.embed(too_long, truncate_prompt_tokens=4, use_tqdm=False)
    assert_close(np.array([last.embedding]), embed(llm, too_long["prompt_token_ids"][-4:]))


def test_a_state_that_is_not_finite_ends_its_request_alone(llm: LLM) -> None:
    expected = embed(llm, [5, 6, 7])
    params = read_weights(llm)
    embedding = params["embed"]["weight"].copy()
    embedding[11] = np.nan
    llm.ready.runner.write_params({"embed.weight": embedding})  # `update_weights` refuses it
    engine, make = llm.ready.engine, llm.ready.requests.make_embedding
    bad, good = make({"prompt_token_ids": [5, 11]}), make({"prompt_token_ids": [5, 6, 7]})
    engine.add_request(bad)
    engine.add_request(good)
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step()}
    assert isinstance(done[bad.request_id].error, NonFiniteLogitsError) and done[bad.request_id].embedding is None
    assert_close(np.array([done[good.request_id].embedding]), expected)
    with pytest.raises(NonFiniteLogitsError):
        llm.embed([{"prompt_token_ids": [5, 11]}, {"prompt_token_ids": [5]}], use_tqdm=False)
    assert_close(embed(llm, [5, 6, 7]), expected)
    llm.update_weights(params)


TWO_DEVICES = """
import json, sys
from tests.e2e.helpers import make_llm
llm = make_llm("llama_gqa", tensor_parallel_size=2, compilation_cache_dir=sys.argv[1])
prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])]
print(json.dumps([output.embedding for output in llm.embed(prompts, use_tqdm=False)]))
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_two_devices_equal_one(llm: LLM) -> None:
    prompts = [[5], LONG[:40], [7, 8, 9]]
    found = run_on_devices(2, TWO_DEVICES, str(PROGRAMS), json.dumps(prompts))
    assert_close(np.array(found), embed(llm, *prompts))
