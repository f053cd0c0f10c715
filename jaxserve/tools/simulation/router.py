"""The simulated router: it chooses the replica that gets a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxserve.request import Request
from jaxserve.tools.simulation.replica import EngineSpec, Replica

# A replica with more unfinished requests than this factor and this many more of the idlest one's is passed over.
_MOST_LOAD_FACTOR, _MOST_LOAD_EXTRA = 1.5, 8


class Router(Protocol):
    """Chooses replicas; `jaxserve simulate --router` names the choices."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica: ...


class RoundRobin:
    """Each replica in turn."""

    def __init__(self, spec: EngineSpec, num_replicas: int) -> None:
        self._next = 0

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        self._next = (self._next + 1) % len(replicas)
        return replicas[self._next - 1]


class LeastLoaded:
    """The replica with the fewest unfinished requests."""

    def __init__(self, spec: EngineSpec, num_replicas: int) -> None:
        pass

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=lambda replica: replica.num_unfinished)


class LongestPrefix:
    """The replica that was sent the longest beginning of the prompt, unless it has much more to do than others.

    The router keeps what it sent to each replica, by page, and forgets the least recently used of as many pages as the
    replica holds on its device and on its host.
    """

    def __init__(self, spec: EngineSpec, num_replicas: int) -> None:
        self._page_size = spec.page_size
        self._capacity = max(group.num_pages for group in spec.groups) - 1 + spec.num_host_slots
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        keys = self._make_keys(request)
        least = min(replica.num_unfinished for replica in replicas)
        limit = _MOST_LOAD_FACTOR * least + _MOST_LOAD_EXTRA
        free = [replica for replica in replicas if replica.num_unfinished <= limit]
        chosen = max(free, key=lambda replica: (self._count_known(replica.index, keys), -replica.num_unfinished))
        self._remember(chosen.index, keys)
        return chosen

    def _make_keys(self, request: Request) -> list[int]:
        """Returns a key for each full page, which covers all tokens before it."""
        ids, size = request.prompt_token_ids, self._page_size
        key, keys = hash(request.cache_salt), []
        for start in range(0, len(ids) - size + 1, size):
            key = hash((key, ids[start : start + size]))
            keys.append(key)
        return keys

    def _count_known(self, index: int, keys: Sequence[int]) -> int:
        sent = self._sent[index]
        return next((count for count, key in enumerate(keys) if key not in sent), len(keys))

    def _remember(self, index: int, keys: Sequence[int]) -> None:
        sent = self._sent[index]
        for key in reversed(keys):  # the head of a prompt is forgotten last
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > self._capacity:
            sent.popitem(last=False)


ROUTERS: dict[str, Callable[[EngineSpec, int], Router]] = {
    "prefix": LongestPrefix,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
}
