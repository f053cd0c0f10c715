"""Which connections of a server are idle, and who has to go when there are too many."""

from __future__ import annotations

from itertools import islice
from typing import Protocol

PROBE_RESERVE = 64  # connections beyond the limit, which only probes are answered on
_LOOKS = 16  # at idle connections, for one that has been read to its end


class Connection(Protocol):
    """What a crowd needs to know of one."""

    @property
    def is_unread(self) -> bool:
        """Whether the client has not read all of its last answer yet."""

    def drop(self) -> None:
        """Closes without waiting for the client."""


class ConnectionLimiter:
    """The connections of one server. Idle ones, in the order in which they became so, make room for others.

    A connection is idle while no request is in progress: before the whole head of its first one has come, too.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._idle: dict[Connection, None] = {}
        self._busy: set[Connection] = set()

    def add(self, connection: Connection) -> None:
        """Takes a new connection; beyond the limit the idle one that is oldest goes, or the new one if all are busy."""
        num_open = len(self._idle) + len(self._busy)
        if num_open < self.limit or self._drop_oldest() or num_open < self.limit + PROBE_RESERVE:
            self._idle[connection] = None
        else:
            connection.drop()

    def begin(self, connection: Connection) -> bool:
        """Notes that a request has begun; returns whether as many as may be were in progress on other connections."""
        self._idle.pop(connection, None)
        self._busy.add(connection)
        return len(self._busy) > self.limit

    def end(self, connection: Connection) -> None:
        """Notes that the connection has no request any more."""
        self._busy.discard(connection)
        self._idle[connection] = None

    def remove(self, connection: Connection) -> None:
        """Forgets a connection that is closed."""
        self._busy.discard(connection)
        self._idle.pop(connection, None)

    def _drop_oldest(self) -> bool:
        for oldest in list(islice(self._idle, _LOOKS)):
            del self._idle[oldest]
            if not oldest.is_unread:
                oldest.drop()
                return True
            self._idle[oldest] = None  # its answer is still on the way
        return False
