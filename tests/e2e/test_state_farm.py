"""After each step of an engine, whatever happened, each row's state is the float64 recurrence over its tokens.

Drawn requests are admitted, cut into chunks, decoded, forked, aborted, stopped, preempted and forced to tokens, and
masks of their tokens are late. They begin like others or go on from their answers, so they hit snapshots, of which
there are few; each snapshot that a row's text can hit is compared, too. Steps fail, and weights change. With drafts,
each step without chunks verifies three a row; where a row may have few tokens, many are right. The state of the first
layer depends on its tokens' embeddings alone, so the recurrence is cheap.
"""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from jaxserve import LLM, SamplingParams
from jaxserve.core.runtime import startup
from jaxserve.core.scheduler import StepPlan
from jaxserve.features.grammars.pool import MaskBatch, MaskPool
from jaxserve.sampling_params import OutputKind
from jaxserve.structured_params import StructuredOutputsParams
from tests.e2e.engines import Engines
from tests.e2e.helpers import MAX_MODEL_LEN, make_llm, read_weights
from tests.e2e.state_references import Reference, make_reference
from tests.engine.test_grammars import Grammar, Matcher
from tests.examples import scale_examples

VOCAB = 83
MORE = ("lfm2", "granite_hybrid", "olmo_hybrid")
CASES = (
    ("qwen3_next", False),
    ("qwen3_next", True),
    *(pytest.param(name, drafts, marks=pytest.mark.thorough) for name in MORE for drafts in (False, True)),
)
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "num_speculative_tokens_per_batch_size": [[1, 64, 3]],
}
ERROR = 2e-5
PAGES = 22  # of 8 tokens: fewer than four rows need
SCALE = 0.5  # of the convolution of the first layer in new weights
EVENTS = ("chunk", "fork", "forced", "stop", "length", "abort", "error", "fault", "weights")  # each is met


class Farm(RuleBasedStateMachine):
    """An engine with fewer pages than its rows need."""

    llms: tuple[LLM, ...]
    references: tuple[Reference, Reference]  # of the weights, and of those that they change to
    weights: tuple[Any, Any]
    preemptions = hits = resumed = passed = late = 0
    events: Counter[str]

    @initialize(which=st.integers(0, 1))
    def start(self, which: int) -> None:
        self.llm = self.llms[which]
        self.engine, self.count, self.version = self.llm.ready.engine, 0, 0
        self.finished: list[list[int]] = []

    @rule(
        shared=st.sampled_from([0, 10, 64, 70, 130]),
        length=st.integers(1, 30),
        seed=st.integers(0, 3),
        turn=st.one_of(st.none(), st.integers(0, 9)),
        count=st.integers(1, 40),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        stop=st.lists(st.integers(3, VOCAB - 1), max_size=3),
        forced=st.dictionaries(
            st.integers(1, 9), st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=6), max_size=2
        ),
        constrained=st.booleans(),
        late=st.sets(st.integers(0, 12), max_size=4),
        few=st.booleans(),
        many=st.integers(1, 3),
    )
    def admit(
        self,
        shared: int,
        length: int,
        seed: int,
        turn: int | None,
        count: int,
        n: int,
        stop: list[int],
        forced: dict[int, list[int]],
        constrained: bool,
        late: set[int],
        few: bool,
        many: int,
    ) -> None:
        begin = np.random.default_rng(shared // 64).integers(3, VOCAB, shared).tolist()
        if turn is not None and self.finished:
            begin = self.finished[turn % len(self.finished)]
        prompts = [
            [*begin, *np.random.default_rng(each).integers(3, VOCAB, length).tolist()][:150]
            for each in range(seed, seed + many)
        ]
        grammar: Any = Grammar(forced=forced, slow=late)
        grammar.automaton = None
        type(self.llm.ready.requests).grammars = SimpleNamespace(compile=lambda params: grammar)  # type: ignore[assignment]
        params = SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=min(count, MAX_MODEL_LEN - len(prompts[0])),
            n=n,
            stop_token_ids=stop,
            ignore_eos=True,
            allowed_token_ids=[5, 9, 30] if few else None,
            output_kind=OutputKind.FINAL_ONLY,
            structured_outputs=StructuredOutputsParams(regex="x") if constrained else None,
        )
        self.events["fork"] += n > 1
        for prompt in prompts:
            self.count += 1
            self.engine.add_request(self.llm.ready.requests.make(prompt, params, request_id=str(self.count)))
        for matcher in grammar.matchers:
            matcher.held = threading.Event()

    @rule(times=st.integers(1, 25))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.run()
            self.check()

    def run(self) -> None:
        """One step; what is planned in it goes on from a snapshot, or not."""
        runner, batch = self.llm.ready.runner, self.engine.scheduler.batch
        start = type(runner).start

        def watch(plan: StepPlan) -> Any:
            loaded = {row for row, _ in plan.state_loads}
            rows = {sequence.row: sequence for sequence in (*batch.decoding, *batch.prefilling)}
            self.events["chunk"] += any(not chunk.is_last for chunk in plan.chunks)
            type(self).hits += len(loaded)
            type(self).resumed += sum(row in rows and rows[row].num_preemptions > 0 for row in loaded)
            type(self).passed += len(plan.state_saves) if plan.width > 1 else 0
            return start(runner, plan)

        runner.start = watch  # type: ignore[method-assign]
        try:
            for output in self.engine.step():
                self.events[str(output.outputs[0].finish_reason)] += 1
                if output.finished and not output.error and output.outputs[0].token_ids:
                    self.finished.append([*output.prompt_token_ids, *output.outputs[0].token_ids])
        finally:
            del runner.start  # type: ignore[method-assign]

    @rule(weights=st.booleans())
    def disturb(self, weights: bool) -> None:
        """All states are lost: a step fails on the device, or weights change."""
        if weights:
            self.events["weights"] += bool(self.engine.scheduler.batch)
            self.version = 1 - self.version
            self.llm.update_weights(self.weights[self.version])
            assert not self.engine.scheduler.pages.snapshots.num_cached
            return
        runner = self.llm.ready.runner

        def fail(plan: StepPlan) -> Any:
            self.events["fault"] += 1
            raise RuntimeError("struck")

        runner.start = fail  # type: ignore[method-assign]
        for output in self.engine.step():
            self.events[str(output.outputs[0].finish_reason)] += 1
        del runner.start  # type: ignore[method-assign]
        self.check()

    @rule(pick=st.integers(0, 9))
    def abort(self, pick: int) -> None:
        self.events["abort"] += self.engine.abort_request(str(pick)) is not None

    def check(self) -> None:
        (pool,) = self.llm.ready.runner.device.cache[1:]
        self.states = {name: np.asarray(array[0]) for name, array in pool.items()}
        batch, pages = self.engine.scheduler.batch, self.engine.scheduler.pages
        num_computed, runs = np.asarray(self.llm.ready.runner.device.rows.num_computed), self.read_runs()
        for sequence in (*batch.decoding, *batch.prefilling):
            text, count = sequence.token_ids, sequence.num_computed_tokens
            if sequence in batch.decoding:
                text = [*text, *runs.get(sequence.ticket, (0,))[:-1]]
                count = num_computed[sequence.row]
                assert count == len(text) - (sequence.ticket not in runs)
            if count:
                self.compare(sequence.row, text[:count])
            for count, key in enumerate(sequence.pages.keys, 1):
                if (slot := pages.snapshots._cached.get(key)) is not None:
                    self.compare(self.llm.ready.shapes.state.padding_row + slot, sequence.token_ids[: 8 * count])
        pages.check()

    def read_runs(self) -> dict[int, Any]:
        """The runs, by ticket, of the step that is not committed yet."""
        if self.engine._in_flight is None:
            return {}
        plan, future = self.engine._in_flight
        return dict(zip(plan.tickets, future.result().split_runs(), strict=True))

    def compare(self, slot: int, text: list[int]) -> None:
        """The state in a slot is that behind a text."""
        for name, state in self.references[self.version].find(tuple(text)).items():
            most = ERROR * max(1.0, np.abs(state).max())
            np.testing.assert_allclose(self.states[name][slot], state, rtol=0, atol=most)

    def teardown(self) -> None:
        if hasattr(self, "llm"):
            self.engine.abort_all()
            while self.engine.has_unfinished:
                self.engine.step()
            self.llm.update_weights(self.weights[0])
            type(self).preemptions = sum(llm.ready.engine.scheduler.counts.num_preemptions for llm in self.llms)


def count_forced_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    forced = Matcher.forced_tokens

    def count(matcher: Matcher) -> list[int]:
        Farm.events["forced"] += len(found := forced(matcher))
        return found

    monkeypatch.setattr(Matcher, "forced_tokens", count)


def release_late_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late mask is ready once a step waits for it without a limit, and never before."""
    collect = MaskPool.collect

    def release(pool: MaskPool, batch: MaskBatch, timeout_s: float | None = None) -> np.ndarray:
        matchers: list[Any] = [job.matcher for job in batch.jobs if job is not None and not job.is_done]
        Farm.late += sum(len(matcher.ids) in matcher.slow for matcher in matchers)
        for matcher in matchers if timeout_s is None else ():
            matcher.held.set()
        found = collect(pool, batch, timeout_s)
        for matcher in matchers if timeout_s is None else ():
            matcher.held.clear()
        return found

    monkeypatch.setattr(MaskPool, "collect", release)


def meet_each_case() -> None:
    """A common beginning of three requests, answers that need more pages than there are, late masks, and `EVENTS`.

    Few drawn examples may have none of these. The last of the answers is preempted behind the snapshot of its prompt,
    whose pages are left.
    """
    farm = Farm()
    farm.start(which=1)
    plain: dict[str, Any] = {"turn": None, "n": 1, "stop": [], "forced": {}, "constrained": False, "few": False}
    plain["late"] = set()
    for seed in range(3):
        farm.admit(shared=130, length=9, seed=seed, count=2, many=1, **plain)
        farm.step(times=20)
    farm.admit(shared=0, length=30, seed=0, count=40, many=3, **plain)
    farm.step(times=120)
    farm.admit(shared=0, length=70, seed=5, count=30, many=2, **plain)
    farm.step(times=90)
    farm.admit(shared=0, length=20, seed=7, count=100, many=3, **plain | {"few": True})
    farm.step(times=120)
    farm.admit(shared=0, length=20, seed=9, count=12, many=2, **plain | {"constrained": True, "late": {0, 1, 5, 6}})
    farm.admit(shared=0, length=20, seed=9, count=12, many=1, **plain)
    farm.step(times=40)
    farm.admit(shared=0, length=90, seed=11, count=40, many=1, **plain | {"n": 2, "few": True, "stop": [5]})
    farm.admit(shared=0, length=20, seed=12, count=20, many=1, **plain | {"constrained": True, "forced": {2: [7, 8]}})
    farm.step(times=30)
    for weights in (True, False):
        farm.admit(shared=64, length=30, seed=13, count=20, many=2, **plain)
        farm.step(times=6)
        farm.abort(farm.count)
        farm.disturb(weights)
        farm.step(times=6)
    farm.teardown()


def fail_without_waiting() -> None:
    """A step that goes on without its late masks takes a row's token twice, and the farm sees it."""
    farm = Farm()
    farm.start(which=1)
    grammars = farm.engine._grammars
    assert grammars._mask_timeout is None
    grammars._mask_timeout = 0.0
    farm.admit(0, 20, 9, None, 12, 1, [], {}, constrained=True, late={2}, few=False, many=1)
    (matcher,) = grammars._matchers.values()
    with pytest.raises(AssertionError, match="Mismatched elements"):
        farm.step(times=20)
    grammars._mask_timeout = None
    matcher.held.set()
    farm.teardown()


@pytest.mark.slow  # it compiles an engine, and each step is compared
@pytest.mark.parametrize(("case", "drafts"), CASES)
def test_each_state_is_that_of_the_tokens_of_its_row(
    case: str, drafts: bool, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"num_kv_pages_override": PAGES, "page_size": 8}
    options |= {"speculative_config": DRAFTS} if drafts else {}
    monkeypatch.setattr(startup, "_SNAPSHOTS_OF_ROW", 1)
    Farm.llms = tuple(engines.get(make_llm, case, async_scheduling=overlap, **options) for overlap in (False, True))
    Farm.references = make_reference(Farm.llms[0], 1), make_reference(Farm.llms[0], SCALE)
    Farm.preemptions = Farm.hits = Farm.resumed = Farm.passed = Farm.late = 0
    Farm.events = Counter()
    weights = read_weights(Farm.llms[0])
    first, *others = weights["layers"]
    Farm.weights = weights, weights | {"layers": [first | {"conv": first["conv"] * SCALE}, *others]}
    kept = type(Farm.llms[0].ready.requests)
    monkeypatch.setattr(kept, "grammars", None)  # and put back at the end
    release_late_masks(monkeypatch)
    count_forced_tokens(monkeypatch)
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    limits = settings(
        max_examples=scale_examples(50), stateful_step_count=30, deadline=None, suppress_health_check=checks
    )
    run_state_machine_as_test(Farm, settings=limits)
    meet_each_case()
    fail_without_waiting()
    print(f"{Farm.preemptions} preemptions, {Farm.hits} rows from snapshots, {Farm.resumed} of them after a preemption")
    print(*(f"{Farm.events[name]} of {name}" for name in EVENTS), f"{Farm.late} late masks", sep=", ")
    assert all(Farm.events[name] for name in EVENTS)
    assert Farm.preemptions > 0 and Farm.hits > Farm.resumed > 0 and Farm.late > 0
    if drafts:
        counts = [llm.ready.engine.scheduler.counts for llm in Farm.llms]
        assert all(0 < each.num_accepted_tokens < each.num_draft_tokens for each in counts[1:]) and Farm.passed > 0
