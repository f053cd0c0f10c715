"""Compiling many programs at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxserve.runtime import compile as room
from jaxserve.runtime.buckets import BucketTable


def test_a_program_that_does_not_compile_ends_the_others_that_have_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def make_job(index: int) -> Callable[[], None]:
        def compile_one() -> None:
            begun.append(index)
            if index == 0:
                raise MemoryError("too large")
            time.sleep(0.1)

        return compile_one

    def list_jobs(*_: Any) -> Iterator[tuple[str, dict[Any, Any], Any, Callable[[], None]]]:
        return ((f"job {index}", {}, index, make_job(index)) for index in range(200))

    monkeypatch.setattr(room, "_list_jobs", list_jobs)
    with pytest.raises(MemoryError, match="too large"):
        room.compile_programs(None, None, BucketTable([2], [64], 2), max_logprobs=0, threads=1)  # type: ignore[arg-type]
    assert len(begun) < 200
