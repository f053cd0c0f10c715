"""`jaxserve serve`: listens at once, loads and compiles behind a closed door, serves, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from jaxserve.config import EngineConfig, read_api_keys
from jaxserve.engine.async_engine import AsyncLLM
from jaxserve.engine.stats import read_stats
from jaxserve.errors import ConfigError, EngineStoppedError, JaxServeError
from jaxserve.server.app import make_admin_app, make_app
from jaxserve.server.gate import read_keys
from jaxserve.server.http import make_protocol
from jaxserve.server.logs import configure_logging
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.options import ListenOptions, ServerConfig
from jaxserve.server.state import Phase, ServerState
from jaxserve.server.status_line import StatusLine
from jaxserve.server.tracing import make_tracer

_log = logging.getLogger(__name__)
_SWITCH_INTERVAL = 0.001  # seconds: the engine's thread must not wait long for the event loop to let go of the GIL
_WATCH_INTERVAL = 0.5  # seconds
_ACCEPTS_PER_TURN = 32
_BACKLOG = 2048  # connections that the kernel keeps until they are taken
_CLOSING_TIME = 2  # seconds that connections get to close after the last answer, and the engine for its last step
_NO_KEY_HINT = "add --api-key, or --allow-no-key if whatever reaches the port may use it"


class Server(uvicorn.Server):
    """uvicorn's server, whose first signal drains and whose second ends."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.building = threading.Thread(target=self._build, name="jaxserve-start", daemon=True)
        self.failure: JaxServeError | None = None  # why the process must end with an error

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, and begins to build the engine."""
        listen = self._state.config.listen
        try:
            await super().startup(sockets or _open_sockets(listen))
        except OSError as error:
            if listen.uds is None:
                raise
            message = f"{listen.uds} cannot be listened on: {error.strerror or error}"
            raise ConfigError(message, field="uds", value=listen.uds) from error
        self._loop = asyncio.get_running_loop()
        _log.info("listening on %s", self._address())
        self.building.start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by signals: the first one drains, the second ends at once."""
        if self._state.phase is Phase.DRAINING or self._state.llm is None or self._loop is None:
            self.should_exit = self.force_exit = True
            self.config.timeout_graceful_shutdown = 0
            return
        self._state.phase = Phase.DRAINING
        _log.info("%s: draining, for at most %g s", signal.Signals(sig).name, self._timeout)
        self._loop.call_soon_threadsafe(self._start_draining)

    def stop(self, failure: JaxServeError) -> None:
        """Ends the process with an error; may be called from any thread."""
        self._state.phase, self.failure = Phase.FAILED, failure
        fault = failure.__cause__ if isinstance(failure, EngineStoppedError) else None  # other errors say what to do
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
        """Waits for the running requests; those that take too long get an error and end."""
        await self._wait_for_streams(self._timeout)
        if self._state.num_streams and self._state.llm is not None:
            _log.warning("%d requests are aborted: the time to drain is over", self._state.num_streams)
            _end_engine(self._state.llm)
            await self._wait_for_streams(_CLOSING_TIME)
        self._state.has_drained = self.should_exit = True

    async def _wait_for_streams(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._state.num_streams and loop.time() < deadline:
            await asyncio.sleep(0.02)

    def _build(self) -> None:
        """Runs on a thread of its own: the event loop answers /health meanwhile."""
        state = self._state
        try:
            early, show = state.config.serving.serve_while_warming, state.show_progress
            llm = AsyncLLM.from_config(state.engine_config, progress=show, on_stop=self.stop, only_largest=early)
            state.open(llm)
            if early:
                _log.info("serving, with the largest programs only: %s", ", ".join(state.names))
                llm.compile_rest(show)
        except JaxServeError as error:
            if state.phase is not Phase.DRAINING:  # else it ends while it still compiles, and that is no failure
                self.stop(error)
            return
        except Exception as error:
            _log.critical("the engine could not be built", exc_info=error)
            self.stop(EngineStoppedError(f"the engine could not be built: {error!r}"))
            return
        _calm_garbage_collector()
        state.finish_warming()
        _log.info("ready: %s", ", ".join(state.names))


def _calm_garbage_collector() -> None:
    """Leaves what the start has made out of every later collection, and collects less often.

    Each collection also runs a callback of JAX; with 256 streams that took 38 % of the engine's thread.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def make_state(engine: EngineConfig, config: ServerConfig) -> ServerState:
    """Returns the state of a server that has not begun to start.

    Raises:
        ConfigError: a file that the options name cannot be read, or a parser's name is unknown.
    """
    from jaxserve.server.tools import REASONING_PARSERS, TOOL_PARSERS
    from jaxserve.tokenizers.chat import OPTIONS

    serving = config.serving
    name = (serving.served_model_name or (engine.model.model,))[0]
    metrics = ServerMetrics(name, prefix=config.logs.metrics_prefix)
    tracer = make_tracer(config.logs.otlp_traces_endpoint, "jaxserve", model=name)
    for variable in serving.template_variables():
        if variable not in OPTIONS:
            message = f"{variable!r} is no variable of a template that can be set; known: {', '.join(OPTIONS)}"
            raise ConfigError(message, field="default_chat_template_kwargs", value=variable)
    state = ServerState(config, engine, metrics, tracer, template_variables=serving.template_variables())
    if serving.chat_template is not None:
        try:
            state.chat_template = Path(serving.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            message = f"cannot be read: {error}"
            raise ConfigError(message, field="chat_template", value=serving.chat_template) from error
    for field, value, known in (
        ("tool_call_parser", serving.tool_call_parser, ("auto", "none", *TOOL_PARSERS)),
        ("reasoning_parser", serving.reasoning_parser, (None, *REASONING_PARSERS)),
    ):
        if value not in known:
            names = ", ".join(str(each) for each in known if each is not None)
            raise ConfigError(f"must be one of {names}, got {value!r}", field=field, value=value)
    return state


def serve(engine: EngineConfig, config: ServerConfig) -> None:
    """Serves until a signal comes.

    Raises:
        ConfigError: the options do not fit together.
        JaxServeError: the engine could not be built, or failed.
    """
    configure_logging(config.logs.log_level, json=config.logs.log_format == "json")
    state = make_state(engine, config)
    keys = read_keys(config.access, read_api_keys())
    if not keys and not config.is_local and not config.access.allow_no_key:
        message = f"{config.listen.host!r} is open to other machines and no key guards it; {_NO_KEY_HINT}"
        raise ConfigError(message, field="host", value=config.listen.host)
    server = Server(_configure(config, make_app(state, keys)), state)
    _load_certificates(server.config, config.listen)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    asyncio.run(_run(server, state), loop_factory=server.config.get_loop_factory())
    _end(server, state)


def _end(server: Server, state: ServerState) -> None:
    """Ends the engine and raises what has failed; what does not end by itself goes down with the process."""
    leaves_threads = server.force_exit or server.building.is_alive()
    if state.llm is not None and not server.force_exit:
        ending = _end_engine(state.llm)
        ending.join(_CLOSING_TIME)
        if ending.is_alive():
            leaves_threads = True
            _log.error("the engine's last step does not end")
    if leaves_threads:  # Python's own exit would wait for those that compile, prepare a prompt or wait for the device
        logging.shutdown()
        os._exit(0 if server.failure is None else 2)
    state.tracer.shutdown()
    if server.failure is not None:
        raise server.failure


def _end_engine(llm: AsyncLLM) -> threading.Thread:
    """Aborts what runs; the thread that waits for the engine's last step is returned."""
    ending = threading.Thread(target=llm.shutdown, name="jaxserve-end", daemon=True)
    ending.start()
    return ending


def _open_sockets(listen: ListenOptions) -> list[socket.socket] | None:
    """Returns the listening socket many times over, or None for a Unix socket, which uvicorn opens itself.

    uvloop takes one connection from each socket in a turn of its loop. Under load a turn takes tens of milliseconds, so
    with one socket the last of a thousand clients that come at once would wait for half a minute.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    if listen.uds is not None:
        _refuse_taken(listen.uds)
        return None
    first = _open_socket(listen.host, listen.port, "port")
    return [first, *(first.dup() for _ in range(_ACCEPTS_PER_TURN - 1))]


def _open_socket(host: str, port: int, field: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        message = f"{host}:{port} cannot be listened on: {error.strerror or error}"
        raise ConfigError(message, field=field, value=port) from error


def _refuse_taken(path: str) -> None:
    """Raises ConfigError when somebody listens on a Unix socket, which would be taken away from them in silence."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(path)
        except OSError:
            return
    raise ConfigError(f"{path} cannot be listened on: somebody does already", field="uds", value=path)


async def _run(server: Server, state: ServerState) -> None:
    listen = state.config.listen
    tasks = [asyncio.ensure_future(_report_status(state)), asyncio.ensure_future(_watch_device(state))]
    try:
        if listen.admin_port is not None:
            options = uvicorn.Config(make_admin_app(state), lifespan="off", log_config=None)
            opened = _open_socket("127.0.0.1", listen.admin_port, "admin_port")
            tasks.append(asyncio.ensure_future(QuietServer(options).serve([opened])))
        await server.serve()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_CLOSING_TIME)


def _configure(config: ServerConfig, app: ASGIApp) -> uvicorn.Config:
    listen, limits = config.listen, config.limits
    return uvicorn.Config(
        app,
        host=listen.host,
        port=listen.port,
        uds=listen.uds,
        ssl_keyfile=listen.ssl_keyfile,
        ssl_certfile=listen.ssl_certfile,
        ssl_ca_certs=listen.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if listen.ssl_ca_certs is not None else ssl.CERT_NONE,
        root_path=listen.root_path,
        http=make_protocol(
            max_head_bytes=limits.max_header_bytes,
            head_timeout=limits.body_timeout,
            reading_timeout=limits.slow_reader_timeout,
            max_connections=limits.max_connections,
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, round(limits.keep_alive_timeout)),
        timeout_graceful_shutdown=_CLOSING_TIME,
    )


def _load_certificates(config: uvicorn.Config, listen: ListenOptions) -> None:
    """Reads the files that TLS needs; ConfigError names them when one cannot be used, which the libraries do not."""
    try:
        config.load()
    except OSError as error:
        files = ", ".join(each for each in (listen.ssl_certfile, listen.ssl_keyfile, listen.ssl_ca_certs) if each)
        message = f"cannot be used ({files}): {error.strerror or error}"
        raise ConfigError(message, field="ssl_certfile", value=listen.ssl_certfile) from error


async def _report_status(state: ServerState) -> None:
    """Logs what the engine does, from its first request on."""
    while state.llm is None:
        await asyncio.sleep(0.2)
    engine = state.llm.ready.engine
    rows, interval = engine.scheduler.limits.max_num_seqs, state.config.logs.status_interval
    await StatusLine(state.metrics, lambda: read_stats(engine), max_rows=rows, interval=interval).run()


async def _watch_device(state: ServerState) -> None:
    """Logs when the device gets stuck, and when it goes on."""
    was_stuck = False
    while True:
        await asyncio.sleep(_WATCH_INTERVAL)
        if state.is_stuck != was_stuck:
            was_stuck = not was_stuck
            if was_stuck:
                _log.critical("no step has ended for %g s: /health fails", state.config.serving.watchdog_timeout)
            else:
                _log.warning("the device goes on")


class QuietServer(uvicorn.Server):
    """A second server of the same process, which leaves the signals to the first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield
