"""A trace through several replicas behind a router."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxserve.request import Request
from jaxserve.tools.simulation.replica import EngineSpec, Replica, Timeline
from jaxserve.tools.simulation.router import ROUTERS


@dataclass(frozen=True, slots=True)
class FleetRun:
    """The result of a trace."""

    spec: EngineSpec
    timelines: list[Timeline]  # by arrival
    replicas: list[Replica]

    @property
    def end(self) -> float:
        """Virtual seconds from the first arrival to the last token."""
        return max((timeline.finished_time or 0.0 for timeline in self.timelines), default=0.0)


class _GaveUpError(Exception):
    """Nobody wants to know the rest of the run."""


def run_fleet(
    requests: Iterable[Request],
    spec: EngineSpec,
    *,
    num_replicas: int = 1,
    router: str = "prefix",
    report: Callable[[int], None] = lambda done: None,
    give_up: Callable[[Timeline], bool] | None = None,
) -> FleetRun | None:
    """Runs requests, ordered by arrival, through equal replicas. All replicas have reached a request's arrival, or work
    on the step in which it falls, when the router chooses by their load.

    Args:
        router: a name in `ROUTERS`.
        report: called with the number of requests that arrived.
        give_up: called with each request that ends; the run stops, and returns None, once it says yes.
    """

    def watch(timeline: Timeline) -> None:
        if give_up is not None and give_up(timeline):
            raise _GaveUpError

    replicas = [Replica(spec, index=index, on_finish=watch) for index in range(num_replicas)]
    chooser, timelines = ROUTERS[router](spec, num_replicas), []
    try:
        for done, request in enumerate(requests, 1):
            for replica in replicas:
                replica.run_until(request.arrival_time)
            timelines.append(chooser.choose(request, replicas).add(request))
            report(done)
        for replica in replicas:
            replica.run()
    except _GaveUpError:
        return None
    return FleetRun(spec, timelines, replicas)
