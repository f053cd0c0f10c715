"""What each test costs in CPU seconds, its finished child processes included, and whether it passed: `--costs FILE`.

Seconds on the clock depend on what else a machine does, CPU seconds hardly do, so docs/testing.md counts these. What a
test compiles first, or a fixture it is the first to ask for, counts as its own. Threads that go on after a test count
for the next one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

NAME = "cpu_seconds"
_STARTED = pytest.StashKey[float]()


def read_cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CpuSeconds:
    """A plugin. Workers of xdist measure, and their reports carry what they measured to the process that writes."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.tests: dict[str, tuple[float, bool]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.stash[_STARTED] = read_cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append((NAME, read_cpu_seconds() - item.stash[_STARTED]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before, has_passed = self.tests.get(report.nodeid, (0.0, True))
        seconds = [value for name, value in report.user_properties if name == NAME and report.when == "teardown"]
        self.tests[report.nodeid] = (float(sum(seconds, before)), has_passed and not report.failed)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.file is None:
            return
        self.file.write_text(json.dumps({"status": int(exitstatus), "tests": self.tests}))
