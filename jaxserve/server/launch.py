"""`jaxserve serve`: listens, then loads and compiles, serves, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import math
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from jaxserve.config import EngineConfig, read_api_keys
from jaxserve.engine.async_engine import AsyncLLM
from jaxserve.engine.thread import tune_garbage_collector
from jaxserve.errors import ConfigError, EngineStoppedError, JaxServeError
from jaxserve.server.app import make_admin_app, make_app
from jaxserve.server.http import LimitedHttp, make_protocol
from jaxserve.server.keys import Keys, read_keys
from jaxserve.server.logs import configure_logging
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.options import LimitOptions, ServerConfig, read_chat_template
from jaxserve.server.server_state import Phase, ServerState
from jaxserve.server.sockets import (
    ADMIN_CONNECTIONS,
    clamp_connections,
    open_port,
    open_sockets,
    raise_descriptor_limit,
)
from jaxserve.server.status_line import StatusLine
from jaxserve.server.tls import reload_certificates, secure
from jaxserve.server.tracing import make_tracer

_log = logging.getLogger(__name__)
_SWITCH_INTERVAL = 0.001  # seconds; the engine's thread must not wait long for the event loop to release the GIL
_WATCH_INTERVAL = 0.5  # seconds
_CLOSING_TIME = 2  # seconds for connections to close after the last answer, and for the engine to finish its last step
_LAST_SECONDS = 10  # for what comes after that, Python's own exit included
_QUEUED_PER_ROW = 4  # sequences that may wait, unless an option says how many
_INSTANT = 0.1  # seconds; with 0, uvicorn logs a spurious error
_NO_KEY_HINT = "add --api-key, or --allow-no-key if everyone who reaches the port may use it"


class Server(uvicorn.Server):
    """uvicorn's server. The first signal drains it, the second ends it."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.building = threading.Thread(target=self._build, name="jaxserve-start", daemon=True)
        self.failure: JaxServeError | None = None  # why the process will exit with an error

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, and starts building the engine."""
        await super().startup(sockets or open_sockets(self._state.config.listen))
        self._loop = asyncio.get_running_loop()
        _log.info("listening on %s", self._address())
        self.building.start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal: the first one drains, the second ends at once."""
        if self._state.phase is Phase.DRAINING or self._state.llm is None or self._loop is None:
            self.should_exit = self.force_exit = True
            self.config.timeout_graceful_shutdown = _INSTANT  # type: ignore[assignment]
            return
        self._state.phase = Phase.DRAINING
        _log.info("%s: draining, for at most %g s", signal.Signals(sig).name, self._timeout)
        self._loop.call_soon_threadsafe(self._start_draining)

    def stop(self, failure: JaxServeError) -> None:
        """Ends the process with an error. Safe from any thread."""
        self._state.phase, self.failure = Phase.FAILED, failure
        fault = failure.__cause__ if isinstance(failure, EngineStoppedError) else None  # others need no traceback
        _log.critical("%s", failure, exc_info=fault)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, 1.0, self._exit)  # after the last answers

    def _address(self) -> str:
        listen = self._state.config.listen
        if listen.uds is not None:
            return listen.uds
        name = f"[{listen.host}]" if ":" in listen.host else listen.host
        port = self.servers[0].sockets[0].getsockname()[1]
        return f"{'https' if listen.ssl_certfile else 'http'}://{name}:{port}{listen.root_path}"

    @property
    def _timeout(self) -> float:
        return self._state.config.serving.shutdown_timeout

    def _exit(self) -> None:
        self.should_exit = True

    def _start_draining(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Waits for the running requests, and aborts those that exceed the timeout."""
        await self._wait_for_streams(self._timeout)
        if self._state.num_streams and self._state.llm is not None:
            _log.warning("shutdown_timeout has passed: %d requests are aborted", self._state.num_streams)
            self._state.end_processes()
            _end_engine(self._state.llm)
            await self._wait_for_streams(_CLOSING_TIME)
        self._state.has_drained = self.should_exit = True

    async def _wait_for_streams(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._state.num_streams and loop.time() < deadline:
            await asyncio.sleep(0.02)

    def _build(self) -> None:
        """Builds the engine. Runs on its own thread, so that the event loop can answer /health."""
        state = self._state
        try:
            llm = start_engine(state, self.stop)
            if state.config.serving.serve_while_warming:
                _log.info("serving, with the largest programs only: %s", ", ".join(state.names))
                llm.compile_rest(state.show_progress)
        except JaxServeError as error:
            if state.phase is not Phase.DRAINING:  # otherwise the shutdown ended the compilation
                self.stop(error)
            return
        except Exception as error:
            failure = EngineStoppedError(f"the engine could not be built: {error!r}")
            failure.__cause__ = error
            self.stop(failure)
            return
        tune_garbage_collector()
        state.finish_warming()
        _log.info("ready: %s", ", ".join(state.names))


def start_engine(state: ServerState, on_stop: Callable[[JaxServeError], None]) -> AsyncLLM:
    """Builds the engine of a server, and opens the server for requests.

    Args:
        on_stop: called, on any thread, with the reason why the engine stopped by itself.
    """
    early = state.config.serving.serve_while_warming
    llm = AsyncLLM.from_config(state.engine_config, progress=state.show_progress, on_stop=on_stop, only_largest=early)
    longest_wait = state.config.limits.max_queue_wait or math.inf
    llm.view.bound_queue(_QUEUED_PER_ROW * llm.limits.max_num_seqs, longest_wait)
    llm.requests.warm_up()  # its process needs file descriptors, which may run out later
    state.open(llm)
    return llm


def make_state(engine: EngineConfig, config: ServerConfig) -> ServerState:
    """Returns the state of a server that has not started yet.

    Raises:
        ConfigError: a file cannot be read, the name of a parser is unknown, or programs would be compiled while
            requests wait.
    """
    from jaxserve.server.tools import REASONING_PARSERS, TOOL_PARSERS

    if engine.compile.compile == "used":
        message = "a server compiles every program before it is ready; leave the option out or set it to 'all'"
        raise ConfigError(message, field="compile", value="used")
    serving = config.serving
    name = (serving.served_model_name or (engine.model.model,))[0]
    rank = engine.replicas.data_parallel_rank
    metrics = ServerMetrics(name, prefix=config.logs.metrics_prefix, rank=rank)
    tracer = make_tracer(config.logs.otlp_traces_endpoint, "jaxserve", model=name)
    state = ServerState(config, engine, metrics, tracer, template_variables=serving.template_variables())
    if serving.chat_template is not None:
        state.chat_template = read_chat_template(serving.chat_template)
    for field, value, known in (
        ("tool_call_parser", serving.tool_call_parser, ("auto", "none", *TOOL_PARSERS)),
        ("reasoning_parser", serving.reasoning_parser, ("auto", "none", *REASONING_PARSERS)),
    ):
        if value not in known:
            raise ConfigError(f"must be one of {', '.join(known)}, got {value!r}", field=field, value=value)
    return state


def serve(engine: EngineConfig, config: ServerConfig) -> int:
    """Serves until a signal; returns the exit status: 2 if the engine could not be built or failed, else 0.

    The log says why. Raises ConfigError when the options do not fit together.
    """
    configure_logging(config.logs.log_level, json=config.logs.log_format == "json")
    state = make_state(engine, config)
    keys = read_server_keys(config)
    connections = clamp_connections(config.limits.max_connections, raise_descriptor_limit())
    if connections < config.limits.max_connections:
        _log.warning("at most %d connections at once: the limit of open files allows no more", connections)
    server = Server(_configure(config, make_app(state, keys), connections), state)
    context = secure(server.config, config.listen)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    asyncio.run(_run(server, state, keys, context), loop_factory=server.config.get_loop_factory())
    _end(server, state)
    return 0 if server.failure is None else 2


def read_server_keys(config: ServerConfig) -> Keys:
    """Returns all keys; ConfigError when one is invalid, or when one is required and there is none."""
    keys = read_keys(config.access, read_api_keys())
    if not keys and not config.is_local and not config.access.allow_no_key:
        message = f"{config.listen.host!r} is open to other machines and needs an API key; {_NO_KEY_HINT}"
        raise ConfigError(message, field="host", value=config.listen.host)
    return keys


def _end(server: Server, state: ServerState) -> None:
    """Shuts the engine down and sends the last traces. What does not end in time is killed with the process."""
    faulthandler.dump_traceback_later(_LAST_SECONDS, exit=True)  # also if Python's own exit hangs; it shows where
    state.end_processes()
    leaves_threads = server.force_exit or server.building.is_alive() or state.is_preparing
    if not server.force_exit:
        endings = [_start_ending(state.tracer.shutdown, "sending the last traces")]
        if state.llm is not None:
            endings.append(_end_engine(state.llm))
        deadline = time.monotonic() + _CLOSING_TIME
        for ending in endings:
            ending.join(max(0.0, deadline - time.monotonic()))
            if ending.is_alive():
                leaves_threads = True
                _log.error("%s did not end in time", ending.name)
    if leaves_threads:  # Python's normal exit would wait for them
        logging.shutdown()
        os._exit(0 if server.failure is None else 2)


def _end_engine(llm: AsyncLLM) -> threading.Thread:
    """Aborts running requests; returns the thread that waits for the engine's last step."""
    return _start_ending(llm.shutdown, "the engine's last step")


def _start_ending(end: Callable[[], None], name: str) -> threading.Thread:
    ending = threading.Thread(target=end, name=name, daemon=True)
    ending.start()
    return ending


async def _run(server: Server, state: ServerState, keys: Keys, context: ssl.SSLContext | None) -> None:
    config, listen = state.config, state.config.listen
    files = config.access.api_key_file, config.access.tenants, listen.ssl_certfile
    if any(file is not None for file in files):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, config, keys, context)
    tasks = [asyncio.ensure_future(_report_status(state)), asyncio.ensure_future(_watch_device(state))]
    try:
        if listen.admin_port is not None:
            options = _configure_admin(state)
            opened = open_port("127.0.0.1", listen.admin_port, "admin_port")
            tasks.append(asyncio.ensure_future(QuietServer(options).serve([opened])))
        await server.serve()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_CLOSING_TIME)


def _configure(config: ServerConfig, app: ASGIApp, max_connections: int) -> uvicorn.Config:
    listen, limits = config.listen, config.limits
    return uvicorn.Config(
        app,
        host=listen.host,
        port=listen.port,
        ssl_keyfile=listen.ssl_keyfile,
        ssl_certfile=listen.ssl_certfile,
        ssl_ca_certs=listen.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if listen.ssl_ca_certs is not None else ssl.CERT_NONE,
        root_path=listen.root_path,
        http=_make_protocol(limits, max_connections),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, round(limits.keep_alive_timeout)),
        timeout_graceful_shutdown=_CLOSING_TIME,
    )


def _configure_admin(state: ServerState) -> uvicorn.Config:
    protocol = _make_protocol(state.config.limits, ADMIN_CONNECTIONS)
    return uvicorn.Config(make_admin_app(state), http=protocol, ws="none", lifespan="off", log_config=None)


def _make_protocol(limits: LimitOptions, max_connections: int) -> type[LimitedHttp]:
    return make_protocol(
        max_head_bytes=limits.max_header_bytes,
        head_timeout=limits.body_timeout,
        reading_timeout=limits.slow_reader_timeout,
        max_connections=max_connections,
    )


def _reload(config: ServerConfig, keys: Keys, context: ssl.SSLContext | None) -> None:
    """Reads the files of keys and tenants and the TLS files again. If one cannot be used, nothing changes."""
    try:
        found = read_server_keys(config)
        if context is not None:
            reload_certificates(context, config.listen)
    except (ConfigError, OSError) as error:
        _log.error("SIGHUP: nothing is changed: %s", error)
        return
    keys.clear()  # the guard reads this dictionary, on this thread
    keys.update(found)
    _log.info("SIGHUP: %d keys%s", len(keys), ", and the TLS files" if context is not None else "")


async def _report_status(state: ServerState) -> None:
    """Logs the status line once there is an engine."""
    while state.llm is None:
        await asyncio.sleep(0.2)
    rows, interval = state.llm.limits.max_num_seqs, state.config.logs.status_interval
    await StatusLine(state.metrics, state.llm.stats, max_rows=rows, interval=interval).run()


async def _watch_device(state: ServerState) -> None:
    """Logs when the device gets stuck, and when it recovers."""
    was_stuck = False
    while True:
        await asyncio.sleep(_WATCH_INTERVAL)
        if state.is_stuck != was_stuck:
            was_stuck = not was_stuck
            if was_stuck:
                _log.critical("no step has ended for %g s: /health fails", state.config.serving.watchdog_timeout)
            else:
                _log.warning("the device works again")


class QuietServer(uvicorn.Server):
    """A second server in the process, which leaves signals to the first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures no signals."""
        yield
