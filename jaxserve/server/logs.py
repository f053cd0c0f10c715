"""The log: one line per event, as text or JSON; never a prompt, an answer or a key.

A separate thread writes the lines, so a paused terminal or a full pipe cannot block the event loop. When too many
lines wait, further ones are dropped and counted.
"""

from __future__ import annotations

import contextlib
import json as jsonlib
import logging
import math
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.types import Scope

from jaxserve.errors import CapacityError, ConfigError, TokenizerError, WeightsError
from jaxserve.server.request_context import get_context

_MAX_WAITING = 10_000  # lines
_MAX_MESSAGE = 8192  # characters
_MAX_CLIENT_TEXT = 200  # characters of client-chosen text: paths, ids
_MAX_GATHERED = 256  # lines per wakeup
_GATHER_SECONDS = 0.02
_FLUSH_SECONDS = 2.0
_OURS = "jaxserve"
_FOLDERS = re.compile(rf"{_OURS}\.((server|core|features|tools)\.)?")  # which the names of modules do without
# Their warnings go to the same log. XLA's C++ writes to standard error directly.
_LIBRARIES = ("asyncio", "uvicorn", "opentelemetry", "jax", "absl", "py.warnings")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_COLOURS = {logging.DEBUG: "2", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "1;31"}
_QUIET_PATHS = (
    "/health",
    "/health/generate",
    "/health/live",
    "/health/ready",
    "/ping",
    "/metrics",
    "/version",  # by nginx in front of a router, for each request (tools/cluster/nginx.conf)
)  # polled every few seconds
_WITHHELD = "(message withheld: it may repeat what a client sent)"
_SAFE_ERRORS = (
    ConfigError,
    WeightsError,
    TokenizerError,
    CapacityError,
)  # quote the operator, not a client

_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF)
_ESCAPES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}
_ESCAPES |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}  # lone surrogates cannot be encoded
_ESCAPES |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}

_access = logging.getLogger("jaxserve.access")


def configure_logging(level: str, json: bool = False, stream: TextIO | None = None) -> LogWriter:
    """Sends the log to a stream (default: standard error), replacing an earlier call's.

    Returns the handler. Its `flush` waits until all lines are written; `logging.shutdown` calls it at exit.
    """
    stream = stream or sys.stderr
    handler = LogWriter(stream)
    handler.setFormatter(JsonFormatter() if json else TextFormatter(colour=stream.isatty()))
    number = logging.getLevelNamesMapping()[level.upper()]
    replaced = set()
    for name in (_OURS, *_LIBRARIES):
        logger = logging.getLogger(name)
        for old in [h for h in logger.handlers if isinstance(h, LogWriter)]:
            logger.removeHandler(old)
            replaced.add(old)
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(number if name == _OURS else max(number, logging.WARNING))
    logging.captureWarnings(True)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns about every malformed request
    for old in replaced:
        old.close()
    return handler


def log_access(request_id: str, scope: Scope, status: int, seconds: float) -> None:
    """Logs a finished HTTP request; status 499 means that the client left before the answer was complete.

    Probes are logged at debug level, also when they get a 503: the log names its reason elsewhere. Token counts come
    from the request's context.
    """
    path = scope["path"]  # without the query, which could hold a key
    is_probe = path.removeprefix(scope.get("root_path", "")) in _QUIET_PATHS
    level = logging.DEBUG if is_probe and (status < 400 or status == 503) else logging.INFO
    if not _access.isEnabledFor(level):
        return
    context, client = get_context(scope), scope.get("client")
    fields = {
        "request_id": request_id[:_MAX_CLIENT_TEXT],
        "client": client[0] if client else "local",  # a Unix socket has no peer address
        "method": scope["method"][:20],
        "path": path[:_MAX_CLIENT_TEXT],
        "tenant": context.rights.tenant.name or None,
        "service_tier": context.service_tier,
        "adapter": context.adapter,
        "status": status,
        "seconds": round(seconds, 6),
        "prompt_tokens": context.prompt_tokens,
        "output_tokens": context.output_tokens,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    tokens = f"  {fields['prompt_tokens']}+{fields.get('output_tokens', 0)} tokens" if "prompt_tokens" in fields else ""
    tenant = f" {fields['tenant']}" if "tenant" in fields else ""
    adapter = f"  adapter {fields['adapter']}" if "adapter" in fields else ""
    text = f"{status} {fields['method']} {fields['path']}  {seconds:.3f} s{tokens}  {fields['client']}{tenant}{adapter}"
    _access.log(level, "%s  %s", text, fields["request_id"], extra=fields)


class LogWriter(logging.Handler):
    """Queues lines for a thread that writes them."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.dropped = 0
        self._closed = self._is_stuck = False  # stuck: nobody reads the stream
        self._stream = stream
        # Not a queue.Queue: a signal handler that logs would deadlock on the lock held by the interrupted thread.
        self._lines: queue.SimpleQueue[str | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_lines, name="jaxserve-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Formats the record in the calling thread, because its arguments may change later."""
        if self._lines.qsize() >= _MAX_WAITING:
            self.dropped += 1
            return
        try:
            self._lines.put(self.format(record) + "\n")
        except Exception:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Counts a record that cannot be formatted; the default handler would print its arguments."""
        self.dropped += 1

    def flush(self) -> None:
        """Waits for the lines logged so far to be written, for a bounded time, and not again while nothing is."""
        if self._closed or self._is_stuck or threading.current_thread() is self._thread:
            return
        done = threading.Event()
        self._lines.put(done)
        self._is_stuck = not done.wait(_FLUSH_SECONDS)

    def close(self) -> None:
        """Writes the remaining lines and ends the thread. Calling it again does nothing."""
        self.flush()
        self._closed = True
        self._lines.put(None)
        super().close()

    def _write_lines(self) -> None:
        is_open = True
        while is_open:
            items = [self._lines.get()]
            if isinstance(items[0], str):
                time.sleep(_GATHER_SECONDS)  # under load, one wakeup writes many lines
            with contextlib.suppress(queue.Empty):
                while len(items) < _MAX_GATHERED:
                    items.append(self._lines.get_nowait())
            for line in items:
                if isinstance(line, str):
                    self._write(line)
            with contextlib.suppress(OSError, ValueError):
                self._stream.flush()
            self._is_stuck = False
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            is_open = None not in items

    def _write(self, line: str) -> None:
        try:
            self._stream.write(line)
        except (OSError, ValueError):  # a full disk or a closed pipe must not stop the server
            self.dropped += 1


class TextFormatter(logging.Formatter):
    """Formats lines for people: time, level, module, message. A traceback follows, indented."""

    def __init__(self, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, without its end."""
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(record.created))
        module = _FOLDERS.sub("", record.name)
        level = "FATAL" if record.levelno >= logging.CRITICAL else record.levelname
        line = f"{when} {level:<8}{escape(module):<14} {_read_message(record)}"
        if self._colour and record.levelno in _COLOURS:
            line = f"\x1b[{_COLOURS[record.levelno]}m{line}\x1b[0m"
        return "\n    | ".join([line, *_read_traceback(record)])


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line, with the record's extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, without its end."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": escape(record.name),
            "message": _read_message(record),
        }
        if trace := _read_traceback(record):
            fields["exception"] = "\n".join(trace)
        fields |= {escape(k): _plain(v) for k, v in vars(record).items() if k not in _STANDARD and k not in fields}
        return jsonlib.dumps(fields, allow_nan=False)


def escape(text: str) -> str:
    """Returns the text with control, bidirectional and unencodable characters escaped."""
    return text.translate(_ESCAPES)


def _read_message(record: logging.LogRecord) -> str:
    message = record.getMessage().rstrip("\n")
    if record.name in ("asyncio", "py.warnings"):  # later lines show whole futures, or a source line
        message = message.partition("\n")[0]
    if len(message) > _MAX_MESSAGE:
        message = message[:_MAX_MESSAGE] + f"... ({len(message)} characters)"
    return escape(message)


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return escape(str(value)[:_MAX_MESSAGE])


def _read_traceback(record: logging.LogRecord) -> list[str]:
    """Returns the escaped lines of the record's exception and its causes."""
    error = record.exc_info[1] if record.exc_info else None
    return [] if error is None else [escape(line) for line in _list_trace(error, set())]


def _list_trace(error: BaseException, seen: set[int]) -> Iterator[str]:
    """Yields the lines of an exception: its message, frames, cause and members."""
    seen.add(id(error))
    yield f"{type(error).__qualname__}: {_describe(error)}"
    for entry in traceback.format_tb(error.__traceback__):
        yield from entry.rstrip("\n").split("\n")
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for word, other in (("caused by ", cause), *(("with ", member) for member in members)):
        if other is not None and id(other) not in seen and len(seen) < 20:
            lines = _list_trace(other, seen)
            yield word + next(lines)
            yield from lines


def _describe(error: BaseException) -> str:
    """Returns an exception's message, which is withheld for types whose messages quote input."""
    if isinstance(error, ValueError | LookupError) and not isinstance(error, _SAFE_ERRORS):
        return _WITHHELD
    return str(error)[:_MAX_MESSAGE]
