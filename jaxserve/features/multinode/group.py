"""The nodes of one engine, connected: rank 0 with each of the others."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.errors import ClusterError
from jaxserve.features.multinode.admission import GREETING_SECONDS, admit, require_token
from jaxserve.features.multinode.wire import Link, greet_leader, pack, raise_refusal, refuse
from jaxserve.parallel_options import NodeOptions

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 0.2
_BACKLOG = 4096  # messages that may wait for their reader
_LEAVING_SECONDS = 2.0
_PINGS = 8  # in the time after which a silent node is a lost one
_BLAME_SECONDS = 0.05  # for the loss of a node to be known, when a step fails that it was part of

OnLoss = Callable[[ClusterError], None]


class _Members:
    """What both kinds of groups have: links that are read on threads, and one report of the first loss."""

    def __init__(self, options: NodeOptions, links: Sequence[Link], on_loss: OnLoss) -> None:
        assert options.nnodes is not None and options.node_rank is not None
        self.size, self.rank, self.options = options.nnodes, options.node_rank, options
        self._links, self._on_loss = links, on_loss
        self._inboxes = {link.peer: queue.Queue[dict[str, Any] | None](_BACKLOG) for link in links}
        self._has_ended = threading.Event()
        self._lock = threading.Lock()
        self._error: ClusterError | None = None
        self.on_message: Callable[[Link, dict[str, Any]], bool] = lambda link, message: False
        for link in links:
            link.set_timeout(options.step_timeout)  # the peer's pings come more often
            threading.Thread(target=self._read, args=(link,), name=f"jaxserve-rank-{link.peer}", daemon=True).start()
        threading.Thread(target=self._ping, name="jaxserve-ping", daemon=True).start()

    def receive(self, peer: int) -> dict[str, Any]:
        """Waits for the next message of a peer; ClusterError if a node is lost."""
        message = self._inboxes[peer].get()
        if message is None:
            raise self._error or ClusterError("the group has ended", field="nnodes")
        raise_refusal(message)
        return message

    def lose(self, error: ClusterError) -> None:
        """Ends the group with an error: all nodes are told of it, and `on_loss` is called, once."""
        with self._lock:
            if self._has_ended.is_set():
                return
            self._error = error
            self._has_ended.set()
        self._tell({"failed": str(error)})
        self._close()
        self._on_loss(error)

    def lose_step(self, step_id: int, error: BaseException) -> None:
        """Ends the group because a step failed here; if a node is gone at the same time, that is the error."""
        if not self.wait_for_end(_BLAME_SECONDS):
            self.lose(ClusterError(f"step {step_id} failed: {error}", field=f"rank {self.rank}"))

    def fail(self, text: str) -> None:
        """Tells the other nodes that this one fails, and ends the group without `on_loss`."""
        with self._lock:
            if self._has_ended.is_set():
                return
            self._has_ended.set()
        self._tell({"failed": text})
        self._close()

    def wait_for_end(self, seconds: float) -> bool:
        """Waits, at most some seconds, for the group to end; returns whether it has."""
        return self._has_ended.wait(seconds)

    def _tell(self, message: Mapping[str, Any]) -> None:
        frame = pack(message)
        for link in self._links:
            link.send_last(frame, _LEAVING_SECONDS / 4)

    def _close(self) -> None:
        for link in self._links:
            link.end()

    def _read(self, link: Link) -> None:
        inbox = self._inboxes[link.peer]
        try:
            while (message := link.receive()) is not None:
                if "failed" in message:
                    raise ClusterError(f"failed: {message['failed']}", field=f"rank {link.peer}")
                if not self.on_message(link, message) and "ping" not in message:
                    inbox.put(message)
                if message.get("call") == "stop":
                    self._has_ended.set()
            raise ClusterError("is gone", field=f"rank {link.peer}")
        except TimeoutError:
            message = f"has not answered for {self.options.step_timeout:g} s"
            self.lose(ClusterError(message, field=f"rank {link.peer}"))
        except OSError as error:
            self.lose(ClusterError(f"is gone ({error.strerror or error})", field=f"rank {link.peer}"))
        except ClusterError as error:
            self.lose(error)
        finally:
            with contextlib.suppress(queue.Full):  # whoever reads finds the end behind the messages
                inbox.put_nowait(None)

    def _ping(self) -> None:
        """Shows the others that this node lives."""
        frame = pack({"ping": self.rank})
        while not self._has_ended.wait(self.options.step_timeout / _PINGS):
            for link in self._links:
                with contextlib.suppress(OSError):  # its reader tells
                    link.send_frame(frame)


class LeaderGroup(_Members):
    """Rank 0's: all other nodes. See `Nodes` for what they agree on."""

    def __init__(self, options: NodeOptions, links: Sequence[Link], on_loss: OnLoss) -> None:
        super().__init__(options, links, on_loss)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="jaxserve-send", daemon=True)
        self._sender.start()

    @classmethod
    def open(cls, options: NodeOptions, token: str | None, *, on_loss: OnLoss) -> LeaderGroup:
        """Listens at `master_addr` until every other rank has proved the token.

        Args:
            on_loss: called once, on another thread, when a node is gone, fails or is silent.

        Raises:
            ConfigError: there is no token, and the address can be reached from other machines; or it cannot be taken.
            ClusterError: ranks are missing after `init_timeout`, or two nodes say they are the same.
        """
        require_token(options, token)
        return cls(options, admit(options, token), on_loss)

    def share(self, value: Any) -> Any:
        """Gives all nodes a value of JSON, and returns it."""
        self.send({"shared": value})
        return value

    def require_equal(self, facts: Mapping[str, Any]) -> None:
        """See `Nodes.require_equal`."""
        own = json.loads(pack(facts)[4:])
        for link in self._links:
            theirs = self.receive(link.peer).get("facts")
            error = _compare(own, theirs, link.peer)
            if error is not None:
                for each in self._links:
                    refuse(each, error)
                raise error
        self.send({"equal": True})

    def take_least(self, name: str, value: int) -> int:
        """See `Nodes.take_least`."""
        values = {0: value}
        for link in self._links:
            given = self.receive(link.peer).get("value")
            values[link.peer] = given if type(given) is int else 0
        least = min(values.values())
        if least != max(values.values()):
            rank = min(values, key=lambda each: values[each])
            _log.warning("%s: %d, the least of all nodes, is rank %d's; here it is %d", name, least, rank, value)
        self.send({"least": least})
        return least

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to all nodes, on a thread of its own; it is encoded once, and here.

        A node that takes none is a loss.
        """
        if self._outbox.qsize() >= _BACKLOG:
            self.lose(
                ClusterError(f"the other nodes have left {_BACKLOG} calls unread", field="nnodes", value=self.size)
            )
        self._outbox.put(pack(message))

    def stop(self, leave: Callable[[], None]) -> None:
        """Ends the other nodes in good order, and waits a moment for them. Further calls do nothing.

        Args:
            leave: what all nodes must do at the same time before they end.
        """
        if self._has_ended.is_set():
            return
        self._has_ended.set()
        self.send({"call": "stop"})
        self._outbox.put(None)
        self._sender.join(_LEAVING_SECONDS)
        leave()
        deadline = time.monotonic() + _LEAVING_SECONDS
        for link in self._links:
            inbox = self._inboxes[link.peer]
            try:
                while inbox.get(timeout=max(0.0, deadline - time.monotonic())) is not None:
                    continue
            except queue.Empty:
                _log.warning("rank %d has not ended in time", link.peer)
        self._close()

    def _send_all(self) -> None:
        """Sends what is in the outbox, in its order."""
        while (frame := self._outbox.get()) is not None:
            for link in self._links:
                try:
                    link.send_frame(frame)
                except TimeoutError:
                    message = f"has taken no call for {self.options.step_timeout:g} s"
                    self.lose(ClusterError(message, field=f"rank {link.peer}"))
                except OSError as error:  # the reader tells, perhaps in the node's own words
                    _log.debug("rank %d takes nothing more: %s", link.peer, error)


class FollowerGroup(_Members):
    """The group of a node above rank 0: rank 0."""

    @classmethod
    def join(cls, options: NodeOptions, token: str | None, *, on_loss: OnLoss) -> FollowerGroup:
        """Connects to rank 0, which may start later; see `LeaderGroup.open`.

        Raises:
            ConfigError: there is no token, and the address is on another machine.
            ClusterError: rank 0 does not answer within `init_timeout`, or refuses this node.
        """
        require_token(options, token)
        assert options.node_rank is not None and options.nnodes is not None
        deadline = time.monotonic() + options.init_timeout
        while True:
            try:
                connection = socket.create_connection((options.master_addr, options.master_port), GREETING_SECONDS)
                link = Link(connection, peer=0)
                link.set_deadline(GREETING_SECONDS)
                greet_leader(link, token, options.node_rank, options.nnodes)
                return cls(options, [link], on_loss)
            except OSError as error:  # it does not listen yet, has no room for one more stranger, or no name
                if time.monotonic() > deadline:
                    place = f"{options.master_addr}:{options.master_port}"
                    reason = f"rank 0 did not answer at {place} for {options.init_timeout:g} s ({error})"
                    raise ClusterError(reason, field="master_addr", value=options.master_addr) from error
                time.sleep(_RETRY_SECONDS)

    def share(self, value: None) -> Any:
        """Returns rank 0's value."""
        del value
        return self.receive(0).get("shared")

    def require_equal(self, facts: Mapping[str, Any]) -> None:
        """See `Nodes.require_equal`."""
        self.send({"facts": facts})
        self.receive(0)  # raises what rank 0 refuses

    def take_least(self, name: str, value: int) -> int:
        """See `Nodes.take_least`."""
        self.send({"value": value})
        least = self.receive(0).get("least")
        if type(least) is not int:
            raise ClusterError(f"sent no number for {name}", field="rank 0")
        return least

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to rank 0; what is lost is told by the reader."""
        try:
            self._links[0].send(message)
        except OSError as error:
            _log.debug("rank 0 takes nothing more: %s", error)


def _compare(own: Mapping[str, Any], theirs: Any, rank: int) -> ClusterError | None:
    """Returns an error for the first fact that differs."""
    from jaxserve.core.runtime.identity import find_any_difference

    if not isinstance(theirs, Mapping):
        return ClusterError(f"rank {rank} stated no facts", field="nnodes")
    found = find_any_difference(own, theirs)
    if found is None:
        return None
    name, here, there = found
    message = (
        f"is {json.dumps(here)} at rank 0 and {json.dumps(there)} at rank {rank}; it must be the same on all nodes"
    )
    return ClusterError(message, field=name, value=there)
