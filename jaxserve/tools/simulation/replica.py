"""Requests with arrival times, run through an engine in virtual time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.pages.manager import CHUNK_EDGE
from jaxserve.core.runtime.buckets import BucketTable
from jaxserve.core.scheduler import Commit, Scheduler, SchedulerLimits, StepOutputs, StepPlan
from jaxserve.engine.engine import Engine
from jaxserve.errors import JaxServeError
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import OutputKind, SamplingParams
from jaxserve.tools.simulation.clock import VirtualClock
from jaxserve.tools.simulation.device import StepFormula, VirtualDevice


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is made of, with a formula in place of the device."""

    limits: SchedulerLimits
    groups: tuple[PageGroup, ...]
    buckets: BucketTable
    formula: StepFormula
    page_size: int = 64
    enable_prefix_caching: bool = True
    num_host_slots: int = 0  # pages of each group that the host tier holds
    max_copies: int = 0  # pages that a step loads from it
    num_snapshots: int = 0  # of recurrent states
    hit_grid: int = CHUNK_EDGE  # tokens; cached prefixes end at its multiples
    overlap: bool = True  # plan and dispatch a step while one runs

    def with_buckets(self, buckets: BucketTable) -> EngineSpec:
        """Returns the engine with other padded sizes."""
        limits = replace(
            self.limits,
            row_sizes=buckets.row_counts,
            token_sizes=buckets.token_counts,
            loop_rows=buckets.loop_rows,
        )
        return replace(self, limits=limits, buckets=buckets)


@dataclass(slots=True)
class Timeline:
    """What became of one request; all times are seconds on the virtual clock."""

    request_id: str
    tenant: str
    service_tier: str
    arrival_time: float
    num_prompt_tokens: int
    token_times: array[float] = field(default_factory=lambda: array("d"))  # when the host had each output token
    finished_time: float | None = None  # None: refused, or unfinished
    finish_reason: str | None = None
    error: JaxServeError | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    replica: int = 0

    @classmethod
    def of(cls, request: Request, replica: int = 0) -> Timeline:
        """Returns the timeline of a request that has just arrived."""
        name, tier, length = request.tenant.name, str(request.service_tier), len(request.prompt_token_ids)
        return cls(request.request_id, name, tier, request.arrival_time, length, replica=replica)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None if there is none."""
        return self.token_times[0] - self.arrival_time if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None if there is none."""
        count = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / count if count > 0 else None

    @property
    def itls(self) -> Iterator[float]:
        """The seconds between consecutive tokens."""
        return (later - earlier for earlier, later in pairwise(self.token_times))


def make_request(
    request_id: str, arrival_time: float, prompt_token_ids: Iterable[int], num_output_tokens: int, **fields: object
) -> Request:
    """Returns a request that generates exactly `num_output_tokens`; `fields` are further ones of `Request`."""
    params = SamplingParams(
        temperature=0, max_tokens=num_output_tokens, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY
    )
    return Request(request_id, tuple(prompt_token_ids), params, arrival_time=arrival_time, **fields)  # type: ignore[arg-type]


class TimedScheduler(Scheduler):
    """Notes when each token of a request in `timelines` reached the host."""

    def __init__(self, limits: SchedulerLimits, pages: PageManager, clock: Callable[[], float]) -> None:
        super().__init__(limits, pages, clock)
        self.timelines: dict[str, Timeline] = {}

    def commit(self, plan: StepPlan, outputs: StepOutputs) -> Commit:
        """Commits as its base does, and notes the time once for each token."""
        commit, now, timelines = super().commit(plan, outputs), self.clock(), self.timelines
        for sequence, run in zip(commit.sequences, commit.runs, strict=True):
            times = timelines[sequence.request.request_id].token_times
            for _ in run:
                times.append(now)
        return commit


class Replica:
    """One engine on a virtual clock of its own, with the timelines of its requests.

    Args:
        on_finish: called with the timeline of each request that ends, for example to send the client's next one.
    """

    def __init__(
        self, spec: EngineSpec, *, index: int = 0, on_finish: Callable[[Timeline], None] | None = None
    ) -> None:
        self.index = index
        self.clock = VirtualClock()
        pages = PageManager(
            spec.groups,
            page_size=spec.page_size,
            max_chunk=spec.limits.max_num_batched_tokens,
            enable_prefix_caching=spec.enable_prefix_caching,
            num_host_slots=spec.num_host_slots,
            max_copies=spec.max_copies,
            num_snapshots=spec.num_snapshots,
            hit_grid=spec.hit_grid,
        )
        self.scheduler = TimedScheduler(spec.limits, pages, self.clock)
        self.device = VirtualDevice(spec.formula, spec.buckets, self.clock)
        self.engine = Engine(self.scheduler, self.device, overlap=spec.overlap)
        self.num_unfinished = 0
        self._on_finish = on_finish

    def add(self, request: Request) -> Timeline:
        """Queues a request; one that can never run, or finds the queue full, gets an error in its timeline."""
        timeline = Timeline.of(request, self.index)
        if not self.engine.has_unfinished:
            self.clock.advance_to(request.arrival_time)
        try:
            displaced = self.scheduler.queue_admission.find_room([request])
            self.engine.add_request(request)
        except JaxServeError as error:
            timeline.error = error
            return timeline
        self.scheduler.timelines[request.request_id] = timeline
        self.num_unfinished += 1
        self._note_outputs(self.engine.displace(displaced))
        return timeline

    def run_until(self, seconds: float) -> None:
        """Runs steps while there is work and the time has not come; the last step may end later."""
        engine, clock = self.engine, self.clock
        while clock.now < seconds and engine.has_unfinished:
            if outputs := engine.step():
                self._note_outputs(outputs)

    def run(self) -> None:
        """Runs until nothing is left to do."""
        self.run_until(float("inf"))

    def _note_outputs(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            if not output.finished:
                continue
            timeline = self.scheduler.timelines.pop(output.request_id)
            self.num_unfinished -= 1
            timeline.num_cached_tokens, timeline.error = output.num_cached_tokens, output.error
            timeline.finish_reason = output.outputs[0].finish_reason
            if (metrics := output.metrics) is not None:
                timeline.finished_time, timeline.num_preemptions = metrics.finished_time, metrics.num_preemptions
            if self._on_finish is not None:
                self._on_finish(timeline)


def simulate(requests: Iterable[Request], spec: EngineSpec) -> list[Timeline]:
    """Runs requests, ordered by `arrival_time` on the virtual clock, through one engine; returns their timelines.

    Requests are taken when they arrive, so an iterator need not hold all prompts at once.
    """
    replica, timelines = Replica(spec), []
    for request in requests:
        replica.run_until(request.arrival_time)
        timelines.append(replica.add(request))
    replica.run()
    return timelines
