"""Admission of an engine's other nodes at rank 0: one of each rank, and no strangers."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterable

from jaxserve.errors import ClusterError, ConfigError
from jaxserve.features.multinode.places import Places
from jaxserve.features.multinode.wire import Link, greet_follower, refuse
from jaxserve.parallel_options import NodeOptions

_log = logging.getLogger(__name__)
GREETING_SECONDS = 5.0  # for a stranger to prove itself
_UNPROVEN, _SHARE = 64, 4  # strangers at once, and those of one address
_PAUSE_SECONDS = 0.05  # after a connection that could not be taken
_LOOKUP_SECONDS = 0.5  # between two looks for a name


def admit(options: NodeOptions, token: str | None) -> list[Link]:
    """Listens at `master_addr` until every other rank has proved the token; returns links in their order.

    Raises:
        ConfigError: the address cannot be taken.
        ClusterError: ranks are missing after `init_timeout`, or a node that knows the token has another `nnodes`, or
            the rank of another; those that came are told.
    """
    listener = _listen(options)
    admission = _Admission(listener, options, token)
    try:
        return admission.run()
    finally:
        admission.close()


class _Admission:
    """Lets the ranks in, one thread for each connection that has proved nothing yet."""

    def __init__(self, listener: socket.socket, options: NodeOptions, token: str | None) -> None:
        self._listener, self._options, self._token = listener, options, token
        self._places = Places(_UNPROVEN, _SHARE)
        self._is_closed = threading.Event()
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
                error = ClusterError(f"two nodes say that they are rank {found.peer}", field="node_rank")
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

    def close(self) -> None:
        """Takes no further connections."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a thread waits in `accept`, which closing alone does not end
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError as error:  # closed; or this one left, or too many files are open
                if not self._is_closed.wait(_PAUSE_SECONDS):
                    _log.warning("a connection cannot be taken: %s", error)
                continue
            if self._places.take(address[0]):
                threading.Thread(target=self._greet, args=(connection, address[0]), daemon=True).start()
            else:  # a node tries again
                connection.close()

    def _greet(self, connection: socket.socket, address: str) -> None:
        try:
            self._let_in(connection, address)
        finally:
            self._places.leave(address)

    def _let_in(self, connection: socket.socket, address: str) -> None:
        assert self._options.nnodes is not None
        try:
            link = Link(connection)
            link.set_deadline(GREETING_SECONDS)
            link.peer = greet_follower(link, self._token, self._options.nnodes)
            link.set_timeout(GREETING_SECONDS)  # it may wait long for the others, and then be told that it is refused
            self._done.put(link)
        except (OSError, ClusterError) as error:
            connection.close()
            if isinstance(error, ClusterError) and error.field not in ("token", "frame"):
                self._done.put(error)
            else:
                _log.warning("a connection from %s is closed: %s", address, error)


def require_token(options: NodeOptions, token: str | None) -> None:
    """Raises ConfigError where others than this machine's users could pass for a node."""
    if token is None and not _is_loopback(options.master_addr):
        message = (
            f"must be set on all nodes, to the same secret, where rank 0 listens on {options.master_addr}: "
            "a node that joins is sent everything and believed everything"
        )
        raise ConfigError(message, field="JAXSERVE_CLUSTER_TOKEN")


def _is_loopback(address: str | None) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address or "").is_loopback
    except ValueError:  # a name
        return False


def _listen(options: NodeOptions) -> socket.socket:
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
    try:
        _require_free(family, options)
    except ConfigError:
        listener.close()
        raise
    return listener


def _require_free(family: socket.AddressFamily, options: NodeOptions) -> None:
    """Raises ConfigError if JAX's coordinator could not listen: JAX would end all processes without a word."""
    port = options.master_port + 1
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((options.master_addr, port))
    except OSError as error:
        message = (
            f"JAX's coordinator cannot listen on the next port, {options.master_addr}:{port} "
            f"({error.strerror or error}); give another port here, or to what listens there (--port)"
        )
        raise ConfigError(message, field="master_port", value=options.master_port) from error


def _resolve(options: NodeOptions) -> socket.AddressFamily:
    """Returns the family of `master_addr`. In a cluster, the name of a node may be known only some time after it."""
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
