"""Fairness between tenants: lanes of waiting sequences, and which lane is next."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as List
from typing import Protocol

from jaxserve.core.scheduler.sequence import Sequence
from jaxserve.core.scheduler.step_plan import ChunkWork
from jaxserve.request import Rank, Tenant

_OUTPUT_WEIGHT = 2  # an output token costs as much as so many prompt tokens


class TurnOrder(Protocol):
    """The order of tenants."""

    def find_lane(self, sequence: Sequence) -> str:
        """Returns the name of the sequence's lane. A lane is ordered by age."""
        ...

    def enter(self, lane: str, others: Iterable[str]) -> None:
        """Notes that an empty lane gets a sequence; `others` are those that are not empty."""
        ...

    def choose(self, heads: List[Sequence]) -> Sequence:
        """Returns the first in line among the first of each lane."""
        ...

    def count_turns(self, tenant: Tenant, other: Tenant) -> float:
        """Returns how many sequences of another tenant go before each of a tenant's, if they have the same rank."""
        ...

    def charge_prompt(self, sequence: Sequence, chunk: ChunkWork) -> None:
        """Notes that a chunk is computed for a sequence."""
        ...

    def charge_outputs(self, sequences: Iterable[Sequence], runs: Iterable[List[int]]) -> None:
        """Notes the tokens that a step brought."""
        ...


class ArrivalOrder:
    """All tenants share one lane: who came first is next."""

    def find_lane(self, sequence: Sequence) -> str:
        return ""

    def enter(self, lane: str, others: Iterable[str]) -> None:
        pass

    def choose(self, heads: List[Sequence]) -> Sequence:
        return heads[0]

    def count_turns(self, tenant: Tenant, other: Tenant) -> float:
        return math.inf  # all that came before

    def charge_prompt(self, sequence: Sequence, chunk: ChunkWork) -> None:
        pass

    def charge_outputs(self, sequences: Iterable[Sequence], runs: Iterable[List[int]]) -> None:
        pass


class FairOrder:
    """A lane for each tenant, with a virtual token counter: within a rank, the tenant served least is next.

    A counter is the cost of what the tenant was served, divided by its weight. A prompt token costs 1 when it is first
    computed and an output token 2; tokens from the prefix cache are free. A tenant that returns starts at the least
    counter of those that wait, so nobody saves credit while idle (Sheng et al. 2024, "Fairness in Serving Large
    Language Models").
    """

    def __init__(self) -> None:
        self.counters: defaultdict[str, float] = defaultdict(float)  # by tenant; there are as many as tenants
        self._latest = ""  # the tenant whose prompt was computed last

    def find_lane(self, sequence: Sequence) -> str:
        return sequence.request.tenant.name

    def enter(self, lane: str, others: Iterable[str]) -> None:
        least = min((self.counters[name] for name in others), default=self.counters.get(self._latest, 0.0))
        self.counters[lane] = max(self.counters[lane], least)

    def choose(self, heads: List[Sequence]) -> Sequence:
        return min(heads, key=self._find_turn)

    def count_turns(self, tenant: Tenant, other: Tenant) -> float:
        return other.weight / tenant.weight

    def charge_prompt(self, sequence: Sequence, chunk: ChunkWork) -> None:
        end = min(chunk.end, sequence.num_prompt_tokens)
        new = end - max(chunk.start, sequence.num_charged_tokens)
        if new > 0:
            sequence.num_charged_tokens = end
            tenant = sequence.request.tenant
            self.counters[tenant.name] += new / tenant.weight
            self._latest = tenant.name

    def charge_outputs(self, sequences: Iterable[Sequence], runs: Iterable[List[int]]) -> None:
        counters = self.counters
        for sequence, run in zip(sequences, runs, strict=True):
            tenant = sequence.request.tenant
            counters[tenant.name] += _OUTPUT_WEIGHT * len(run) / tenant.weight

    def _find_turn(self, head: Sequence) -> tuple[Rank, float, int]:
        request = head.request
        return request.rank, self.counters[request.tenant.name], head.order
