"""A pool of processes: turns, waits, and what is left when it is closed."""

from __future__ import annotations

import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.workers import (
    Worker,
    WorkerEndedError,
    WorkerPool,
    WorkerPoolBusyError,
    WorkerPoolClosedError,
    WorkerTimeoutError,
)

PROGRAM = """
    import os, time

    DO = {"id": os.getpid, "exit": lambda: os._exit(3), "sleep": lambda: time.sleep(600)}

    def prepare(options):
        return lambda job: {"found": DO[job["do"]]()}
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[WorkerPool]:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    made = WorkerPool(lambda: Worker(program, dict, name="the test", time_limit_s=60.0, memory_bytes=64 << 20), size=1)
    yield made
    made.close()


def ask(pool: WorkerPool, do: str, *, wait_s: float = 60.0, limit_s: float = 60.0, **options: Any) -> Any:
    return pool.ask({"do": do}, wait_s=wait_s, limit_s=limit_s, **options)["found"]


def test_one_process_does_all_jobs(pool: WorkerPool) -> None:
    assert pool.process_ids == []
    with pytest.raises(WorkerPoolBusyError):
        ask(pool, "id", may_start=False)
    first = ask(pool, "id")
    assert [ask(pool, "id", may_start=False) for _ in range(3)] == [first] * 3 and pool.process_ids == [first]


def test_what_ends_is_replaced_at_once(pool: WorkerPool) -> None:
    first = ask(pool, "id")
    with pytest.raises(WorkerEndedError):
        ask(pool, "exit")
    assert ask(pool, "id", may_start=False) not in (None, first)
    with pytest.raises(WorkerTimeoutError) as error:
        ask(pool, "sleep", limit_s=0.05)
    assert not isinstance(error.value, WorkerPoolBusyError)
    with pytest.raises(WorkerTimeoutError):
        ask(pool, "sleep", deadline=time.monotonic() + 0.05)


def test_who_waits_too_long_is_told_apart_from_who_works_too_long(pool: WorkerPool) -> None:
    pool.start(60.0)
    errors: list[BaseException] = []

    def sleep() -> None:
        try:
            ask(pool, "sleep")
        except WorkerPoolClosedError as error:
            errors.append(error)

    sleeping = threading.Thread(target=sleep)
    sleeping.start()
    deadline = time.monotonic() + 60
    while pool._idle and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(WorkerPoolBusyError):
        ask(pool, "id", wait_s=0.01)
    pool.close()
    sleeping.join(60)
    assert len(errors) == 1
    with pytest.raises(WorkerPoolClosedError):
        ask(pool, "id")
