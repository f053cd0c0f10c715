"""Admission of an engine's other hosts at rank 0: one of each rank, and no strangers."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

from jaxserve.errors import ClusterError, ConfigError
from jaxserve.features.multinode.wire import Link, greet_follower, refuse
from jaxserve.parallel_options import HostOptions

_log = logging.getLogger(__name__)
GREETING_SECONDS = 5.0  # for a stranger to prove itself
_UNPROVEN = 16  # strangers at once
_LOOKUP_SECONDS = 0.5  # between two looks for a name


def admit(options: HostOptions, token: str | None) -> list[Link]:
    """Listens at `master_addr` until every other rank has proved the token; returns links in their order.

    Raises:
        ConfigError: the address cannot be taken.
        ClusterError: ranks are missing after `init_timeout`, or a host that knows the token has another `nnodes`, or
            the rank of another; those that came are told.
    """
    listener = _listen(options)
    try:
        return _Admission(listener, options, token).run()
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # a thread waits in `accept`, which closing alone does not end
        listener.close()


class _Admission:
    """Lets the ranks in, one thread for each connection that has proved nothing yet."""

    def __init__(self, listener: socket.socket, options: HostOptions, token: str | None) -> None:
        self._listener, self._options, self._token = listener, options, token
        self._room = threading.Semaphore(_UNPROVEN)
        self._done: queue.SimpleQueue[Link | ClusterError] = queue.SimpleQueue()

    def run(self) -> list[Link]:
        """Returns a link to each other rank, in their order."""
        assert self._options.nnodes is not None
        deadline = time.monotonic() + self._options.init_timeout
        threading.Thread(target=self._accept, name="jaxserve-listen", daemon=True).start()
        links: dict[int, Link] = {}
        missing = set(range(1, self._options.nnodes))
        while missing:
            try:
                found = self._done.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                names = ", ".join(map(str, sorted(missing)))
                message = f"rank {names} did not come within {self._options.init_timeout:g} s"
                error = ClusterError(message, field="nnodes", value=self._options.nnodes)
                raise self._refuse_all(links.values(), error) from None
            if isinstance(found, ClusterError):
                raise self._refuse_all(links.values(), found)
            if found.peer in links:
                error = ClusterError(f"two hosts say that they are rank {found.peer}", field="node_rank")
                raise self._refuse_all([*links.values(), found], error)
            links[found.peer] = found
            missing.discard(found.peer)
        return [links[rank] for rank in sorted(links)]

    def _refuse_all(self, links: Iterable[Link], error: ClusterError) -> ClusterError:
        for link in links:
            with contextlib.suppress(OSError):  # it has left already
                refuse(link, error)
            link.close()
        return error

    def _accept(self) -> None:
        while True:
            self._room.acquire()
            try:
                connection, address = self._listener.accept()
            except OSError:  # closed: everybody is here
                return
            threading.Thread(target=self._greet, args=(connection, address), daemon=True).start()

    def _greet(self, connection: socket.socket, address: Any) -> None:
        assert self._options.nnodes is not None
        connection.settimeout(GREETING_SECONDS)
        link = Link(connection)
        try:
            link.peer = greet_follower(link, self._token, self._options.nnodes)
            self._done.put(link)
        except (OSError, ClusterError) as error:
            link.close()
            if isinstance(error, ClusterError) and error.field not in ("token", "frame"):
                self._done.put(error)
            else:
                _log.warning("a connection from %s is closed: %s", address[0], error)
        finally:
            self._room.release()


def require_token(options: HostOptions, token: str | None) -> None:
    """Raises ConfigError where others than this machine's users could pass for a host."""
    if token is None and not _is_loopback(options.master_addr):
        message = (
            f"must be set on all hosts, to the same secret, where rank 0 listens on {options.master_addr}: "
            "a host that joins is sent everything and believed everything"
        )
        raise ConfigError(message, field="JAXSERVE_CLUSTER_TOKEN")


def _is_loopback(address: str | None) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address or "").is_loopback
    except ValueError:  # a name
        return False


def _listen(options: HostOptions) -> socket.socket:
    assert options.nnodes is not None
    place = options.master_addr, options.master_port
    try:
        family = _resolve(options)
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(2 * options.nnodes + _UNPROVEN)
    except OSError as error:
        message = f"rank 0 cannot listen on {place[0]}:{place[1]} ({error.strerror or error})"
        raise ConfigError(message, field="master_addr", value=options.master_addr) from error
    return listener


def _resolve(options: HostOptions) -> socket.AddressFamily:
    """Returns the family of `master_addr`. In a cluster, the name of a host may be known only some time after it."""
    deadline, is_told = time.monotonic() + options.init_timeout, False
    while True:
        try:
            return socket.getaddrinfo(options.master_addr, options.master_port, type=socket.SOCK_STREAM)[0][0]
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise
            if not is_told:
                place, reason = options.master_addr, error.strerror
                _log.warning("master_addr %s: %s; waiting up to %g s for it", place, reason, options.init_timeout)
            is_told = True
            time.sleep(_LOOKUP_SECONDS)
