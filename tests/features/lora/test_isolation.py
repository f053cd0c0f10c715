"""Adapters never mix: the engine over a fake device with two slots and twenty adapters, under every order of events.

What the fake device stores of a token has the load of its row's slot in it. So a foreign slot shows as another token,
and so does a page that another adapter, or another load of the same one, has written.
"""

from __future__ import annotations

import gc
import itertools
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxserve import LoRARequest
from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.scheduler import Scheduler, SchedulerLimits, StepPlan
from jaxserve.engine.engine import Engine
from jaxserve.errors import InvalidRequestError
from jaxserve.features.lora.store import AdapterStore
from jaxserve.request import Request, RequestOutput, ServiceTier, Tenant
from jaxserve.sampling_params import OutputKind, SamplingParams
from jaxserve.scheduler_options import SchedulerOptions
from tests.examples import scale_examples
from tests.fake_device import FakeDevice, FakeStep

SLOTS, ADAPTERS, VOCAB, MARK, PAGE = 2, 20, 211, 10**6, 4
MAX_MODEL_LEN = 120


class AdapterDevice(FakeDevice):
    """A fake device with slots; it writes what the store has of a load.

    What must not be is noted in `faults`: the engine would take an error for a fault of the device, and go on.
    """

    store: AdapterStore
    num_slots = SLOTS

    def __init__(self, *args: Any, **options: Any) -> None:
        self.faults: list[str] = []
        super().__init__(*args, **options)

    def reset(self) -> None:
        super().reset()
        self.slots: dict[int, int] = {}
        self.row_slots: dict[int, int] = {}
        self.num_writes = 0

    def start(self, plan: StepPlan) -> FakeStep:
        for slot, generation in plan.adapter_writes:
            self._expect(1 <= slot <= self.num_slots, "there is no such slot")
            try:
                self.store.find_copy(generation)
            except KeyError:
                self._expect(False, "the copy is gone before it was written")
            self.slots[slot] = generation
            self.num_writes += 1
        self.row_slots |= {new_row.row: new_row.adapter for new_row in plan.new_rows}
        rows = (*plan.decode_rows, *(chunk.row for chunk in plan.chunks))
        used = {self.row_slots[row] for row in rows} - {0}
        self._expect(plan.adapters >= max(used, default=0), "the programs lack a slot")
        self._expect(used <= self.slots.keys(), "a slot was never written")
        return super().start(plan)

    def _expect(self, is_right: bool, fault: str) -> None:
        if not is_right:
            self.faults.append(fault)

    def _write(self, row: int, token_ids: Sequence[int]) -> None:
        slot = self.row_slots[row]
        super()._write(row, [token_id + (self.slots[slot] if slot else 0) * MARK for token_id in token_ids])


def continue_with(prompt: Sequence[int], num_tokens: int, generation: int) -> list[int]:
    """What a request gets when nothing else is in the world."""
    ids = list(prompt)
    for _ in range(num_tokens):
        stored = [token_id + generation * MARK for token_id in ids]
        ids.append(crc32(array("q", stored).tobytes() + bytes([len(ids) % 251])) % VOCAB)
    return ids[len(prompt) :]


class AdapterMachine(RuleBasedStateMachine):
    @initialize(
        tokens_of_pool=st.integers(130, 400),
        rows=st.integers(1, 5),
        caching=st.booleans(),
        overlap=st.booleans(),
        host=st.sampled_from([(0, 0), (8, 2)]),
        policies=st.fixed_dictionaries(
            {"scheduling_policy": st.sampled_from(["fcfs", "fair"])},
            optional={"priority_scheduling_preemption_threshold": st.just(1), "max_decode_steps": st.just(4)},
        ),
    )
    def start(
        self, tokens_of_pool: int, rows: int, caching: bool, overlap: bool, host: tuple[int, int], policies: Any
    ) -> None:
        groups = [PageGroup(2 + tokens_of_pool // PAGE)]
        pages = PageManager(
            groups,
            page_size=PAGE,
            max_chunk=rows + 32,
            enable_prefix_caching=caching,
            num_host_slots=host[0],
            max_copies=host[1],
        )
        limits = SchedulerLimits(
            max_num_seqs=rows,
            max_num_batched_tokens=rows + 32,
            max_model_len=MAX_MODEL_LEN,
            max_prefix_updates=MAX_MODEL_LEN // PAGE,
            loop_rows=rows,
            num_adapters=SLOTS,
            options=SchedulerOptions(**policies),
        )
        self.device = AdapterDevice(groups, page_size=PAGE, vocab_size=VOCAB)
        self.device.store = self.store = AdapterStore(lambda path: path.name, 3)
        self.engine = Engine(Scheduler(limits, pages, lambda: 0.0), self.device, overlap=overlap)
        self.paths: dict[int, int] = {}  # by adapter: which of its files it has
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, RequestOutput] = {}
        self.aborted: set[str] = set()
        self.struck = False

    @rule(
        adapter=st.one_of(st.just(0), st.integers(1, ADAPTERS), st.integers(1, 2), st.integers(1, 2)),
        shared=st.sampled_from([0, 5, 30, 30, 40]),
        own=st.integers(1, 30),
        max_tokens=st.integers(1, 20),
        salt=st.sampled_from(["", "1:", "2:tenant", "0:"]),
        tier=st.sampled_from(ServiceTier),
        priority=st.sampled_from([0, 0, 3]),
        tenant=st.sampled_from(["", "other"]),
        n=st.sampled_from([1, 1, 1, 2]),
    )
    def add(
        self,
        adapter: int,
        shared: int,
        own: int,
        max_tokens: int,
        salt: str,
        tier: ServiceTier,
        priority: int,
        tenant: str,
        n: int,
    ) -> None:
        count = len(self.requests)
        prompt = (*range(shared), *((count * 31 + at) % VOCAB for at in range(own)))
        request = Request(
            f"r{count}",
            prompt,
            SamplingParams(temperature=0, max_tokens=max_tokens, n=n, output_kind=OutputKind.FINAL_ONLY),
            cache_salt=salt,
            service_tier=tier,
            priority=priority,
            tenant=Tenant(tenant),
            adapter=self.store.find(self.name(adapter)) if adapter else None,
        )
        self.engine.add_request(request)
        self.requests[request.request_id] = request

    def name(self, adapter: int) -> LoRARequest:
        return LoRARequest(f"a{adapter}", adapter, f"/adapters/{adapter}/{self.paths.get(adapter, 0)}")

    @rule(adapter=st.one_of(st.integers(1, 2), st.integers(1, ADAPTERS)), other=st.booleans())
    def reload(self, adapter: int, other: bool) -> None:
        """Its files are read anew, perhaps others; requests that have it go on with the old ones."""
        self.paths[adapter] = self.paths.get(adapter, 0) + other
        before = self.store.counts.loads
        self.store.find(self.name(adapter), anew=True)
        assert self.store.counts.loads == before + 1

    @rule(adapter=st.integers(1, ADAPTERS))
    def unload(self, adapter: int) -> None:
        self.store.remove(f"a{adapter}")

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.collect(self.engine.step())

    @rule(pick=st.integers(0, 10**6))
    def abort(self, pick: int) -> None:
        live = sorted(self.requests.keys() - self.finished.keys())
        if live:
            output = self.engine.abort_request(name := live[pick % len(live)])
            assert output is not None
            self.aborted.add(name)
            self.collect([output])

    @rule()
    def strike(self) -> None:
        """The next step fails on the device, whose slots are then empty."""
        self.device.fail_next, self.struck = RuntimeError("struck"), True

    @rule()
    def update_weights(self) -> None:
        """As `update_weights` does: nothing is in flight, and what was computed is not kept."""
        self.collect(self.engine.drain())
        self.engine.scheduler.requeue_running()

    def collect(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.finished
            self.finished[output.request_id] = output

    @invariant()
    def slots_hold(self) -> None:
        if not hasattr(self, "engine"):
            return
        batch = self.engine.scheduler.batch
        running = [sequence.request.generation for sequence in (*batch.decoding, *batch.prefilling)]
        counts = {generation: running.count(generation) for generation in running if generation}
        assert counts == batch.num_by_adapter and len(counts) <= SLOTS
        assert not self.device.faults

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.engine.has_unfinished:
                break
            self.collect(self.engine.step())
        assert not self.engine.has_unfinished and not self.device.faults, "a request never ends"
        assert self.finished.keys() == self.requests.keys()
        for name, output in self.finished.items():
            request = self.requests[name]
            for completion in output.outputs:
                length = len(completion.token_ids)
                expected = continue_with(request.prompt_token_ids, length, request.generation)
                assert completion.token_ids == expected, "the answer is that of another adapter, or another load"
                ended = completion.finish_reason == "length" and length == request.params.max_tokens
                assert ended or name in self.aborted or (completion.finish_reason == "error" and self.struck)


AdapterMachine.TestCase.settings = settings(
    max_examples=scale_examples(100),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    phases=set(Phase) - {Phase.explain},
)
TestAdapters = AdapterMachine.TestCase


def make_adapter_engine(slots: int = 1, rows: int = 4) -> tuple[Engine, AdapterDevice, AdapterStore]:
    groups = [PageGroup(200)]
    limits = SchedulerLimits(
        max_num_seqs=rows,
        max_num_batched_tokens=64,
        max_model_len=MAX_MODEL_LEN,
        max_prefix_updates=MAX_MODEL_LEN,
        num_adapters=slots,
    )
    device = AdapterDevice(groups, page_size=PAGE, vocab_size=VOCAB)
    device.store, device.num_slots = AdapterStore(lambda path: path.name, 4), slots
    pages = PageManager(groups, page_size=PAGE, max_chunk=64, enable_prefix_caching=True)
    return Engine(Scheduler(limits, pages, lambda: 0.0), device), device, device.store


def make_request(name: str, store: AdapterStore, adapter: int, max_tokens: int = 5, **changes: Any) -> Request:
    found = store.find(LoRARequest(f"a{adapter}", adapter, f"/{adapter}")) if adapter else None
    params = SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=OutputKind.FINAL_ONLY)
    return Request(name, tuple(range(10)), params, adapter=found, **changes)


def test_an_adapter_without_a_slot_waits_its_turn_and_lets_the_base_pass():
    engine, device, store = make_adapter_engine()
    ended: list[str] = []
    engine.add_request(make_request("first", store, 1, 30))
    engine.step()
    engine.add_request(make_request("waits", store, 2, 5))
    engine.add_request(make_request("base", store, 0, 5))
    engine.add_request(make_request("joins no more", store, 1, 1))
    engine.add_request(make_request("in front", store, 1, 2, service_tier=ServiceTier.PRIORITY))
    while engine.has_unfinished:
        ended += [output.request_id for output in engine.step()]
    assert ended == ["in front", "base", "first", "waits", "joins no more"]
    assert [slot for plan in device.plans for slot, _ in plan.adapter_writes] == [1, 1, 1]


def test_nobody_waits_for_a_request_that_was_aborted():
    engine, _, store = make_adapter_engine()
    engine.add_request(make_request("first", store, 1, 60))
    engine.step()
    engine.add_request(make_request("gone", store, 2))
    engine.add_request(make_request("next", store, 1, 1))
    assert not [output for _ in range(3) for output in engine.step()]
    engine.abort_request("gone")
    assert [output.request_id for _ in range(4) for output in engine.step()] == ["next"]


def test_who_waits_for_a_slot_is_not_asked_in_each_step(monkeypatch: pytest.MonkeyPatch):
    engine, _, store = make_adapter_engine()
    slots, asked = engine.scheduler.adapters, list[str]()
    is_ready = slots.is_ready
    monkeypatch.setattr(slots, "is_ready", lambda each: asked.append(each.request.request_id) or is_ready(each))
    engine.add_request(make_request("first", store, 1, 40))
    for number in range(100):
        engine.add_request(make_request(f"r{number}", store, 2 + number % 5, 2))
    engine.step()
    engine.step()
    asked.clear()
    for number in range(20):
        engine.add_request(make_request(f"later {number}", store, 2, 2))
        assert not engine.step()
    assert set(asked) == {f"later {number}" for number in range(20)}
    while engine.has_unfinished:
        engine.step()


def test_rows_that_must_yield_give_up_the_slot_of_their_adapter():
    engine, _, store = make_adapter_engine()
    engine.add_request(make_request("flex", store, 1, 60, service_tier=ServiceTier.FLEX))
    engine.step()
    engine.add_request(make_request("priority", store, 2, 2, service_tier=ServiceTier.PRIORITY))
    ended = [[output.request_id for output in engine.step()] for _ in range(8)]
    assert ["priority"] in ended
    while engine.has_unfinished:
        ended += [[output.request_id for output in engine.step()]]
    assert ended[-1] == ["flex"]


def test_an_adapter_that_better_tiers_keep_is_not_the_one_that_is_drained():
    engine, _, store = make_adapter_engine(slots=2, rows=8)
    numbers = itertools.count()

    def add(adapter: int, tier: ServiceTier) -> None:
        engine.add_request(make_request(f"{adapter}-{next(numbers)}", store, adapter, 20, service_tier=tier))

    add(1, ServiceTier.DEFAULT)
    add(2, ServiceTier.FLEX)
    add(2, ServiceTier.FLEX)
    engine.step()
    engine.add_request(make_request("waits", store, 3, 2, service_tier=ServiceTier.FLEX))
    ended: list[str] = []
    for step in range(100):
        if step % 10 == 0:
            add(1, ServiceTier.DEFAULT)
            add(2, ServiceTier.FLEX)
        ended += [output.request_id for output in engine.step()]
    assert "waits" in ended


def test_slots_are_taken_from_the_lowest_on_and_kept_for_what_was_used_last():
    engine, device, store = make_adapter_engine(slots=3)
    for name in (1, 2, 1, 3, 2, 1, 4, 3):
        engine.add_request(make_request(f"{len(device.plans)}", store, name, 1))
        while engine.has_unfinished:
            engine.step()
    writes = [write for plan in device.plans for write in plan.adapter_writes]
    assert [slot for slot, _ in writes] == [1, 2, 3, 3, 2], "4 took that of 3, then 3 that of 2"
    assert {plan.adapters for plan in device.plans if plan.num_rows} == {1, 2, 3}


def test_copies_that_nobody_needs_are_dropped():
    engine, device, store = make_adapter_engine(slots=4)
    for number in range(1, 201):
        engine.add_request(make_request(f"r{number}", store, number, 2))
        for _ in range(2):
            engine.step()
        assert store.num_live <= 4 + 5, "more than those kept, and those of rows and of who waits"
    while engine.has_unfinished:
        engine.step()
    gc.collect()
    assert store.num_live <= 4 and device.num_writes == 200


def test_loads_that_no_request_can_name_are_dropped():
    store = AdapterStore(lambda path: path, 8)
    for name, number in (("a", 1), ("b", 2)):
        store.find(LoRARequest(name, number, f"/{name}"))
    for _ in range(5):
        store.find(LoRARequest("a", 1, "/a"), anew=True)
    gc.collect()
    assert store.num_live == 2 and store.find_loaded("a").generation == 7
    store.remove("a")
    gc.collect()
    assert store.num_live == 1 and store.find_loaded("a") is None


def test_a_name_and_a_number_have_one_meaning():
    store = AdapterStore(lambda path: path, 2)
    store.find(LoRARequest("a", 1, "/a"))
    for wanted, message in (
        (LoRARequest("a", 2, "/a"), "'a' has the number 1, not 2"),
        (LoRARequest("b", 1, "/b"), "the number 1 is that of 'a'"),
        (LoRARequest("a", 1, "/other"), "'a' was read from '/a'"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            store.find(wanted)
    assert store.find(LoRARequest("a", 1, "/other"), anew=True).generation == 2
    assert store.remove("a") and not store.remove("a")
    assert store.find(LoRARequest("b", 1, "/b")).copy == Path("/b")
