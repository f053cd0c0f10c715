"""`jaxserve serve` above rank 0: a node that runs steps and answers nobody but probes."""

from __future__ import annotations

import contextlib
import functools
import http.server
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import prometheus_client

from jaxserve.config import EngineConfig
from jaxserve.engine.follower import run_follower
from jaxserve.engine.progress import choose_progress
from jaxserve.errors import ConfigError, JaxServeError
from jaxserve.features.multinode.places import Places
from jaxserve.server.logs import configure_logging
from jaxserve.server.options import ServerConfig
from jaxserve.server.sockets import raise_descriptor_limit

if TYPE_CHECKING:
    from jaxserve.features.multinode.follower import Follower

_log = logging.getLogger(__name__)
_CONNECTIONS, _SHARE = 32, 8  # connections at once, and those of one address
_REQUEST_SECONDS = 10.0


class FollowerHealth:
    """What a follower tells on its own port: that it lives, whether it can run steps, and how many it has run."""

    def __init__(self) -> None:
        self.follower: Follower | None = None  # once it can run steps
        self.registry = prometheus_client.CollectorRegistry()
        for name, text, read in (
            ("ready", "1 once this node can run steps", lambda follower: 1),
            ("steps", "steps started", lambda follower: follower.num_steps),
            ("compiles", "XLA compilations since it was ready", lambda follower: follower.num_compiles),
            ("idle_seconds", "seconds since rank 0's last call", _count_idle),
        ):
            gauge = prometheus_client.Gauge(f"jaxserve:follower_{name}", text, registry=self.registry)
            gauge.set_function(functools.partial(self._read, read))

    def _read(self, read: Callable[[Follower], float]) -> float:
        return 0.0 if self.follower is None else float(read(self.follower))

    def listen(self, host: str, port: int) -> None:
        """Answers GET /health/live, /health/ready and /metrics on an address; ConfigError if it cannot be had."""
        try:
            server = _HealthServer(host, port, functools.partial(_Page, self))
        except OSError as error:
            message = f"cannot listen on {host}:{port}: {error.strerror or error}"
            raise ConfigError(message, field="health_port", value=port) from error
        threading.Thread(target=server.serve_forever, name="jaxserve-health", daemon=True).start()


def _count_idle(follower: Follower) -> float:
    return 0.0 if follower.last_call is None else time.monotonic() - follower.last_call


class _HealthServer(http.server.ThreadingHTTPServer):
    """Bounds what strangers can hold: connections, those of one address, and the time of each."""

    def __init__(self, host: str, port: int, page: Callable[..., _Page]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._places = Places(_CONNECTIONS, _SHARE)
        super().__init__((host, port), page)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers on a thread of its own, if there is a place."""
        if not self._places.take(client_address[0]):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._places.leave(client_address[0])
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers, and ends the connection when its time is over."""
        ending = threading.Timer(_REQUEST_SECONDS, _cut, (request,))
        ending.daemon = True
        try:
            ending.start()
            super().process_request_thread(request, client_address)
        finally:
            ending.cancel()
            self._places.leave(client_address[0])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs that a connection was lost, or failed otherwise."""
        _log.debug("a request from %s failed", client_address[0], exc_info=True)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


class _Page(http.server.BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS  # of one wait; `_HealthServer` bounds the whole

    def __init__(self, health: FollowerHealth, *arguments: object) -> None:
        self._health = health
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answers a probe or a scrape."""
        is_ready = self._health.follower is not None
        match self.path.partition("?")[0]:
            case "/health/live":
                self._answer(HTTPStatus.OK, b"")
            case "/health" | "/health/ready":
                self._answer(HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE, b"")
            case "/metrics":
                self._answer(HTTPStatus.OK, prometheus_client.generate_latest(self._health.registry))
            case _:
                self._answer(HTTPStatus.NOT_FOUND, b"this node answers /health/live, /health/ready and /metrics\n")

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: probes come every few seconds."""

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve_headless(engine: EngineConfig, config: ServerConfig) -> NoReturn:
    """Runs the steps of rank 0 until it stops, and exits: with status 2 if this node or another failed, else 0.

    The first signal is left to rank 0, which drains and then ends all nodes; the second ends this one, and so all.
    """
    configure_logging(config.logs.log_level, json=config.logs.log_format == "json")
    nodes, health = engine.nodes, FollowerHealth()
    if nodes.health_port is not None:
        raise_descriptor_limit()
        health.listen(config.listen.host, nodes.health_port)
    patience = _Patience()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, patience.take)

    def announce(follower: Follower) -> None:
        health.follower = follower
        _log.info("ready: rank %d of %d, for rank 0 at %s", nodes.node_rank, nodes.nnodes, nodes.master_addr)

    try:
        run_follower(engine, progress=choose_progress(True), on_ready=announce)
    except JaxServeError as error:
        _log.critical("%s", error)
        _exit(2)
    _log.info("rank 0 has stopped")
    _exit(0)


class _Patience:
    """Waits for rank 0 at the first signal."""

    def __init__(self) -> None:
        self._is_over = False

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        del frame
        if self._is_over:
            _exit(2)
        self._is_over = True
        _log.info("%s: waiting for rank 0, which drains; another signal ends all nodes", signal.Signals(number).name)


def _exit(status: int) -> NoReturn:
    """Ends the process without JAX's farewell, which waits for the other processes."""
    logging.shutdown()
    os._exit(status)
