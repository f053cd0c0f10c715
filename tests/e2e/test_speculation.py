"""Answers do not depend on drafts: token by token those of plain steps, whoever drafts."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, LogitsProcessor, SamplingParams
from jaxserve.request import RequestOutput
from tests.e2e.drafters import (
    Counter,
    Mode,
    Tally,
    check_tally,
    compare,
    drive,
    list_texts,
    make_scripted,
    run_scripted,
    teach,
)
from tests.e2e.engines import Engines
from tests.e2e.helpers import MAX_MODEL_LEN, greedy, make_llm, run_on_devices
from tests.e2e.test_decode_steps import PROMPTS, SHAPED, watch_widths
from tests.e2e.test_fast_equals_slow import PARAMS

INPUTS = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
FEW_PAGES: dict[str, Any] = {"page_size": 8, "num_kv_pages_override": 44}  # four of the longest rows do not fit
PUSH = LogitsProcessor(lambda logits, given: logits.at[7].add(given["push"]), ("push",))
make = partial(make_llm, "llama_gqa", **FEW_PAGES, logits_processor=PUSH)
MORE_SHAPED = [
    {"temperature": 1.2, "min_p": 0.03, "top_k": 30, "top_p": 0.9, "frequency_penalty": 1.0, "seed": 1},
    {"suppress_tokens": list(range(100, 200)), "repetition_penalty": 0.7},
    {"extra_args": {"push": 6.0}, "presence_penalty": 1.5, "temperature": 0.8, "seed": 2},
    {"temperature": 1.0, "seed": 8, "min_tokens": 6, "stop_token_ids": list(range(100, 300)), "ignore_eos": False},
]
SHAPED_PARAMS = [
    SamplingParams(**({"temperature": 0, "max_tokens": 40, "ignore_eos": True} | each))
    for each in (*SHAPED, *MORE_SHAPED)
]


@pytest.fixture
def plain(engines: Engines) -> LLM:
    return engines.get(make_llm, "llama_gqa", logits_processor=PUSH)


@pytest.fixture
def drafting(engines: Engines) -> LLM:
    """An engine that verifies three drafts of each row in every step without chunks."""
    return engines.get(make_scripted, make, 3)


def ask(plain: LLM, inputs: Any, params: Any) -> list[RequestOutput]:
    return plain.generate(inputs, params, use_tqdm=False)


def check(plain: LLM, drafting: LLM, inputs: Any, params: Any) -> dict[Mode, Tally]:
    """Compares both engines, drafts always right, always wrong and mixed."""
    expected = ask(plain, inputs, params)
    tallies = {mode: run_scripted(drafting, inputs, params, expected, mode) for mode in Mode}
    assert tallies[Mode.RIGHT].accepted == tallies[Mode.RIGHT].drafts
    assert tallies[Mode.MIXED].accepted > 0
    # At its last token a row has no drafts, and under overlap it is in one more step.
    most_without = 2 * sum(len(output.outputs) for output in expected)
    for mode in (Mode.RIGHT, Mode.WRONG):
        assert tallies[mode].chains >= tallies[mode].rows - most_without, mode
    return tallies


@pytest.mark.parametrize("count", [10, 1])
def test_greedy_and_seeded_rows(plain: LLM, drafting: LLM, count: int) -> None:
    check(plain, drafting, INPUTS[:count], PARAMS[:count])


def test_all_that_changes_logits_follows_the_tokens_of_a_run(plain: LLM, drafting: LLM) -> None:
    check(plain, drafting, INPUTS[: len(SHAPED_PARAMS)], SHAPED_PARAMS)


def test_shaped_rows_beside_others(plain: LLM, drafting: LLM) -> None:
    params = [*SHAPED_PARAMS[::2], *PARAMS[4:]]
    check(plain, drafting, INPUTS[: len(params)], params)


def test_the_runs_of_right_drafts_have_the_whole_width(
    plain: LLM, drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first token, which comes with the prompt."""
    (expected,) = ask(plain, INPUTS[:1], greedy(22))
    widths = watch_widths(drafting, monkeypatch)
    teach(drafting, list_texts([expected]), Mode.RIGHT)
    counter = Counter(drafting)
    outputs = drafting.generate(INPUTS[:1], greedy(22), use_tqdm=False)
    assert check_tally(drafting, counter, Mode.RIGHT) == Tally(6, 16, 16, [6, 5, 5], 6)
    assert outputs[0].metrics is not None and outputs[0].metrics.verified == ((3, 3),) * 5 + ((1, 1),)
    assert widths[:7] == [1] + [4] * 6
    compare(outputs, [expected])


def test_logprobs_are_those_of_plain_steps(plain: LLM, drafting: LLM) -> None:
    params = [
        greedy(17, logprobs=3, prompt_logprobs=2),
        SamplingParams(seed=4, max_tokens=21, logprobs=0, ignore_eos=True),
        greedy(9),
        SamplingParams(seed=5, max_tokens=30, logprobs=5, repetition_penalty=1.4, ignore_eos=True),
    ]
    check(plain, drafting, INPUTS[:4], params)


def test_several_completions(plain: LLM, drafting: LLM) -> None:
    """Their texts begin equal, so a right text is known for one of them only."""
    params = [SamplingParams(n=3, seed=7, max_tokens=20, ignore_eos=True, logprobs=1), greedy(14, n=2)]
    expected = ask(plain, INPUTS[3:5], params)
    for mode in Mode:
        tally = run_scripted(drafting, INPUTS[3:5], params, expected, mode)
        assert mode is Mode.WRONG or tally.accepted > 20


@pytest.mark.parametrize("place", range(4))
def test_what_ends_inside_a_run_ends_there(plain: LLM, drafting: LLM, place: int) -> None:
    """At a stop token, the longest answer and the longest sequence, wherever in a run these are."""
    free = ask(plain, INPUTS[:1], greedy(20))[0].outputs[0].token_ids
    at = next(at for at in range(5 + place, 20, 4) if free[at] not in free[:at])
    full = {"prompt_token_ids": [7 + place] * (MAX_MODEL_LEN - 6 - place)}
    inputs, params = (
        [INPUTS[0], INPUTS[1], full],
        [greedy(20, stop_token_ids=[free[at]]), greedy(6 + place), greedy(60)],
    )
    expected = ask(plain, inputs, params)
    assert [len(output.outputs[0].token_ids) for output in expected] == [at + 1, 6 + place, 6 + place]
    assert expected[0].outputs[0].stop_reason == free[at]
    tallies = check(plain, drafting, inputs, params)
    assert tallies[Mode.RIGHT].drafts < 40


def test_drafts_behind_a_stop_token_are_dropped(plain: LLM, drafting: LLM) -> None:
    """The drafter knows the text without the stop, so a run goes on behind it."""
    free = ask(plain, INPUTS[:1], greedy(20))
    ids = free[0].outputs[0].token_ids
    for at in (at for at in range(5, 12) if ids[at] not in ids[:at]):
        params = greedy(20, stop_token_ids=[ids[at]], logprobs=0)
        expected = ask(plain, INPUTS[:1], params)
        teach(drafting, list_texts(free), Mode.RIGHT)
        compare(drafting.generate(INPUTS[:1], params, use_tqdm=False), expected)


def test_too_few_pages_and_hits(plain: LLM, drafting: LLM) -> None:
    params = [greedy(70), *(SamplingParams(seed=seed, max_tokens=70, ignore_eos=True) for seed in range(9))]
    expected = ask(plain, INPUTS, params)
    counts = drafting.ready.engine.scheduler.counts
    preempted, hits = counts.num_preemptions, counts.prefix_hits
    for mode in Mode:
        run_scripted(drafting, INPUTS, params, expected, mode)
    assert counts.num_preemptions > preempted + 3
    (again,) = ask(plain, INPUTS[-1:], params[-1])
    run_scripted(drafting, INPUTS[-1:], params[-1], [again], Mode.RIGHT)
    assert counts.prefix_hits > hits


def test_a_prefix_that_was_drafted_is_that_of_plain_steps(plain: LLM, drafting: LLM) -> None:
    """An answer becomes the next prompt; its pages come from verify steps, and wrong drafts were written there."""
    (first,) = ask(plain, INPUTS[:1], greedy(45))
    longer = {"prompt_token_ids": list_texts([first])[0]}
    expected = ask(plain, longer, greedy(20, logprobs=1))
    for mode in Mode:
        drafting.reset_prefix_cache()
        run_scripted(drafting, INPUTS[:1], greedy(45), [first], mode)
        teach(drafting, list_texts(expected), mode)
        found = drafting.generate(longer, greedy(20, logprobs=1), use_tqdm=False)
        compare(found, expected)
        assert found[0].num_cached_tokens >= 32


def test_arrivals_aborts_and_embeddings_in_between(plain: LLM, drafting: LLM) -> None:
    prompts, params = INPUTS[:8], [greedy(30, logprobs=1) for _ in range(8)]
    expected = ask(plain, prompts, params)
    (vector,) = plain.embed(INPUTS[9], use_tqdm=False)
    requests, engine = drafting.ready.requests, drafting.ready.engine
    for mode in Mode:
        teach(drafting, list_texts(expected), mode)
        made = [requests.make(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        embedding = requests.make_embedding(INPUTS[9])
        events = {
            3: lambda made=made: engine.add_request(made[3]),
            5: lambda made=made: engine.abort_request(made[0].request_id),
            6: partial(engine.add_request, embedding),
            7: lambda made=made: [engine.add_request(each) for each in made[4:]],
            9: lambda made=made: engine.abort_request(made[5].request_id),
        }
        counter = Counter(drafting)
        done = drive(drafting, made[:3], events)
        check_tally(drafting, counter, mode)
        left = [index for index, each in enumerate(made) if each.request_id in done]
        assert {1, 2, 3, 4, 6, 7} <= set(left)
        compare([done[made[index].request_id] for index in left], [expected[index] for index in left])
        np.testing.assert_allclose(done[embedding.request_id].embedding, vector.embedding, atol=1e-5)


@pytest.mark.thorough
def test_without_overlap(plain: LLM) -> None:
    check(plain, make_scripted(partial(make, async_scheduling=False), 3), INPUTS, [*SHAPED_PARAMS, *PARAMS[8:]])


@pytest.mark.thorough
@pytest.mark.parametrize("num_drafts", [1, 2, 4, 5, 8])
def test_any_number_of_drafts(plain: LLM, num_drafts: int) -> None:
    drafting = make_scripted(make, num_drafts)
    check(plain, drafting, INPUTS, PARAMS)
    check(plain, drafting, INPUTS[: len(SHAPED_PARAMS)], SHAPED_PARAMS)


def test_widths_that_the_scheduler_chooses(plain: LLM) -> None:
    """Whatever it chooses; several widths can be compiled, and those that are were timed."""
    drafting = make_scripted(make, 3, forced=False)
    for mode in Mode:
        for params in (PARAMS, [*SHAPED_PARAMS, *PARAMS[8:]]):
            expected = ask(plain, INPUTS, params)
            teach(drafting, list_texts(expected), mode)
            compare(drafting.generate(INPUTS, params, use_tqdm=False), expected)
    runner, scheduler = drafting.ready.runner, drafting.ready.engine.scheduler
    assert len({bucket.width for bucket in runner._buckets.buckets}) == 3
    used = {(bucket.rows, bucket.width) for bucket in runner.counts.steps if not bucket.is_mixed}
    assert runner.step_costs.keys() == used and scheduler.widths is not None
    assert scheduler.widths._costs is runner.step_costs and max(width for _, width in used) > 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gemma2", "qwen3_bias_window"])
def test_windows(name: str) -> None:
    rng = random.Random(5)
    inputs = [{"prompt_token_ids": [rng.randrange(3, 80) for _ in range(rng.randint(1, 70))]} for _ in range(6)]
    params = [greedy(60), greedy(70, frequency_penalty=0.5), *PARAMS[1:3], *PARAMS[4:6]]
    plain, drafting = make_llm(name), make_scripted(partial(make_llm, name, page_size=8), 3)
    check(plain, drafting, inputs, params)


TP_PARAMS = SHAPED_PARAMS  # one sample program

_TP_SCRIPT = """
import json, sys
from tests.e2e.test_speculation import *
expected = json.loads(sys.argv[1])
drafting = make_scripted(partial(make, tensor_parallel_size=4), 3)
assert drafting.ready.runner.device.cache[0].sharding.num_devices == 4
for mode in Mode:
    teach(drafting, [[*prompt, *ids] for prompt, ids in zip(PROMPTS[:8], expected)], mode)
    counter = Counter(drafting)
    found = drafting.generate(INPUTS[:8], TP_PARAMS, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in found] == expected, mode
    tally = check_tally(drafting, counter, mode)
    assert mode is not Mode.RIGHT or tally.accepted == tally.drafts
print(json.dumps(True))
"""


@pytest.mark.thorough
def test_four_devices(plain: LLM) -> None:
    expected = [output.outputs[0].token_ids for output in ask(plain, INPUTS[:8], TP_PARAMS)]
    assert run_on_devices(4, _TP_SCRIPT, json.dumps(expected))
