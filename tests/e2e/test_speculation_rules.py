"""What holds around drafts: their distribution, new weights, faults, what is compiled, and what is refused."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from jaxserve.errors import ConfigError
from jaxserve.presets import demo_model_dir
from tests.e2e.drafters import (
    Counter,
    Mode,
    check_tally,
    compare,
    drive,
    list_texts,
    make_scripted,
    run_scripted,
    teach,
)
from tests.e2e.engines import Engines
from tests.e2e.helpers import generate_ids, greedy, make_demo, make_llm, read_weights
from tests.e2e.test_speculation import FEW_PAGES, INPUTS, PARAMS, PUSH, SHAPED_PARAMS, make
from tests.e2e.test_speculation_heads import CHATS, ask
from tests.e2e.test_speculation_text import DEMO_HEAD

ROWS = 32


@pytest.fixture
def plain(engines: Engines) -> LLM:
    return engines.get(make_llm, "llama_gqa", logits_processor=PUSH)


@pytest.fixture
def drafting(engines: Engines) -> LLM:
    return engines.get(make_scripted, make, 3)


@pytest.mark.thorough
def test_the_distribution_is_the_models() -> None:
    """20,000 pairs of tokens after one prompt: those that are drafted, and what follows accepted and other drafts.

    Pairs of an expected count below 5 are one class.
    """
    sizes = {"max_num_seqs": ROWS, "max_num_batched_tokens": 128, "page_size": 8, "max_model_len": 24}
    sizes |= {"precompile_bs_paddings": [ROWS], "precompile_token_paddings": [128], "max_logprobs": -1}
    llm = make_scripted(partial(make_llm, "llama_gqa", **sizes), 2)
    prompt, vocab, count = INPUTS[4]["prompt_token_ids"][:8], 331, 20_000
    one = greedy(1, logprobs=-1)

    def score(contexts: list[list[int]]) -> np.ndarray:
        outputs = llm.generate([{"prompt_token_ids": each} for each in contexts], one, use_tqdm=False)
        lines = [output.outputs[0].logprobs[0] for output in outputs]  # type: ignore[index]
        return np.array([[line[token].logprob for token in range(vocab)] for line in lines])

    (first,) = score([prompt])
    known = np.argsort(-first)[:12]  # what is drafted: each of the likeliest with the likeliest after it
    later = score([[*prompt, int(token)] for token in known])
    likely = zip(known.tolist(), later.argmax(axis=1).tolist(), strict=True)
    teach(llm, [[*prompt, token, after, 5, 5] for token, after in likely], Mode.RIGHT)
    counter = Counter(llm)
    inputs = [{"prompt_token_ids": prompt}] * (count // 100)
    params = [SamplingParams(seed=seed, max_tokens=4, ignore_eos=True, n=100) for seed in range(len(inputs))]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    tally = counter.read()
    assert 0.05 * tally.drafts < tally.accepted < 0.9 * tally.drafts and tally.chains > count / 4
    pairs = [completion.token_ids[:2] for output in outputs for completion in output.outputs]
    assert len(pairs) == count
    expected = count * np.exp(first[known][:, None] + later)  # [12, V]
    seen = np.zeros_like(expected)
    places = {int(token): place for place, token in enumerate(known)}
    for one_token, two in pairs:
        if one_token in places:
            seen[places[one_token], two] += 1
    is_class = expected >= 5
    others = count - expected[is_class].sum(), count - seen[is_class].sum()
    classes = [*zip(expected[is_class], seen[is_class], strict=True), others]
    assert len(classes) > 40
    statistic = sum((found - wanted) ** 2 / wanted for wanted, found in classes)
    assert find_p_value(statistic, len(classes) - 1) > 1e-4


def find_p_value(statistic: float, freedom: int) -> float:
    """The chance of a larger chi-squared statistic (Wilson and Hilferty, 1931)."""
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(deviation / math.sqrt(2))


def break_step(llm: LLM, number: int, where: str) -> None:
    """Lets the device fail once, in the `number`-th call of `where` from now on."""
    runner, whole = llm.ready.runner, getattr(llm.ready.runner, where)

    def call(*arguments: Any) -> Any:
        nonlocal number
        number -= 1
        if number == 0:
            setattr(runner, where, whole)
            raise RuntimeError("the device is lost")
        return whole(*arguments)

    setattr(runner, where, call)


@pytest.mark.parametrize("where", ["start", "sample"])
@pytest.mark.parametrize("number", [3, 7, 12])
def test_after_a_fault_drafting_goes_on(plain: LLM, drafting: LLM, where: str, number: int) -> None:
    """Rows in the failed step end with the error; the others come back with their tokens in the history."""
    expected = plain.generate(INPUTS, PARAMS, use_tqdm=False)
    teach(drafting, list_texts(expected), Mode.RIGHT)
    reset, engine = drafting.ready.runner.reset, drafting.ready.engine

    def reset_and_teach() -> None:
        reset()
        assert not np.asarray(drafting.ready.runner.device.rows.drafts).any(), "nothing stays of the drafts"
        teach(drafting, list_texts(expected), Mode.RIGHT)

    drafting.ready.runner.reset = reset_and_teach  # type: ignore[method-assign]
    counter = Counter(drafting)
    break_step(drafting, number, where)
    found = drafting.generate(INPUTS, PARAMS, use_tqdm=False)
    drafting.ready.runner.reset = reset  # type: ignore[method-assign]
    tally = check_tally(drafting, counter, Mode.RIGHT)
    assert tally.accepted == tally.drafts > 60
    good = [index for index, output in enumerate(found) if output.error is None]
    assert 1 <= len(found) - len(good) <= 4 and engine.counts.num_faults
    compare([found[index] for index in good], [expected[index] for index in good])
    run_scripted(drafting, INPUTS, PARAMS, expected, Mode.RIGHT)


def test_new_weights_while_rows_verify(plain: LLM, drafting: LLM) -> None:
    """Half of an answer is of the old weights and half of the new ones, as without drafts."""
    old = read_weights(plain)
    new = jax.tree_util.tree_map_with_path(lambda path, leaf: leaf * 0.7 if "norm" in str(path) else leaf, old)
    prompt = INPUTS[0]["prompt_token_ids"]
    (before,) = plain.generate(INPUTS[0], greedy(60), use_tqdm=False)
    old_ids, known = before.outputs[0].token_ids, []

    def update() -> None:
        drafting.update_weights(new)
        (stream,) = drafting.ready.engine._streams.values()
        known.extend(stream.sequence.token_ids[len(prompt) :])

    teach(drafting, list_texts([before]), Mode.MIXED)
    (found,) = drive(drafting, [drafting.ready.requests.make(INPUTS[0], greedy(60))], {9: update}).values()
    assert 8 < len(known) < 50 and known == old_ids[: len(known)]
    plain.update_weights(new)
    rest = generate_ids(plain, [[*prompt, *known]], greedy(60 - len(known)))[0]
    assert found.outputs[0].token_ids == [*known, *rest] != old_ids
    for llm in (plain, drafting):
        llm.update_weights(old)


def take_all_widths(llm: LLM) -> set[int]:
    """Lets an engine change the width of its steps all the time; returns the widths."""
    sizes = [(bucket.rows, bucket.width) for bucket in llm.ready.runner._buckets.buckets if bucket.width > 1]
    chooser, turn = llm.ready.engine.scheduler.planner._widths, 0
    choose = chooser.choose

    def choose_any(num_rows: int, *rest: Any, **named: Any) -> tuple[int, int]:
        nonlocal turn
        turn += 1
        choose(num_rows, *rest, **named)
        widths = sorted({1, *(width for rows, width in sizes if rows >= num_rows)})
        return widths[turn // 3 % len(widths)] if chooser._has_drafts else 1, widths[-1] - 1

    chooser.choose = choose_any  # type: ignore[method-assign]
    return {1, *(width for _, width in sizes)}


def run_without_compiling(llm: LLM, inputs: Any, params: Any) -> None:
    """Twice, the second time with hits; only the packed inputs may cross to the device by themselves."""
    widths = take_all_widths(llm)
    assert len(widths) > 1
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            ask(llm, inputs, params)
    assert {bucket.width for bucket, count in llm.ready.runner.counts.steps.items() if count} == widths
    assert llm.ready.runner.num_compiles == 0
    buckets = [bucket for bucket in llm.ready.runner._buckets.buckets if not bucket.is_mixed]
    is_timed = llm.ready.shapes.chooses_widths
    assert len(llm.ready.runner.step_costs) == (len(buckets) if is_timed else 0)


def test_nothing_compiles_after_ready() -> None:
    """Neither what verifies, nor what looks drafts up or remembers answers."""
    config: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 3}
    config |= {"num_speculative_tokens_per_batch_size": [[1, 1, 3]]}
    sizes = FEW_PAGES | {"max_num_seqs": 1, "precompile_bs_paddings": [1]}
    llm = make_llm("llama_gqa", speculative_config=config, compile="all", **sizes)
    shaped = [each for each in SHAPED_PARAMS if not each.extra_args]
    run_without_compiling(llm, INPUTS[:7], [greedy(40, logprobs=1, prompt_logprobs=1), *PARAMS[1:4], *shaped[:3]])


@pytest.mark.thorough
def test_nothing_compiles_after_ready_with_a_head() -> None:
    sizes = {"max_num_seqs": 2, "precompile_bs_paddings": [2]}
    llm = make_demo(speculative_config=DEMO_HEAD, compile="all", **sizes)
    params = [
        SamplingParams(temperature=0, max_tokens=40, logprobs=1),
        SamplingParams(seed=1, max_tokens=40, repetition_penalty=1.2),
        SamplingParams(
            seed=2, max_tokens=30, prompt_logprobs=1, structured_outputs=StructuredOutputsParams(regex="[a-z ]{5,40}")
        ),
        *[SamplingParams(seed=3, max_tokens=40)] * 3,
    ]
    run_without_compiling(llm, CHATS, params)


@pytest.mark.parametrize(
    ("config", "options", "field"),
    [
        ({"num_speculative_tokens": 200}, {}, "speculative_config.num_speculative_tokens"),
        ({"num_speculative_tokens": 64}, {"max_num_batched_tokens": 64}, "speculative_config.num_speculative_tokens"),
        ({}, {"kv_offloading_size": 0.01}, "kv_offloading_size"),
        ({}, {"max_decode_steps": 4}, "speculative_config"),
        ({}, {"deterministic": True}, "speculative_config"),
        ({"model": str(demo_model_dir())}, {}, "speculative_config.model"),
        ({"model": "/no/such/head"}, {}, "speculative_config.model"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(config: dict[str, Any], options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_demo(speculative_config=DEMO_HEAD | config, **options)
    assert caught.value.field == field
