"""The log: one line a record, nothing that a client could forge, nothing that a client said."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pydantic
import pytest
from starlette.types import Scope

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.request import ServiceTier, Tenant
from jaxserve.server import logs
from jaxserve.server.keys import KeyRights
from jaxserve.server.logs import LogWriter, configure_logging, escape, log_access
from jaxserve.server.request_context import get_context
from jaxserve.tools.simulation.traces import read_trace
from tests.server.conftest import keep_loggers

SECRET = "my secret prompt"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restore_loggers() -> Iterator[None]:
    with keep_loggers():
        yield


def read_lines(handler: LogWriter, stream: io.StringIO) -> list[str]:
    handler.flush()
    return stream.getvalue().splitlines()


def make_scope(**changes: object) -> Scope:
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "client": ("10.0.0.7", 4711)}
    return scope | {"query_string": b"api_key=sk-secret"} | changes


def make_generated(prompt_tokens: int, output_tokens: int) -> Scope:
    scope = make_scope()
    context = get_context(scope)
    context.prompt_tokens, context.output_tokens = prompt_tokens, output_tokens
    return scope


def test_text_is_one_aligned_line_without_colour() -> None:
    stream = io.StringIO()
    handler = configure_logging("info", stream=stream)
    logging.getLogger("jaxserve.server.app").info("listening on %s", "127.0.0.1:8000")
    logging.getLogger("jaxserve.engine.build").warning("fell back")
    logging.getLogger("jaxserve").debug("not at this level")
    first, second = read_lines(handler, stream)
    assert first.endswith(" INFO    app            listening on 127.0.0.1:8000")
    assert second.endswith(" WARNING engine.build   fell back")
    assert first.index("listening") == second.index("fell back")
    assert "\x1b" not in stream.getvalue()


def test_colour_is_for_terminals_and_text_only() -> None:
    for json_lines, coloured in ((False, True), (True, False)):
        stream = Terminal()
        handler = configure_logging("info", json_lines, stream)
        logging.getLogger("jaxserve").error("broken")
        assert read_lines(handler, stream)[0].startswith("\x1b[31m") is coloured


def test_json_has_extra_fields_and_is_always_valid() -> None:
    stream = io.StringIO()
    handler = configure_logging("info", True, stream)
    extra = {"request_id": "r1", "seconds": float("nan"), "status": 200, "odd": {"a": 1}, "half": "\ud800"}
    logging.getLogger("jaxserve.x").info("do\nne", extra=extra)
    (line,) = read_lines(handler, stream)
    entry = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (entry["level"], entry["logger"], entry["message"]) == ("info", "jaxserve.x", "do\\nne")
    assert entry["time"].endswith("+00:00")
    assert (entry["status"], entry["request_id"], entry["seconds"]) == (200, "r1", "nan")
    assert (entry["odd"], entry["half"]) == ("{'a': 1}", "\\ud800")


@pytest.mark.parametrize("json_lines", [False, True])
def test_clients_cannot_forge_lines(json_lines: bool) -> None:
    stream = io.StringIO()
    handler = configure_logging("info", json_lines, stream)
    forged = "/x\n01-01 00:00:00 ERROR   app  all lost\r\x1b[2J\x9b\u2028\u202e\x00end"
    log_access("id\nid", make_scope(path=forged, method="GE\nT"), 404, 0.5)
    lines = read_lines(handler, stream)
    assert len(lines) == 1
    assert all(character.isprintable() for character in lines[0])
    lines[0].encode()
    assert "all lost" in lines[0], "it is still seen, harmless"


def test_escape_keeps_ordinary_text() -> None:
    text = "Grüße, 世界 🙂 \\n"
    assert escape(text) == text
    assert escape("a\tb\x7f\u2066") == "a\\tb\\x7f\\u2066"


def test_escape_leaves_nothing_that_no_file_takes() -> None:
    assert escape("a\ud800b\udfff") == "a\\ud800b\\udfff"


def test_access_line_and_its_fields() -> None:
    stream = io.StringIO()
    handler = configure_logging("info", stream=stream)
    log_access("r-1", make_generated(12, 34), 200, 1.23456)
    log_access("r-2", make_scope(client=None, method="GET", path="/nothing"), 499, 0.001)
    first, second = read_lines(handler, stream)
    assert first.endswith("INFO    access         200 POST /v1/completions  1.235 s  12+34 tokens  10.0.0.7  r-1")
    assert second.endswith("499 GET /nothing  0.001 s  local  r-2")
    assert "sk-secret" not in stream.getvalue()

    stream = io.StringIO()
    handler = configure_logging("info", True, stream)
    log_access("r-1", make_generated(12, 34), 200, 1.23456)
    entry = json.loads(read_lines(handler, stream)[0])
    expected = {"request_id": "r-1", "client": "10.0.0.7", "method": "POST", "path": "/v1/completions", "status": 200}
    expected |= {"seconds": 1.23456, "prompt_tokens": 12, "output_tokens": 34}
    assert {name: entry[name] for name in expected} == expected


def test_the_log_is_a_trace_for_the_simulator(tmp_path: Path) -> None:
    stream = io.StringIO()
    handler = configure_logging("info", True, stream)
    flex = make_generated(12, 34)
    get_context(flex).service_tier = "flex"
    get_context(flex).rights = KeyRights(Tenant("blue"))
    log_access("r-1", flex, 200, 3.0)
    log_access("r-2", make_scope(method="GET", path="/nothing"), 404, 0.001)
    log_access("r-3", make_generated(5, 6), 200, 1.0)
    (tmp_path / "log").write_text("\n".join(read_lines(handler, stream)))
    first, second = read_trace(tmp_path / "log")
    assert (first.num_prompt_tokens, first.num_output_tokens, first.arrival_time) == (12, 34, 0.0)
    assert (first.tenant, first.service_tier) == ("blue", ServiceTier.FLEX)
    assert (second.num_prompt_tokens, second.tenant, second.service_tier) == (5, "", ServiceTier.DEFAULT)
    assert second.arrival_time == pytest.approx(2.0, abs=0.5)


def test_probes_are_quiet_unless_they_fail() -> None:
    stream = io.StringIO()
    handler = configure_logging("info", stream=stream)
    log_access("a", make_scope(method="GET", path="/health/ready"), 200, 0.001)
    assert read_lines(handler, stream) == []
    log_access("b", make_scope(method="GET", path="/health/ready"), 503, 0.001)
    assert read_lines(handler, stream) == []
    log_access("c", make_scope(method="GET", path="/health/ready"), 500, 0.001)
    assert len(read_lines(handler, stream)) == 1
    configure_logging("debug", stream=stream)
    log_access("c", make_scope(method="GET", path="/metrics"), 200, 0.001)
    logging.getLogger("jaxserve").handlers[-1].flush()
    assert "/metrics" in stream.getvalue()


def test_probes_are_quiet_behind_a_proxys_path_too() -> None:
    stream = io.StringIO()
    handler = configure_logging("info", stream=stream)
    log_access("a", make_scope(method="GET", path="/api/health", root_path="/api"), 200, 0.001)
    assert read_lines(handler, stream) == []
    log_access("b", make_scope(method="GET", path="/api/v1/models", root_path="/api"), 200, 0.001)
    assert len(read_lines(handler, stream)) == 1


def log_with_trace(error: Exception) -> None:
    try:
        raise error
    except Exception:
        logging.getLogger("jaxserve.server").exception("a request broke")


class Body(pydantic.BaseModel):
    n: int


def make_quoting_errors() -> list[Exception]:
    errors: list[Exception] = [
        InvalidRequestError(f"bad: {SECRET}", field="prompt", value=SECRET),
        KeyError(SECRET),
        ValueError(SECRET),
        ExceptionGroup("several", [ValueError(SECRET)]),
    ]
    try:
        Body.model_validate({"n": SECRET})
    except pydantic.ValidationError as error:
        errors.append(error)
    chained = RuntimeError("the step failed")
    chained.__cause__ = ValueError(SECRET)
    return [*errors, chained]


@pytest.mark.parametrize("error", make_quoting_errors(), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("json_lines", [False, True])
def test_tracebacks_never_repeat_what_a_client_sent(error: Exception, json_lines: bool) -> None:
    stream = io.StringIO()
    handler = configure_logging("debug", json_lines, stream)
    log_with_trace(error)
    lines = read_lines(handler, stream)
    text = stream.getvalue()
    assert "secret" not in text
    assert type(error).__name__ in text
    assert "log_with_trace" in text, "the frames are what a traceback is for"
    assert all(line.startswith("    | ") for line in lines[1:])
    assert len(lines) == 1 or not json_lines


def test_tracebacks_tell_what_the_operator_needs() -> None:
    stream = io.StringIO()
    handler = configure_logging("info", stream=stream)
    log_with_trace(RuntimeError("out of memory\nforged line"))
    log_with_trace(ConfigError("must be positive", field="port"))
    lines = read_lines(handler, stream)
    assert "    | RuntimeError: out of memory\\nforged line" in lines
    assert "    | ConfigError: port: must be positive" in lines


def test_lost_futures_do_not_print_what_they_hold() -> None:
    stream = io.StringIO()
    handler = configure_logging("info", stream=stream)

    async def lose() -> None:
        async def fail() -> None:
            raise ValueError(SECRET)

        task = asyncio.ensure_future(fail())
        await asyncio.sleep(0)
        del task

    asyncio.run(lose())
    assert any("Task exception was never retrieved" in line for line in read_lines(handler, stream))
    assert "secret" not in stream.getvalue()


def test_a_record_that_cannot_be_formatted_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    handler = configure_logging("info", stream=stream)
    logging.getLogger("jaxserve").info("%d tokens", SECRET)
    assert read_lines(handler, stream) == []
    assert "secret" not in "".join(capsys.readouterr())
    assert handler.dropped == 1


class Held(io.StringIO):
    """A pipe that nobody reads until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def write(self, text: str) -> int:
        assert self.go_on.wait(60)
        return super().write(text)


def test_a_held_terminal_stops_nobody() -> None:
    stream = Held()
    handler = configure_logging("info", stream=stream)
    for number in range(12_000):
        logging.getLogger("jaxserve").info("%d", number)
    assert handler.dropped >= 1_700, "what does not fit is dropped instead of waited for"
    stream.go_on.set()
    lines = read_lines(handler, stream)
    assert len(lines) == 12_000 - handler.dropped
    assert lines[0].endswith(" 0")


def test_a_full_disk_stops_nobody() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            if "lost" in text:
                raise OSError(28, "No space left on device")
            return super().write(text)

    stream = Full()
    handler = configure_logging("info", stream=stream)
    logging.getLogger("jaxserve").info("lost")
    logging.getLogger("jaxserve").info("kept")
    assert [line[-4:] for line in read_lines(handler, stream)] == ["kept"]
    assert handler.dropped == 1


@pytest.mark.parametrize("name", ["jax._src.xla_bridge", "absl"])
def test_warnings_of_the_libraries_beneath_are_in_the_log(name: str) -> None:
    stream = io.StringIO()
    handler = configure_logging("info", json=True, stream=stream)
    logging.getLogger(name).info("chatter")
    logging.getLogger(name).warning("the device is slow")
    (line,) = read_lines(handler, stream)
    assert json.loads(line)["logger"] == name and json.loads(line)["level"] == "warning"


def test_warnings_of_python_are_one_line_in_the_log() -> None:
    stream = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        handler = configure_logging("info", stream=stream)
        warnings.warn("an option is old", stacklevel=1)
        logging.captureWarnings(False)
    (line,) = read_lines(handler, stream)
    assert "WARNING" in line and line.endswith("UserWarning: an option is old")


def test_configuring_again_replaces_the_handler() -> None:
    first, second = io.StringIO(), io.StringIO()
    old = configure_logging("info", stream=first)
    new = configure_logging("warning", stream=second)
    logging.getLogger("jaxserve").info("no")
    logging.getLogger("jaxserve").warning("yes")
    logging.getLogger("asyncio").warning("theirs")
    assert [line[-6:] for line in read_lines(new, second)] == ["   yes", "theirs"]
    assert first.getvalue() == ""
    assert old not in logging.getLogger("jaxserve").handlers
    old.close()
    logging.shutdown([lambda: new])
    assert len(second.getvalue().splitlines()) == 2, "and no line comes twice"


def test_a_log_that_nobody_reads_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            assert released.wait(60)
            return super().write(text)

    released, pipe = threading.Event(), Pipe()
    with keep_loggers():
        writer = configure_logging("info", stream=pipe)
        logging.getLogger("jaxserve").info("held")
        monkeypatch.setattr(logs, "_FLUSH_SECONDS", 0.01)
        writer.flush()
        monkeypatch.setattr(logs, "_FLUSH_SECONDS", 600.0)
        writer.flush()  # returns at once: nothing was written since
        released.set()
        while not pipe.getvalue():
            time.sleep(0.01)
        logging.getLogger("jaxserve").info("read")
        while writer._is_stuck:
            time.sleep(0.01)
        writer.flush()
        assert "held" in pipe.getvalue() and "read" in pipe.getvalue()
