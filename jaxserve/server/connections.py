"""A limit on connections: which are idle, and which is closed when there are too many."""

from __future__ import annotations

from itertools import islice
from typing import Protocol

PROBE_RESERVE = 64  # connections beyond the limit, for probes only
_LOOKS = 16  # idle connections that are examined for one that has nothing unread


class Connection(Protocol):
    """What the limiter needs of a connection."""

    @property
    def has_unread(self) -> bool:
        """Whether bytes of it are still to be read: of its last answer by the client, or of a request by the server."""

    def drop(self) -> None:
        """Closes without waiting for the client."""


class ConnectionLimiter:
    """Limits the connections of one server: the one that has been idle longest makes room for a new one.

    A connection is idle while it has no request in progress, which begins when its whole head has arrived.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._idle: dict[Connection, None] = {}
        self._busy: set[Connection] = set()

    def add(self, connection: Connection) -> None:
        """Adds a connection. Beyond the limit the longest idle one is dropped, or the new one if all are busy."""
        num_open = len(self._idle) + len(self._busy)
        if num_open < self.limit or self._drop_oldest() or num_open < self.limit + PROBE_RESERVE:
            self._idle[connection] = None
        else:
            connection.drop()

    def begin(self, connection: Connection) -> bool:
        """Notes that a request has begun; returns whether the limit is exceeded, so that only probes are answered."""
        self._idle.pop(connection, None)
        self._busy.add(connection)
        return len(self._busy) > self.limit

    def end(self, connection: Connection) -> None:
        """Notes that the connection is idle again."""
        self._busy.discard(connection)
        self._idle[connection] = None

    def remove(self, connection: Connection) -> None:
        """Removes a closed connection."""
        self._busy.discard(connection)
        self._idle.pop(connection, None)

    def _drop_oldest(self) -> bool:
        for oldest in list(islice(self._idle, _LOOKS)):
            del self._idle[oldest]
            if not oldest.has_unread:
                oldest.drop()
                return True
            self._idle[oldest] = None
        return False
