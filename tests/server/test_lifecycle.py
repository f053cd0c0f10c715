"""From the first signal to the last byte: starting, draining, ending at once, and ending by a fault of our own."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server import faulty, held_compiling
from tests.server.conftest import ALL_PROGRAMS, SMALL
from tests.server.pressure import (
    COMPLETIONS,
    complete,
    connect,
    get_status,
    join_text,
    make_request,
    open_stream,
    probe,
    read_all,
    read_events,
    wait_until,
)
from tests.server.running import RunningServer, launch, run_server

pytestmark = pytest.mark.slow
SLOW_STEPS: dict[str, Any] = {"ignore_eos": True, "temperature": 0, "priority": faulty.SLOW + 25}


@contextmanager
def run_faulty(*flags: str) -> Iterator[RunningServer]:
    with run_server(*SMALL, *flags, program=Path(faulty.__file__)) as server:
        yield server


def send_term(server: RunningServer) -> float:
    """Sends SIGTERM; returns when."""
    server.process.send_signal(signal.SIGTERM)
    return time.monotonic()


def wait_for_end(server: RunningServer, start: float, seconds: float) -> int:
    """Returns the exit status; fails when the process has not ended so long after `start`."""
    try:
        status = server.process.wait(120)
    finally:
        server.process.kill()
    took = time.monotonic() - start
    print(f"the process ended after {took:.2f} s with status {status}")
    assert took < seconds
    return status


def is_draining(server: RunningServer) -> bool:
    return any("draining" in line for line in list(server.lines))


def test_sigterm_lets_everyone_finish_and_takes_nothing_new() -> None:
    body = {"max_tokens": 100, **SLOW_STEPS}
    with run_faulty() as server, ThreadPoolExecutor(4) as clients:
        text = complete(server, **body).json()["choices"][0]["text"]
        with httpx.Client(timeout=60) as kept:
            assert kept.get(server.url + "/ping").status_code == 200
            streams = [open_stream(server, **body) for _ in range(16)]
            whole = clients.submit(complete, server, **body)
            wait_until(
                lambda: (
                    server.metric("jaxserve:num_requests_running") + server.metric("jaxserve:num_requests_waiting")
                    == 17
                )
            )
            start = send_term(server)
            wait_until(lambda: is_draining(server))
            for refused in (
                complete(server, max_tokens=1),
                kept.post(server.url + COMPLETIONS, json={"prompt": "Once", "max_tokens": 1}),
            ):
                assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
                assert refused.json()["error"]["code"] == "server_draining"
            assert get_status(server, "/health/ready") == get_status(server, "/health") == 503
            assert get_status(server, "/health/live") == 200, "a restart would not help"
            assert server.metric("jaxserve:server_state", state="draining") == 1
        ends = [read_events(stream) for stream in streams]
        assert all(is_whole for _, is_whole in ends) and {join_text(events) for events, _ in ends} == {text}
        assert whole.result().json()["choices"][0]["text"] == text
        ended = time.monotonic()
        assert wait_for_end(server, ended, 10) == 0
        assert ended - start < 30, "they ended because they were done"


def test_sigterm_of_an_idle_server_ends_it() -> None:
    with run_faulty() as server, httpx.Client() as kept, connect(server) as watcher:
        probe(server)
        assert kept.get(server.url + "/ping").status_code == 200  # and its connection stays open
        watcher.sendall(b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n")
        watcher.recv(1000)
        assert wait_for_end(server, send_term(server), 10) == 0
        assert read_all(watcher).endswith(b"0\r\n\r\n"), "who looks on sees the end"
        assert not any("Traceback" in line for line in server.lines)


def test_requests_that_do_not_end_in_time_get_an_error() -> None:
    body = {"max_tokens": 900, **SLOW_STEPS}
    with run_faulty("--shutdown-timeout", "0.5") as server, ThreadPoolExecutor(1) as clients:
        streams = [open_stream(server, **body) for _ in range(4)]
        whole = clients.submit(complete, server, **body)
        wait_until(lambda: server.metric("jaxserve:num_requests_running") == 5)
        start = send_term(server)
        for stream in streams:
            events, is_whole = read_events(stream)
            assert is_whole and events[-1]["error"]["code"] == "server_draining"
        assert whole.result().status_code == 503
        assert wait_for_end(server, start, 15) == 0


def test_a_second_sigterm_ends_at_once() -> None:
    with run_faulty() as server:
        stream = open_stream(server, max_tokens=900, **SLOW_STEPS)
        stream.recv(300)
        send_term(server)
        wait_until(lambda: is_draining(server))
        assert wait_for_end(server, send_term(server), 5) == 0
        assert not read_all(stream).endswith(b"0\r\n\r\n"), "what is cut must not look whole"


def test_a_stuck_device_does_not_keep_the_process() -> None:
    with run_faulty("--shutdown-timeout", "0.5") as server, connect(server) as client:
        body = {"prompt": "Once", "max_tokens": 20, "ignore_eos": True, "priority": faulty.STUCK}
        client.sendall(make_request(COMPLETIONS, body))
        wait_until(lambda: server.metric("jaxserve:num_requests_running") == 1)
        assert wait_for_end(server, send_term(server), 20) == 0


REAL = pytest.param(False, id="compiling", marks=pytest.mark.thorough)


def launch_compiling(folder: Path, is_held: bool, *flags: str) -> RunningServer:
    """A server that compiles: without end, or many programs with an empty cache in the folder."""
    if is_held:
        more = "--precompile-bs-paddings", "4,8"  # some programs are for later
        return launch(*SMALL, *more, *flags, program=Path(held_compiling.__file__))
    return launch(*ALL_PROGRAMS, *flags, "--compilation-cache-dir", str(folder))


@pytest.mark.parametrize("is_held", [pytest.param(True, id="held"), REAL])
@pytest.mark.parametrize("moment", ["loading", "compiling"])
def test_sigterm_while_starting_ends_at_once(moment: str, is_held: bool, tmp_path: Path) -> None:
    server = launch_compiling(tmp_path, is_held)
    try:
        wait_until(lambda: server.url, 60)
        if moment == "compiling":
            wait_until(lambda: httpx.get(server.url + "/health").json()["status"] == "warming", 200)
        assert get_status(server, "/health/live") == 200
        refused = complete(server, max_tokens=1)
        assert refused.status_code == 503 and refused.json()["error"]["code"] in ("server_starting", "server_warming")
        assert wait_for_end(server, send_term(server), 10) == 0
    finally:
        server.process.kill()


@pytest.mark.parametrize("is_held", [pytest.param(True, id="held"), REAL])
def test_sigterm_while_the_rest_is_compiled_drains(is_held: bool, tmp_path: Path) -> None:
    server = launch_compiling(tmp_path, is_held, "--serve-while-warming")
    try:
        wait_until(lambda: any("largest programs only" in line for line in list(server.lines)), 200)
        stream = open_stream(server, max_tokens=900, temperature=0, ignore_eos=True)
        wait_until(lambda: server.metric("jaxserve:num_requests_running") == 1)
        assert httpx.get(server.url + "/health").json()["status"] == "warming"
        start = send_term(server)
        assert read_events(stream)[1], "what runs ends whole"
        assert wait_for_end(server, start, 60) == 0
        assert not any("Traceback" in line for line in server.lines)
    finally:
        server.process.kill()


def test_a_fault_of_the_engine_is_told_to_everyone_and_ends_the_process() -> None:
    with run_faulty() as server, ThreadPoolExecutor(8) as clients:
        streams = [open_stream(server, max_tokens=900, **SLOW_STEPS) for _ in range(4)]
        wholes = [clients.submit(complete, server, max_tokens=900, **SLOW_STEPS) for _ in range(2)]
        wait_until(lambda: server.metric("jaxserve:num_requests_running") == 6)
        start = time.monotonic()
        response = complete(server, max_tokens=1, priority=faulty.FAIL_PLAN)
        assert response.status_code == 500 and response.json()["error"]["code"] == "engine_stopped"
        assert "as it was asked for" not in response.text
        for stream in streams:
            events, is_whole = read_events(stream)
            assert is_whole and events[-1]["error"]["code"] == "engine_stopped"
        assert {whole.result().status_code for whole in wholes} == {500}
        assert wait_for_end(server, start, 10) not in (0, None)
        wait_until(lambda: any("ZeroDivisionError" in line for line in list(server.lines)))


def test_what_cannot_start_ends_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    server = launch("--model", str(tmp_path))
    status = wait_for_end(server, time.monotonic(), 60)
    assert status == 2
    reason = "architectures: None is not supported"
    wait_until(lambda: any(reason in line for line in list(server.lines)))
    assert sum(reason in line for line in server.lines) == 1, "said once, not by the log and again"
