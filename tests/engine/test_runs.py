"""Rows that bring several tokens at once: the same answers, ends, log-probabilities and counters as token by token."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.scheduler import Scheduler, SchedulerLimits
from jaxserve.engine.engine import Engine
from jaxserve.engine.stats import read_rows
from jaxserve.errors import GrammarError, NonFiniteLogitsError
from jaxserve.features.grammars import MatcherError
from jaxserve.request import CompletionOutput, Request, RequestOutput
from jaxserve.sampling_params import OutputKind, SamplingParams
from jaxserve.scheduler_options import SchedulerOptions
from jaxserve.token_automaton import TokenAutomaton
from tests.engine.test_output import Letters
from tests.fake_device import FakeDevice, continue_alone

VOCAB, WINDOWS = 26, [None, 40]
PROMPT = (1, 2, 3)
ALONE = continue_alone(PROMPT, 197, WINDOWS, VOCAB)
TEXT = "".join(chr(ord("a") + token_id) for token_id in ALONE)


class NamedLetters(Letters):
    """Those that log-probabilities can name."""

    special_ids: frozenset[int] = frozenset()

    def new_stream(self, *_: Any) -> Letters:
        return Letters()

    def decode_token(self, token_id: int) -> str:
        return chr(ord("a") + token_id)


class Ends:
    """A grammar that the device follows: complete after some tokens, or refusing one."""

    def __init__(self, stop_at: int = -1, refuse_at: int = -1) -> None:
        self._stop_at, self._refuse_at, self._count = stop_at, refuse_at, 0

    def new_matcher(self) -> Ends:
        return Ends(self._stop_at, self._refuse_at)

    @property
    def is_finished(self) -> bool:
        return self._count == self._stop_at

    def accept(self, token_id: int) -> None:
        self._count += 1
        if self._count == self._refuse_at:
            raise MatcherError(f"the grammar does not allow the token id {token_id}")


def make_engine(
    draw_length: Callable[[int], int], *, overlap: bool = True, num_pages: int = 80, steps: int = 1
) -> Engine:
    """An engine whose rows bring runs, planned as such where `steps` is more than 1."""
    groups = [PageGroup(num_pages, window) for window in WINDOWS]
    pages = PageManager(groups, page_size=32, max_chunk=96, enable_prefix_caching=True)
    limits = SchedulerLimits(
        max_num_seqs=6,
        max_num_batched_tokens=96,
        max_model_len=200,
        max_prefix_updates=30,
        loop_rows=6,
        options=SchedulerOptions(max_decode_steps=steps),
    )
    device = FakeDevice(groups, page_size=32, vocab_size=VOCAB)
    device.draw_length = draw_length
    return Engine(Scheduler(limits, pages), device, tokenizer=NamedLetters(), overlap=overlap)  # type: ignore[arg-type]


def run(engine: Engine, *requests: Request) -> list[RequestOutput]:
    for request in requests:
        engine.add_request(request)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
        for row in read_rows(engine):
            assert row.num_computed_tokens <= row.num_tokens + 8, "at most the step in flight is ahead"
        engine.scheduler.pages.check()
    assert all(pool.num_referenced == 0 for pool in engine.scheduler.pages.pools)
    return outputs


def join(outputs: list[RequestOutput], kind: OutputKind) -> dict[tuple[str, int], dict[str, Any]]:
    """What each completion said in all, by request and index."""
    pieces: dict[tuple[str, int], list[CompletionOutput]] = {}
    for output in outputs:
        for completion in output.outputs:
            pieces.setdefault((output.request_id, completion.index), []).append(completion)
    said = {}
    for name, completions in pieces.items():
        whole = completions if kind is OutputKind.DELTA else completions[-1:]
        last = completions[-1]
        said[name] = {
            "text": "".join(each.text for each in whole),
            "token_ids": [token_id for each in whole for token_id in each.token_ids],
            "logprobs": [entry for each in whole for entry in each.logprobs or ()],
            "end": (last.finish_reason, last.stop_reason, last.cumulative_logprob),
        }
    return said


CASES: dict[str, dict[str, Any]] = {
    "length": {"max_tokens": 70},
    "length of the model": {"max_tokens": None},
    "logprobs": {"max_tokens": 40, "logprobs": 1},
    "stop token": {"max_tokens": 70, "stop_token_ids": [ALONE[20]], "logprobs": 1},
    "stop token at the limit": {"max_tokens": ALONE.index(ALONE[20]) + 1, "stop_token_ids": [ALONE[20]]},
    "stop string": {"max_tokens": 70, "stop": [TEXT[30:33]], "logprobs": 1},
    "stop string, shown": {"max_tokens": 70, "stop": [TEXT[30:33]], "include_stop_str_in_output": True},
    "stop string before a stop token": {"max_tokens": 70, "stop": [TEXT[8:12]], "stop_token_ids": [ALONE[13]]},
    "stop string after min_tokens": {"max_tokens": 70, "min_tokens": 25, "stop": sorted(set(TEXT[:12]))},
    "stop string that the end completes": {"max_tokens": 12, "stop": [TEXT[9:12]]},
    "completions": {"max_tokens": 50, "n": 3, "stop": [TEXT[20:22]], "logprobs": 0},
}


@pytest.mark.parametrize("steps", [1, 8], ids=["not planned", "planned"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", list(OutputKind))
@pytest.mark.parametrize("name", list(CASES))
def test_runs_say_what_single_tokens_say(name: str, kind: OutputKind, overlap: bool, steps: int) -> None:
    request = Request("a", PROMPT, SamplingParams(output_kind=kind, **CASES[name]))
    plain = make_engine(lambda width: 1, overlap=overlap)
    expected = join(run(plain, request), kind)
    fewest = len(plain.runner.plans)  # type: ignore[attr-defined]
    for seed in range(4):
        drawn = random.Random(seed)
        engine = make_engine(lambda width, drawn=drawn: drawn.randint(1, 8), overlap=overlap, steps=steps)
        assert join(run(engine, request), kind) == expected
        assert (
            engine.counts.num_tokens == plain.counts.num_tokens == sum(len(e["token_ids"]) for e in expected.values())
        )
        assert engine.scheduler.counts == plain.scheduler.counts
        assert len(engine.runner.plans) < fewest  # type: ignore[attr-defined]


GRAMMARS = {"complete": Ends(stop_at=13), "complete at the limit": Ends(stop_at=30), "refuses": Ends(refuse_at=13)}


@pytest.mark.parametrize("stop", [[], [TEXT[6:9]], [TEXT[20:23]]], ids=["alone", "stop before", "stop behind"])
@pytest.mark.parametrize("name", list(GRAMMARS))
def test_grammars_end_in_the_middle_of_a_run(name: str, stop: list[str]) -> None:
    params = SamplingParams(max_tokens=30, stop=stop)
    request = Request("a", PROMPT, params, grammar=GRAMMARS[name], automaton=TokenAutomaton(((0, 1, 0),)))
    (*_, expected) = run(make_engine(lambda width: 1), request)
    for length in range(2, 9):
        (*_, output) = run(make_engine(lambda width, length=length: length), request)
        assert output.outputs == expected.outputs and str(output.error) == str(expected.error)
        assert isinstance(output.error, GrammarError) == (name == "refuses" and stop != [TEXT[6:9]])


def test_a_sentinel_ends_a_run_and_the_tokens_before_it_are_kept() -> None:
    engine = make_engine(lambda width: 8)
    device: Any = engine.runner
    sample, sampled = device._sample, []

    def fail_late(row: int) -> int:
        sampled.append(sample(row))
        return -1 if len(sampled) == 6 else sampled[-1]

    device._sample = fail_late
    (*_, output) = run(engine, Request("a", PROMPT, SamplingParams(max_tokens=50)))
    assert isinstance(output.error, NonFiniteLogitsError) and output.outputs[0].finish_reason == "error"
    assert output.outputs[0].token_ids == ALONE[:5]
    device._sample = sample
    sampled.clear()
    stopped = Request("b", PROMPT, SamplingParams(max_tokens=50, stop=[TEXT[1:3]]))
    device._sample = fail_late
    (*_, output) = run(engine, stopped)
    assert (output.error, output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (None, "stop", TEXT[1:3])


@pytest.mark.parametrize("steps", [1, 8], ids=["not planned", "planned"])
@pytest.mark.parametrize("overlap", [True, False])
def test_many_together_with_preemptions_and_prefix_hits(overlap: bool, steps: int) -> None:
    drawn = random.Random(1)
    engine = make_engine(lambda width: drawn.randint(1, 8), overlap=overlap, num_pages=9, steps=steps)
    requests = [Request(f"r{i}", PROMPT, SamplingParams(max_tokens=20 + 9 * i, seed=i)) for i in range(9)]
    outputs = [output for output in run(engine, *requests) if output.finished]
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    for output in outputs:
        assert output.outputs[0].token_ids == ALONE[: 20 + 9 * int(output.request_id[1:])]
    counts = engine.scheduler.counts
    assert counts.prefix_hits == 0, "the prompt is shorter than a page"
    follow_up = Request("again", PROMPT, SamplingParams(max_tokens=40))
    run(engine, follow_up)
    (*_, output) = run(engine, Request("longer", (*PROMPT, *ALONE[:70]), SamplingParams(max_tokens=30)))
    assert output.outputs[0].token_ids == ALONE[70:100]
    assert output.num_cached_tokens >= 32, "pages that runs have filled are found again"
