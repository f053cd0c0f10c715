"""Rows with a grammar in the engine's loop, on the fake device: matchers are late, jump, or fail on purpose."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.scheduler import Scheduler, SchedulerLimits
from jaxserve.engine import grammars
from jaxserve.engine.engine import Engine
from jaxserve.errors import DeadlineError, GrammarError
from jaxserve.features.grammars import MatcherError
from jaxserve.request import Request, RequestOutput, Task
from jaxserve.sampling_params import SamplingParams
from tests.fake_device import FakeDevice, continue_alone, embed_alone

VOCAB, PAGE_SIZE, PROMPT = 1009, 16, tuple(range(3, 50))


class Matcher:
    """Allows everything; what else it does is told by the position in the output."""

    def __init__(self, slow: set[int], forced: dict[int, list[int]], stop_at: int, fail_at: int) -> None:
        self.slow, self.forced, self.stop_at, self.fail_at = slow, forced, stop_at, fail_at
        self.ids: list[int] = []
        self.version, self.mask_job = 0, None
        self.held: threading.Event | None = None  # slow until it is set

    @property
    def is_finished(self) -> bool:
        return len(self.ids) == self.stop_at

    def accept(self, token_id: int) -> None:
        self.ids.append(token_id)
        self.version += 1

    def fill_mask(self, row: np.ndarray) -> None:
        if len(self.ids) == self.fail_at:
            raise MatcherError("a limit was met")
        if len(self.ids) in self.slow:
            self.held.wait(30) if self.held is not None else time.sleep(3 * grammars.MASK_TIMEOUT)
        row[:] = 2**32 - 1

    def fill_along(self, drafts: Sequence[int], lines: np.ndarray, version: int, go_on: Callable[[int], bool]) -> None:
        for count, draft in enumerate(drafts, 1):
            position = len(self.ids) + count
            if version != self.version or draft < 0 or position in (self.stop_at, self.fail_at):
                return
            if position in self.slow:
                self.held.wait(30) if self.held is not None else time.sleep(3 * grammars.MASK_TIMEOUT)
            lines[count] = 2**32 - 1
            if not go_on(count + 1):
                return

    def forced_tokens(self) -> list[int]:
        return self.forced.get(len(self.ids), [])


class Grammar:
    def __init__(
        self,
        *,
        slow: set[int] | None = None,
        forced: dict[int, list[int]] | None = None,
        stop_at: int = -1,
        fail_at: int = -1,
    ) -> None:
        self._options = (slow or set(), forced or {}, stop_at, fail_at)
        self.matchers: list[Matcher] = []

    def new_matcher(self) -> Matcher:
        self.matchers.append(Matcher(*self._options))
        return self.matchers[-1]


def make_engine(*, overlap: bool = True, clock: Callable[[], float] = time.monotonic) -> Engine:
    groups = [PageGroup(60)]
    pages = PageManager(groups, page_size=PAGE_SIZE, max_chunk=96, enable_prefix_caching=True)
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=96, max_model_len=200, max_prefix_updates=30)
    scheduler = Scheduler(limits, pages, clock)
    device = FakeDevice(groups, page_size=PAGE_SIZE)
    device.wants_edges = False
    return Engine(scheduler, device, vocab_size=VOCAB, overlap=overlap)


def run(engine: Engine, *requests: Request) -> dict[str, RequestOutput]:
    for request in requests:
        engine.add_request(request)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    engine.scheduler.pages.check()
    return outputs


def make(name: str, grammar: Any, count: int = 12, **options: Any) -> Request:
    return Request(name, PROMPT, SamplingParams(max_tokens=count, detokenize=False, **options), grammar=grammar)


@pytest.mark.parametrize("overlap", [True, False])
def test_late_masks_hold_nobody_and_lose_nothing(overlap: bool) -> None:
    expected = continue_alone(PROMPT, 12, [None], VOCAB)
    engine = make_engine(overlap=overlap)
    late = Grammar(slow={0, 3, 4, 9})
    outputs = run(engine, make("late", late), make("free", None), make("other", Grammar()))
    for output in outputs.values():
        assert output.outputs[0].token_ids == expected
    assert late.matchers[0].ids == expected


def test_forced_tokens_are_computed_at_once() -> None:
    forced = [500, 501, 502, 503]
    engine = make_engine()
    (output,) = run(engine, make("a", Grammar(forced={2: forced}))).values()
    before = continue_alone(PROMPT, 2, [None], VOCAB)
    after = continue_alone((*PROMPT, *before, *forced), 6, [None], VOCAB)
    assert output.outputs[0].token_ids == [*before, *forced, *after]


def test_jumps_end_before_the_limit_and_at_stop_ids() -> None:
    (output,) = run(make_engine(), make("a", Grammar(forced={2: list(range(600, 640))}), 5)).values()
    assert len(output.outputs[0].token_ids) == 5 and output.outputs[0].finish_reason == "length"
    (output,) = run(make_engine(), make("a", Grammar(forced={2: [600, 601, 7, 602]}), stop_token_ids=[7])).values()
    assert output.outputs[0].token_ids[2:4] == [600, 601], "the stop id is left to the device"


def test_a_complete_text_ends_its_sequence() -> None:
    (output,) = run(make_engine(), make("a", Grammar(stop_at=5))).values()
    assert len(output.outputs[0].token_ids) == 5 and output.outputs[0].finish_reason == "stop"


def test_a_text_that_is_complete_with_its_last_token_was_not_cut() -> None:
    for overlap in (True, False):
        outputs = run(make_engine(overlap=overlap), make("a", Grammar(stop_at=5), 5), make("b", Grammar(stop_at=6), 5))
        ends = {name: (len(o.outputs[0].token_ids), o.outputs[0].finish_reason) for name, o in outputs.items()}
        assert ends == {"a": (5, "stop"), "b": (5, "length")}
    (output,) = run(make_engine(), make("a", Grammar(forced={2: [600, 601, 602, 603]}, stop_at=5), 5)).values()
    assert output.outputs[0].finish_reason == "stop" and output.outputs[0].stop_reason is None
    ids = continue_alone(PROMPT, 5, [None], VOCAB)
    (output,) = run(make_engine(), make("a", Grammar(stop_at=5), 5, stop_token_ids=[ids[4]])).values()
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", ids[4])


def test_a_grammar_that_fails_ends_its_own_request_only() -> None:
    outputs = run(make_engine(), make("bad", Grammar(fail_at=4)), make("good", Grammar()))
    assert isinstance(outputs["bad"].error, GrammarError) and len(outputs["bad"].outputs[0].token_ids) == 4
    assert outputs["good"].outputs[0].token_ids == continue_alone(PROMPT, 12, [None], VOCAB)


def test_completions_have_matchers_of_their_own() -> None:
    grammar = Grammar(slow={2})
    (output,) = run(make_engine(), make("a", grammar, n=3)).values()
    assert len(grammar.matchers) == 3
    assert all(c.token_ids == continue_alone(PROMPT, 12, [None], VOCAB) for c in output.outputs)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_deadline_ends_a_request_while_its_mask_is_late(overlap: bool) -> None:
    now = 0.0
    engine = make_engine(overlap=overlap, clock=lambda: now)
    late = Grammar(slow={3})
    engine.add_request(dataclasses.replace(make("late", late), deadline=1.0))
    engine.add_request(make("other", Grammar()))
    late.matchers[0].held = threading.Event()
    while len(late.matchers[0].ids) < 3:
        engine.step()
    engine.step()  # its mask is not there, and does not come
    now = 1.0
    (output,) = [output for output in engine.step() if output.finished]
    assert isinstance(output.error, DeadlineError) and output.request_id == "late"
    assert output.outputs[0].token_ids == continue_alone(PROMPT, 3, [None], VOCAB)
    late.matchers[0].held.set()
    assert run(engine)["other"].outputs[0].token_ids == continue_alone(PROMPT, 12, [None], VOCAB)


def test_embeddings_beside_grammars() -> None:
    vector = dataclasses.replace(make("vector", None, 1), task=Task.POOL)
    outputs = run(make_engine(), make("late", Grammar(slow={0, 1})), vector)
    assert outputs["vector"].embedding == embed_alone(PROMPT, [None])
    assert outputs["late"].outputs[0].token_ids == continue_alone(PROMPT, 12, [None], VOCAB)


def test_a_step_that_fails_behind_a_masked_one_loses_no_other_request() -> None:
    engine = make_engine()
    engine.add_request(make("a", Grammar(slow={5})))
    engine.add_request(make("b", None))
    for _ in range(4):
        engine.step()
    engine.runner.fail_next = RuntimeError("device lost")  # type: ignore[attr-defined]
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    assert all(output.outputs[0].finish_reason == "error" for output in outputs.values()) and len(outputs) == 2
    (again,) = run(engine, make("c", Grammar())).values()
    assert again.outputs[0].token_ids == continue_alone(PROMPT, 12, [None], VOCAB)
