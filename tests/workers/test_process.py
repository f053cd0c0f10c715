"""A process that can be killed: its jobs, its limits, and what is left when it ends."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.workers import Worker, WorkerEndedError, WorkerStartError, WorkerTimeoutError

PROGRAM = """
    import os, time
    kept = []

    def prepare(options):
        if "exit" in options:
            raise SystemExit(options["exit"])

        def answer(job):
            more = {"attachment": bytes(job["attachment"])[::-1]} if "attachment" in job else {}
            return {"found": DO[job["do"]](job.get("value")), "options": options, **more}

        return answer

    def keep(size):
        kept.append(bytearray(size))

    DO = {"echo": lambda value: value, "sleep": time.sleep, "exit": os._exit, "keep": keep, "print": print}
"""
MEMORY = 64 << 20


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


@pytest.fixture
def worker(program: Path) -> Iterator[Worker]:
    starts: list[int] = []

    def make_options() -> dict[str, Any]:
        starts.append(0)
        return {"starts": len(starts)}

    made = Worker(program, make_options, name="the test", time_limit_s=10.0, memory_bytes=MEMORY)
    yield made
    made.stop()


def ask(worker: Worker, do: str, value: Any = None, limit_s: float | None = None) -> Any:
    return worker.ask({"do": do, "value": value}, limit_s)["found"]


def test_jobs_and_replies_are_json(worker: Worker) -> None:
    assert not worker.is_running
    values = [None, True, 10**30, 0.1, "é\u2028\n", "\ud83d\ude00", "\udc80", {"b": [1], "a": {}}, "x" * 3_000_000]
    assert [ask(worker, "echo", value) for value in values] == values
    assert worker.ask({"do": "print", "value": "noise"}) == {"found": None, "options": {"starts": 1}}
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises((ValueError, RecursionError)):
        ask(worker, "echo", deep)
    assert worker.ask({"do": "echo"})["options"] == {"starts": 1}, "nothing was sent"


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 3_000_001])
def test_bytes_go_beside_json(worker: Worker, size: int) -> None:
    data = (b"ab\n{}\0" * size)[:size]
    reply = worker.ask({"do": "echo", "value": "x" * 70_000, "attachment": data})
    assert reply["attachment"] == data[::-1] and reply["found"] == "x" * 70_000
    assert "attachment" not in worker.ask({"do": "echo", "attachment": b""}) and ask(worker, "echo", 1) == 1


def test_no_memory_is_taken_for_what_a_process_cannot_have(worker: Worker) -> None:
    worker.start()
    worker._memory_bytes = 10
    assert len(worker.ask({"do": "echo", "attachment": b"a" * 10})["attachment"]) == 10
    with pytest.raises(WorkerEndedError):
        worker.ask({"do": "echo", "attachment": b"a" * 11})


@pytest.mark.parametrize(
    ("do", "value", "error", "message"),
    [
        ("sleep", 60, WorkerTimeoutError, "the test .*too long"),
        ("exit", 3, WorkerEndedError, r"the test .*\(exit status 3\)"),
        ("keep", 2 * MEMORY, WorkerEndedError, "the test ended"),
    ],
)
def test_a_job_that_ends_its_process(worker: Worker, do: str, value: int, error: type[Exception], message: str) -> None:
    worker.start()
    first = worker.process_id
    with pytest.raises(error, match=message):
        ask(worker, do, value, 0.2 if do == "sleep" else None)
    assert not worker.is_running and worker.process_id is None
    assert not Path(f"/proc/{first}").exists(), "its parent has waited for it"
    assert worker.ask({"do": "echo"})["options"] == {"starts": 2}


def test_a_process_that_keeps_memory_is_replaced(worker: Worker) -> None:
    ask(worker, "keep", MEMORY // 2)
    assert not worker.is_running
    assert ask(worker, "echo", 1) == 1


def test_no_time_left_is_a_timeout(worker: Worker) -> None:
    worker.start()
    with pytest.raises(WorkerTimeoutError):
        ask(worker, "sleep", 60, 0.0)


def test_killing_from_outside(worker: Worker) -> None:
    worker.kill()
    worker.start()
    worker.kill()
    deadline = time.monotonic() + 10
    while worker.is_running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ask(worker, "echo", 1) == 1


def test_a_program_that_does_not_start(program: Path) -> None:
    worker = Worker(program, lambda: {"exit": 7}, name="the test", time_limit_s=10.0, memory_bytes=MEMORY)
    for _ in range(2):
        with pytest.raises(WorkerStartError, match=r"the test .*\(exit status 7\)"):
            ask(worker, "echo")
