"""The engine over a fake device, with a pool far too small, under every order of add, step, abort and fault."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.scheduler import Scheduler, SchedulerLimits, Sequence, SequenceStatus
from jaxserve.core.scheduler.committer import _explain
from jaxserve.core.scheduler.sequence import NO_TOKEN_LEFT
from jaxserve.engine.engine import Engine
from jaxserve.errors import (
    CapacityError,
    DeadlineError,
    DeviceStepError,
    InvalidRequestError,
    NonFiniteLogitsError,
    NoTokenLeftError,
    QueueFullError,
)
from jaxserve.request import DEFAULT_TENANT, FinishReason, Request, RequestOutput, ServiceTier, Task, Tenant
from jaxserve.sampling_params import OutputKind, SamplingParams
from jaxserve.scheduler_options import SchedulerOptions
from tests.engine.helpers import greedy, make_engine, run
from tests.engine.late_masks import LateMasks
from tests.examples import scale_examples
from tests.fake_device import FakeDevice, continue_alone, embed_alone, make_drafter

MAX_MODEL_LEN = 160
VOCAB = 211
REFUSED_IF_DETERMINISTIC = {"max_decode_steps", "priority_scheduling_preemption_threshold"}


class EngineMachine(RuleBasedStateMachine):
    """Every request ends, with the tokens it gets alone or with a reason; no page is leaked, lost or shared wrongly."""

    @initialize(
        page_size=st.sampled_from([4, 32]),
        tokens_of_pool=st.integers(1, 300),
        window=st.sampled_from([None, 5, 40]),
        rows=st.integers(1, 5),
        extra_budget=st.sampled_from([32, 50, 200]),
        caching=st.booleans(),
        overlap=st.booleans(),
        queue=st.sampled_from([(None, None), (1, None), (3, None), (None, 100), (2, 300)]),
        has_sizes=st.booleans(),
        longest_run=st.sampled_from([1, 1, 3, 8, 16]),
        drafts=st.sampled_from([None, *itertools.product(["right", "wrong", "random"], [1, 4], [False, True])]),
        lookahead=st.integers(0, 5),
        masks=st.sampled_from([None, None, 1, 2]),
        snapshots=st.sampled_from([None, None, (0, 32), (1, 32), (3, 64), (40, 32)]),  # slots and grid, with states
        host=st.sampled_from([(0, 0), (1, 1), (4, 2), (60, 1), (60, 8)]),
        policies=st.fixed_dictionaries(
            {"scheduling_policy": st.sampled_from(["fcfs", "fair"])},
            optional={
                "priority_itl_ms": st.just(300),  # a turn takes 250 ms, or more with many tokens
                "priority_scheduling_preemption_threshold": st.sampled_from([1, 8]),
                "long_prefill_token_threshold": st.sampled_from([0, 1, 40]),
                "max_num_partial_prefills": st.integers(1, 2),
                "max_long_partial_prefills": st.integers(1, 2),
                "max_decode_steps": st.sampled_from([2, 8, 16]),
                "deterministic": st.just(True),
            },
        ).filter(lambda chosen: "deterministic" not in chosen or not chosen.keys() & REFUSED_IF_DETERMINISTIC),
    )
    def start(
        self,
        page_size: int,
        tokens_of_pool: int,
        window: int | None,
        rows: int,
        extra_budget: int,
        caching: bool,
        overlap: bool,
        queue: tuple[int | None, int | None],
        has_sizes: bool,
        longest_run: int,
        drafts: tuple[str, int, bool] | None,
        lookahead: int,
        masks: int | None,
        snapshots: tuple[int, int] | None,
        host: tuple[int, int],
        policies: dict[str, Any],
    ) -> None:
        num_pages = 2 + tokens_of_pool // page_size
        groups = [PageGroup(num_pages)]
        num_snapshots, grid = snapshots or (0, 32)
        if snapshots is not None:
            masks, host, caching = None, (0, 0), caching and num_snapshots > 0
        if window is not None:
            groups.append(PageGroup(max(2, num_pages // 2), window))
        self.windows = [group.window for group in groups]
        budget = rows + extra_budget
        edges = (32,) if snapshots is None else (64, 32)
        if snapshots is not None and "deterministic" in policies:
            edges, budget = (grid,), max(budget, grid)
        self.pages = PageManager(
            groups,
            page_size=page_size,
            max_chunk=budget,
            enable_prefix_caching=caching,
            num_host_slots=host[0],
            max_copies=host[1],
            num_snapshots=num_snapshots,
            hit_grid=grid,
        )
        if policies.keys() & {"max_decode_steps", "deterministic"}:
            drafts = masks = None
        kind, most, costs = drafts if drafts is not None else ("", 0, False)
        widths = {most + 1, most // 2 + 1} - {1}
        sizes = tuple(sorted({rows + 32, min(budget, rows + 70), budget})) if has_sizes else ()
        limits = SchedulerLimits(
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            max_prefix_updates=len(groups) * MAX_MODEL_LEN // page_size,
            token_sizes=sizes,
            loop_rows=rows,
            verify_widths=tuple(itertools.product({1, max(1, rows - 1)}, widths)),
            max_drafts=most,
            has_draft_passes=costs,
            fixed_drafts=((1, 2, most), (3, rows, most // 2)) if lookahead % 2 else None,
            num_lookahead_tokens=lookahead if drafts is not None and costs else 0,
            keeps_states=snapshots is not None,
            chunk_edges=edges,
            snapshot_grid=grid if num_snapshots else 0,
            options=SchedulerOptions(max_num_queued_reqs=queue[0], max_num_queued_tokens=queue[1], **policies),
        )
        self.device = FakeDevice(groups, page_size=page_size, vocab_size=VOCAB)
        self.device.keeps_states = snapshots is not None
        lengths = random.Random(longest_run)
        if snapshots is None:  # else runs have the planned length
            self.device.draw_length = lambda width: lengths.randint(1, longest_run)
        if drafts is not None:
            self.device.drafter = make_drafter(kind)
            self.device.max_drafts, self.device.drafts_always = most, not costs
            self.device.num_lookahead_tokens = limits.num_lookahead_tokens
        self.now = 0.0
        costs_of_steps = {(count, 1): 1.0 for count in range(1, rows + 1)}
        costs_of_steps |= {(count, width): 1 + 0.1 * width for count, width in limits.verify_widths}
        scheduler = Scheduler(limits, self.pages, lambda: self.now, costs_of_steps)
        self.engine = Engine(scheduler, self.device, overlap=overlap)
        if masks is not None:
            self.engine._grammars = LateMasks(masks)
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, RequestOutput] = {}
        self.aborted: set[str] = set()
        self.late: set[str] = set()
        self.displaced: set[str] = set()
        self.struck = False
        self.count = 0

    @rule(
        length=st.integers(1, MAX_MODEL_LEN + 2),
        shared=st.integers(0, 90),
        max_tokens=st.one_of(st.none(), st.integers(1, 50)),
        stop=st.lists(st.integers(0, VOCAB - 1), max_size=2),
        salt=st.sampled_from(["", "tenant"]),
        priority=st.sampled_from([0, 0, -1, 7, 7]),
        patience=st.sampled_from([None] * 7 + [0, 3, 30]),
        kind=st.sampled_from([1] * 7 + [2, 3, "embedding"]),
        asks=st.sampled_from([False, True, True]),
        tier=st.sampled_from(ServiceTier),
        tenant=st.sampled_from([DEFAULT_TENANT, Tenant("light", weight=0.5), Tenant("heavy", weight=4)]),
    )
    def add(
        self,
        length: int,
        shared: int,
        max_tokens: int | None,
        stop: list[int],
        salt: str,
        priority: int,
        patience: int | None,
        kind: int | str,
        asks: bool,
        tier: ServiceTier,
        tenant: Tenant,
    ) -> None:
        self.count += 1
        common = [7 * i % VOCAB for i in range(min(shared, length))]
        prompt = (*common, *((self.count * 31 + i) % VOCAB for i in range(length - len(common))))
        embeds, n = kind == "embedding", kind if isinstance(kind, int) else 1
        max_tokens = 1 if embeds else max_tokens
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, n=n, output_kind=OutputKind.FINAL_ONLY)
        request = Request(
            f"r{self.count}",
            prompt,
            params,
            cache_salt=salt,
            priority=priority,
            service_tier=tier,
            tenant=tenant,
            deadline=None if patience is None else self.now + patience,
            task=Task.POOL if embeds else Task.GENERATE,
        )
        displaced = self.ask_the_queue(request) if asks else []
        if displaced is None:
            return
        try:
            self.engine.add_request(request)
        except (CapacityError, InvalidRequestError) as refusal:
            assert refusal.field in ("prompt", "max_tokens")
            assert length >= MAX_MODEL_LEN or self.pages.first_unfit_group(
                min(MAX_MODEL_LEN, length + (max_tokens or 999))
            )
        else:
            self.requests[request.request_id] = request
            self.displaced |= {name for name, _ in displaced}
            self.collect(self.engine.displace(displaced))

    @rule(pick=st.integers(0, 10**6), more=st.integers(0, 20))
    def add_turn(self, pick: int, more: int) -> None:
        """A conversation goes on: the prompt is that of an earlier request with its answer."""
        if not self.finished:
            return
        earlier = self.requests[sorted(self.finished)[pick % len(self.finished)]]
        answer = self.finished[earlier.request_id].outputs[0].token_ids
        self.count += 1
        prompt = (*earlier.prompt_token_ids, *answer, *range(more))[: MAX_MODEL_LEN - 1]
        request = Request(
            f"r{self.count}",
            prompt,
            SamplingParams(max_tokens=5, output_kind=OutputKind.FINAL_ONLY),
            cache_salt=earlier.cache_salt,
        )
        if not self.pages.first_unfit_group(min(MAX_MODEL_LEN, len(prompt) + 5)):
            self.engine.add_request(request)
            self.requests[request.request_id] = request

    def ask_the_queue(self, request: Request) -> list[tuple[str, QueueFullError]] | None:
        """Returns who makes way, or None when the request is refused; what waits is counted anew."""
        scheduler = self.engine.scheduler
        limits, batch = scheduler.limits, scheduler.batch
        idle = scheduler.queue_admission.idle_rows
        assert idle in (0, limits.max_num_seqs - len(batch)) and (idle or scheduler.waiting or batch.is_full)

        def fits(names: set[str], rows: int) -> bool:
            """Whether the request finds room beside others that wait."""
            new = [each for each in self.list_new() if each.request.request_id in names]
            tokens = sum(each.num_prompt_tokens for each in new if each.index == 0) + len(request.prompt_token_ids)
            count = len(new) + request.params.n
            most, most_tokens = limits.options.max_num_queued_reqs, limits.options.max_num_queued_tokens
            if most is not None and count > most + rows:
                return False
            return most_tokens is None or tokens <= most_tokens or count <= rows

        waiting = {each.request.request_id for each in self.list_new()}
        worse = {
            each.request.request_id
            for each in scheduler.waiting
            if each.status is SequenceStatus.WAITING and not each.index and each.request.rank > request.rank
        }
        try:
            displaced = scheduler.queue_admission.find_room([request])
        except InvalidRequestError as refusal:
            assert not fits(set(), limits.max_num_seqs) and refusal.field in ("n", "prompt")
            return None
        except QueueFullError as refusal:
            assert fits(set(), limits.max_num_seqs) and not fits(waiting - worse, idle)
            assert refusal.limit in (limits.options.max_num_queued_reqs, limits.options.max_num_queued_tokens)
            return None
        names = [name for name, _ in displaced]
        assert set(names) <= worse and fits(waiting - set(names), idle)
        assert not names or not fits(waiting - set(names[:-1]), idle), "one made way in vain"
        order = [each.request.request_id for each in reversed(scheduler.waiting) if each.request.request_id in names]
        assert order == names
        return displaced

    def list_new(self) -> list[Sequence]:
        return [sequence for sequence in self.engine._streams if sequence.status is SequenceStatus.WAITING]

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.turn()

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(pick=st.integers(0, 10**6))
    def abort(self, pick: int) -> None:
        live = sorted(self.requests.keys() - self.finished.keys())
        if live:
            request_id = live[pick % len(live)]
            output = self.engine.abort_request(request_id)
            assert output is not None and "abort" in [completion.finish_reason for completion in output.outputs]
            self.aborted.add(request_id)
            self.collect([output])
        assert self.engine.abort_request("nobody") is None

    @rule()
    def strike(self) -> None:
        """The next step fails on the device."""
        self.device.fail_next = RuntimeError("struck")
        self.struck = True

    @rule(count=st.integers(1, 2), kind=st.sampled_from(["save", "load"]))
    def lose_copies(self, count: int, kind: str) -> None:
        """The next copies to or from the host fail."""
        fails = iter([True] * count)
        self.device.copy_fails = lambda asked: asked == kind and next(fails, False)

    @rule()
    def drop_index(self) -> None:
        """Somebody resets the prefix cache while steps are in flight."""
        self.pages.drop_prefix_index()

    def turn(self) -> None:
        """One step: whoever is late when it begins is gone when it ends."""
        tokens = self.device.plans[-1].num_tokens if self.device.plans else 0
        self.now += 0.25 + tokens / 1000
        live = self.requests.keys() - self.finished.keys()
        deadlines = {name: self.requests[name].deadline for name in live}
        late = {name for name, deadline in deadlines.items() if deadline is not None and deadline <= self.now}
        self.late |= late
        self.collect(self.engine.step())
        assert late <= self.finished.keys()

    def collect(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.finished and output.request_id not in self.finished
            self.finished[output.request_id] = output

    @invariant()
    def pools_hold(self) -> None:
        if not hasattr(self, "pages"):
            return
        self.pages.check()
        scheduler = self.engine.scheduler
        batch = scheduler.batch
        owners = [sequence.pages for sequence in (*batch.decoding, *batch.prefilling)]
        for g, pool in enumerate(self.pages.pools):
            owned = [page for pages in owners for page in pages.page_ids[g] if page]
            loading = self.pages.host.list_loading(g)
            assert not set(owned) & set(loading)
            assert len(set(owned)) + len(loading) == pool.num_referenced
            assert len(owned) + len(loading) == sum(pool._counts)
        assert all(
            s.status is not SequenceStatus.RUNNING and not any(s.pages.page_ids) for s in self.engine.scheduler.waiting
        )
        for sequences in (scheduler.waiting, batch.decoding, batch.prefilling):
            keys = [(sequence.request.rank, sequence.order) for sequence in sequences]
            assert keys == sorted(keys)
        unfinished = self.requests.keys() - self.finished.keys()
        assert len(self.engine._deadlines) == sum(self.requests[name].deadline is not None for name in unfinished)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        work = sum(r.params.n * (len(r.prompt_token_ids) + 60) for r in self.requests.values())
        for _ in range(20 * work + 10):
            if not self.engine.has_unfinished:
                break
            self.turn()
        assert not self.engine.has_unfinished, "no progress"
        assert self.finished.keys() == self.requests.keys()
        for request_id, request in self.requests.items():
            self.check_output(request, self.finished[request_id])
        for g, pool in enumerate(self.pages.pools):
            assert pool.num_referenced == len(self.pages.host.list_loading(g)), "a load outlives the request it is for"
        assert not self.pages.snapshots.num_pending, "a slot outlives the sequence it is for"
        assert self.engine.scheduler.waiting.num_new == self.engine.scheduler.waiting.num_new_tokens == 0
        self.pages.check()
        if not self.device.plans:
            return
        limits = self.engine.scheduler.limits
        assert max(plan.num_tokens for plan in self.device.plans) <= limits.max_num_batched_tokens
        assert max(plan.num_rows for plan in self.device.plans) <= limits.max_num_seqs
        if limits.options.deterministic:
            assert not any(plan.decode_rows and plan.num_tokens > plan.num_rows for plan in self.device.plans)
            assert self.struck or not self.engine.scheduler.counts.num_preemptions

    def check_output(self, request: Request, output: RequestOutput) -> None:
        assert [completion.index for completion in output.outputs] == list(range(request.params.n))
        wanted = min(request.params.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - len(request.prompt_token_ids))
        wanted = 0 if request.task is Task.POOL else wanted
        alone = continue_alone(request.prompt_token_ids, wanted, self.windows, VOCAB)
        stops = [i for i, token in enumerate(alone) if token in request.params.stop_token_ids]
        expected = alone[: stops[0] + 1] if stops else alone
        reasons = {completion.finish_reason for completion in output.outputs}
        assert len(reasons & {"abort", "error", "timeout"}) <= 1 or "error" in reasons
        assert "abort" not in reasons or request.request_id in self.aborted
        was_displaced = request.request_id in self.displaced
        assert was_displaced == isinstance(output.error, QueueFullError)
        assert not was_displaced or (reasons == {"error"} and not any(c.token_ids for c in output.outputs))
        assert "error" not in reasons or self.struck or was_displaced
        assert ("timeout" in reasons) == (request.request_id in self.late)
        assert "timeout" not in reasons or isinstance(output.error, DeadlineError)
        assert "error" not in reasons or isinstance(output.error, DeviceStepError | DeadlineError | QueueFullError)
        for completion in output.outputs:
            if completion.finish_reason in ("abort", "error", "timeout"):
                assert completion.token_ids == expected[: len(completion.token_ids)] and output.embedding is None
                continue
            assert completion.token_ids == expected
            assert completion.finish_reason == ("stop" if stops or request.task is Task.POOL else "length")
            assert completion.stop_reason == (alone[stops[0]] if stops else None)
            assert output.embedding == (
                embed_alone(request.prompt_token_ids, self.windows) if request.task is Task.POOL else None
            )


EngineMachine.TestCase.settings = settings(
    max_examples=scale_examples(300),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes: the failing seed is printed
    print_blob=True,
)
TestEngineMachine = EngineMachine.TestCase


def test_prefix_hit_equals_miss_and_is_reported() -> None:
    engine, device = make_engine()
    prompt = list(range(100))
    first = run(engine, [greedy("a", prompt, 10)])["a"]
    second = run(engine, [greedy("b", prompt, 10)])["b"]
    other_tenant = run(engine, [greedy("c", prompt, 10, cache_salt="other")])["c"]
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == other_tenant.outputs[0].token_ids
    assert (first.num_cached_tokens, second.num_cached_tokens, other_tenant.num_cached_tokens) == (0, 96, 0)
    assert [len(plan.chunks[0].token_ids) for plan in device.plans if plan.chunks] == [64, 36, 4, 64, 36]


def test_whole_prompt_cached_still_computes_one_page() -> None:
    engine, _ = make_engine()
    run(engine, [greedy("a", range(64), 4)])
    assert run(engine, [greedy("b", range(64), 4)])["b"].num_cached_tokens == 32


@pytest.mark.parametrize("kind", list(OutputKind))
def test_cached_tokens_are_those_that_the_request_found(kind: OutputKind) -> None:
    engine, _ = make_engine()
    params = SamplingParams(max_tokens=3, n=3, output_kind=kind)
    for name, expected in (("cold", 0), ("warm", 96)):
        engine.add_request(Request(name, tuple(range(100)), params))
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        assert {output.num_cached_tokens for output in outputs} == {expected}


def test_without_a_prefix_cache_a_request_shares_with_itself_only() -> None:
    engine, device = make_engine(caching=False)
    params = SamplingParams(max_tokens=3, n=3, output_kind=OutputKind.FINAL_ONLY)
    for _ in range(2):  # the id may come again
        (output,) = run(engine, [Request("same", tuple(range(100)), params)]).values()
        assert output.num_cached_tokens == 0
        assert [len(chunk.token_ids) for plan in device.plans for chunk in plan.chunks] == [64, 36, 4, 4]
        device.plans.clear()


def test_preempted_equals_not_preempted() -> None:
    tight, device = make_engine(num_pages=8, caching=False)
    requests = [greedy(f"r{i}", range(i, i + 33), 60) for i in range(3)]
    outputs = run(tight, requests)
    assert sum(output.metrics.num_preemptions for output in outputs.values() if output.metrics) > 0
    for request in requests:
        alone = continue_alone(request.prompt_token_ids, 60, [None], device.vocab_size)
        assert outputs[request.request_id].outputs[0].token_ids == alone


def test_overlap_equals_plain_loop_and_wastes_one_row_a_stop() -> None:
    requests = [greedy(f"r{i}", range(i, i + 40), 20) for i in range(6)]
    overlapped, device = make_engine(overlap=True)
    plain, plain_device = make_engine(overlap=False)
    first, second = run(overlapped, requests), run(plain, requests)
    assert {k: v.outputs[0].token_ids for k, v in first.items()} == {
        k: v.outputs[0].token_ids for k, v in second.items()
    }
    assert sum(p.num_tokens for p in device.plans) == sum(
        p.num_tokens for p in plain_device.plans
    )  # length is foreseen


def test_non_finite_row_ends_alone_and_is_not_cached() -> None:
    engine, device = make_engine(rows=2)
    device.poison_rows = {0}
    outputs = run(engine, [greedy("bad", range(40), 5), greedy("good", range(100, 140), 5)])
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert isinstance(outputs["bad"].error, NonFiniteLogitsError)
    assert outputs["good"].outputs[0].token_ids == continue_alone(range(100, 140), 5, [None], device.vocab_size)
    device.poison_rows = set()
    assert run(engine, [greedy("again", range(40), 5)])["again"].num_cached_tokens == 0


def test_the_error_of_one_completion_is_that_of_its_request() -> None:
    engine, device = make_engine(rows=2)
    params = SamplingParams(max_tokens=5, n=3, output_kind=OutputKind.FINAL_ONLY)
    engine.add_request(Request("a", tuple(range(40)), params))
    for _ in range(3):
        engine.step()
    device.poison_rows = {0}
    outputs = engine.step()
    device.poison_rows = set()
    while engine.has_unfinished:
        outputs += engine.step()
    (output,) = outputs
    assert [completion.finish_reason for completion in output.outputs] == ["error", "length", "length"]
    assert isinstance(output.error, NonFiniteLogitsError)


def test_failed_step_ends_its_requests_and_spares_the_waiting() -> None:
    engine, device = make_engine(rows=1)
    engine.add_request(greedy("hit", range(40), 5))
    engine.add_request(greedy("spared", range(50, 90), 5))
    device.fail_next = RuntimeError("out of memory")
    outputs = run(engine, [])
    assert isinstance(outputs["hit"].error, DeviceStepError)
    assert outputs["spared"].outputs[0].token_ids == continue_alone(range(50, 90), 5, [None], device.vocab_size)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_may_fill_the_context_where_no_answer_needs_room(overlap: bool) -> None:
    engine, device = make_engine(overlap=overlap)
    outputs = run(engine, [greedy("a", range(512), 5, task=Task.READ), greedy("b", range(9), 2)])
    (ended,) = outputs["a"].outputs
    assert (ended.token_ids, ended.finish_reason) == ([], "length")
    assert outputs["b"].outputs[0].token_ids == continue_alone(range(9), 2, [None], device.vocab_size)
    with pytest.raises(InvalidRequestError, match="has 513; shorten it"):
        engine.add_request(greedy("c", range(513), 5, task=Task.READ))
    with pytest.raises(InvalidRequestError, match="has 512; at most 511 leave room for an answer"):
        engine.add_request(greedy("d", range(512), 5))


def test_a_prompt_alone_still_reports_logits_that_are_not_finite() -> None:
    engine, device = make_engine(rows=1)
    device.poison_rows = {0}
    outputs = run(engine, [greedy("a", range(512), 5, task=Task.READ)])
    assert isinstance(outputs["a"].error, NonFiniteLogitsError)


def test_a_request_left_without_a_token_is_told_its_own_field() -> None:
    engine, _ = make_engine()
    for given, field in (({"bad_words": ["a"]}, "bad_words"), ({"logit_bias": {5: 1}, "min_tokens": 1}, "logit_bias")):
        params = SamplingParams(temperature=0, max_tokens=2, **given)
        (sequence,) = engine.scheduler.add(Request("a", (1, 2), params))
        error = _explain(sequence, NO_TOKEN_LEFT)
        assert isinstance(error, NoTokenLeftError) and error.field == field
        assert all(name in str(error) for name in given)
        engine.scheduler.finish("a", FinishReason.ABORT)


def test_refusals_name_the_field() -> None:
    engine, _ = make_engine(num_pages=4)
    with pytest.raises(InvalidRequestError, match=r"^prompt: .*empty"):
        engine.add_request(greedy("a", [], 5))
    with pytest.raises(InvalidRequestError, match="maximum context length is 512 tokens"):
        engine.add_request(greedy("b", range(600), 5))
    with pytest.raises(CapacityError, match=r"max_tokens: 300 .*10 KV pages.* 3\b"):
        engine.add_request(greedy("c", range(40), 260))
    engine.add_request(greedy("d", range(4), 5))
    with pytest.raises(InvalidRequestError, match="request_id"):
        engine.add_request(greedy("d", range(4), 5))
