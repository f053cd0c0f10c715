"""After ready: nothing compiles, nothing crosses to the device but what is put there, nothing stays behind."""

from __future__ import annotations

import logging
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.core.runtime.buckets import Bucket, make_buckets
from jaxserve.core.runtime.step_programs import list_programs
from jaxserve.core.scheduler import StepPlan
from jaxserve.errors import ConfigError, InvalidRequestError, MissingProgramError, NonFiniteLogitsError, WeightsError
from jaxserve.request import Request
from tests.e2e.engines import Engines
from tests.e2e.helpers import ALL_BUCKETS, generate_ids, greedy, make_llm, read_weights
from tests.golden_cases import load_case

VOCAB = 331


@pytest.fixture
def llm(engines: Engines) -> LLM:
    """Every program is compiled, and there are too few pages for four long rows."""
    return engines.get(make_llm, "llama_gqa", num_kv_pages_override=7, compile="all")


@pytest.fixture
def roomy(engines: Engines) -> LLM:
    return engines.get(make_llm, "llama_gqa")


def run_mixed_load(llm: LLM) -> list[list[int]]:
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 32, 64, 100]))] for _ in range(24)]
    params = [
        SamplingParams(
            temperature=rng.choice([0, 0.7]), top_p=rng.choice([1, 0.8]), seed=i, max_tokens=rng.randint(1, 30)
        )
        for i in range(24)
    ]
    return generate_ids(llm, prompts, params)


def test_nothing_compiles_after_ready(llm: LLM) -> None:
    compiled: list[str] = []
    counts = llm.ready.engine.scheduler.counts
    num_preemptions = counts.num_preemptions

    def listen(event: str, *_: object, **__: object) -> None:
        if "compil" in event or "trace" in event or "lower" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run_mixed_load(llm)
        assert compiled == [] and counts.num_preemptions > num_preemptions
        jax.jit(lambda x: x * 3.25)(np.float32(2))
        assert compiled, "the listener must see a compilation when there is one"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)  # others listen as well


@pytest.mark.thorough
def test_padded_sizes_are_those_of_the_options(llm: LLM) -> None:
    more = make_llm("llama_gqa", max_num_batched_tokens=96, num_kv_pages_override=7, compile="all", **ALL_BUCKETS)
    assert run_mixed_load(more) == run_mixed_load(llm)
    assert (
        set(llm.ready.runner.counts.steps)
        == {Bucket(4, 4), Bucket(64, 4)}
        == set(llm.ready.runner.device.programs.of_kind("forward"))
    )
    sizes = {Bucket(2, 2), Bucket(4, 4), Bucket(64, 4), Bucket(96, 4)}
    assert set(more.ready.runner.counts.steps) == sizes == set(more.ready.runner.device.programs.of_kind("forward"))
    assert more.ready.runner.num_compiles == 0


def test_only_the_explicit_transfer_is_made(llm: LLM) -> None:
    with jax.transfer_guard("disallow"):
        run_mixed_load(llm)
    runner = llm.ready.runner  # what else the call that sends the inputs is given lies on the device already
    assert all(
        isinstance(leaf, jax.Array)
        for leaf in jax.tree.leaves((runner.params, runner.device.cache, runner.device.rows))
    )


def test_programs_are_those_of_its_buckets(llm: LLM) -> None:
    programs = llm.ready.runner.device.programs
    wanted = list(list_programs(llm.ready.shapes.buckets))
    assert len(wanted) == len(programs) == 11
    assert all(each in programs for each in wanted)


def test_programs_of_the_defaults_are_few() -> None:
    kinds = Counter(kind for kind, _ in list_programs(make_buckets("cpu", 5, 96)))
    assert kinds["forward"] + 2 * kinds["logprobs"] <= 12, "of every step: forward, greedy and random"
    assert kinds["sample"] == 4 * kinds["logprobs"] and kinds.total() <= 30


def test_a_step_without_a_program_is_an_error_not_a_compilation(llm: LLM) -> None:
    plan = StepPlan(0, tuple(range(5)), tuple(range(5)), (), (), ())
    with pytest.raises(MissingProgramError, match="5 tokens in 5 rows"):
        llm.ready.runner.start(plan)


def test_pool_is_updated_in_place(llm: LLM) -> None:
    runner = llm.ready.runner
    pool_bytes = sum(pool.nbytes for pool in runner.device.cache)
    for program in runner.device.programs.of_kind("forward").values():
        analysis = program.memory_analysis()
        assert analysis.alias_size_in_bytes >= pool_bytes
    before = runner.device.cache[0].unsafe_buffer_pointer()
    generate_ids(llm, [[1, 2, 3]], greedy(3))
    assert runner.device.cache[0].unsafe_buffer_pointer() == before


def test_bad_requests_name_the_field_and_harm_nobody(llm: LLM) -> None:
    good = {"prompt_token_ids": [5, 6, 7]}
    expected = generate_ids(llm, [[5, 6, 7]], greedy(8))
    bad_prompts = [
        ("", "prompt"),
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [VOCAB]}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids"),
        ({"prompt_token_ids": [1] * 500}, "prompt"),
        ({"tokens": [1]}, "prompt"),
        (17, "prompt"),
    ]
    for prompt, field in bad_prompts:
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate([good, prompt], greedy(8), use_tqdm=False)
        assert caught.value.field == field, prompt
    assert generate_ids(llm, [[5, 6, 7]], greedy(8)) == expected


def test_non_finite_logits_end_one_request(roomy: LLM) -> None:
    expected = generate_ids(roomy, [[5, 6, 7]], greedy(6))
    original = read_weights(roomy)
    head = original["lm_head"]["weight"].copy()
    head[11] = np.nan
    roomy.ready.runner.write_params({"lm_head.weight": head})  # `update_weights` refuses it
    outputs = roomy.generate([{"prompt_token_ids": [5, 6, 7]}], greedy(6), use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert isinstance(outputs[0].error, NonFiniteLogitsError)
    roomy.update_weights(original)
    assert generate_ids(roomy, [[5, 6, 7]], greedy(6)) == expected


def test_update_weights_swaps_in_place_and_keeps_running_requests(roomy: LLM) -> None:
    llm = roomy
    original = read_weights(llm)
    first = generate_ids(llm, [[5, 6, 7, 8]], greedy(12))
    changed = jax.tree.map(lambda leaf: leaf * np.float32(1.5) if leaf.ndim > 1 else leaf.copy(), original)
    llm.update_weights(changed)
    second = generate_ids(llm, [[5, 6, 7, 8]], greedy(12))
    assert second != first
    jax.tree.map(lambda leaf: leaf.fill(np.nan), changed)  # the caller's arrays stay the caller's
    assert generate_ids(llm, [[5, 6, 7, 8]], greedy(12)) == second
    engine = llm.ready.engine
    engine.add_request(Request("running", (5, 6, 7, 8), greedy(12)))
    for _ in range(4):
        engine.step()
    llm.update_weights(original)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert outputs[-1].metrics is not None and outputs[-1].metrics.num_preemptions == 1
    assert len(outputs[-1].outputs[0].token_ids) == 12
    assert generate_ids(llm, [[5, 6, 7, 8]], greedy(12)) == first
    with pytest.raises(WeightsError, match="lack"):
        llm.update_weights({"embed": original["embed"]})
    with pytest.raises(ConfigError, match="running: must be 'requeue' or 'abort', got 'keep'"):
        llm.update_weights(original, running="keep")  # type: ignore[arg-type]
    assert generate_ids(llm, [[5, 6, 7, 8]], greedy(12)) == first


def test_new_weights_may_come_from_the_files_of_a_checkpoint(roomy: LLM, tmp_path: Path) -> None:
    llm, path = roomy, load_case("llama_gqa").path
    first = generate_ids(llm, [[5, 6, 7, 8]], greedy(12))
    changed = jax.tree.map(lambda leaf: leaf * 2, read_weights(llm))
    llm.update_weights(changed)
    assert generate_ids(llm, [[5, 6, 7, 8]], greedy(12)) != first
    compiles = llm.ready.runner.num_compiles
    llm.update_weights(path)
    assert llm.ready.runner.num_compiles == compiles
    assert generate_ids(llm, [[5, 6, 7, 8]], greedy(12)) == first
    for wrong in (tmp_path, load_case("llama_tied").path):
        with pytest.raises((WeightsError, ConfigError)):
            llm.update_weights(wrong)
    assert generate_ids(llm, [[5, 6, 7, 8]], greedy(12)) == first


def test_an_interrupt_at_any_program_harms_no_later_call(llm: LLM) -> None:
    prompts, params = [[5, 6, 7, 8], [9] * 40], greedy(6, repetition_penalty=1.2, logprobs=1)
    expected = generate_ids(llm, prompts, params)
    programs = llm.ready.runner.device.programs

    def interrupt(program: Any, *args: Any) -> None:
        program(*args)  # it has taken the donated state, and what it gives back gets lost
        raise KeyboardInterrupt

    for kind in ("forward", "sample", "set_row", "logprobs"):
        known = dict(programs.of_kind(kind))
        for key, program in known.items():
            programs.add(kind, key, partial(interrupt, program))
        with pytest.raises(KeyboardInterrupt):
            generate_ids(llm, prompts, params)
        for key, program in known.items():
            programs.add(kind, key, program)
        assert generate_ids(llm, prompts, params) == expected, kind


def test_logging_is_quiet(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        generate_ids(llm, [[1, 2]], greedy(2))
    assert caplog.records == []
