"""The attacks on a server: what counts as borne, and one of them made."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import clocked_server
from attack_server import ATTACKS, Look, Result, render
from attacks import SHUTDOWN_SECONDS, Notes
from rich.console import Console

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
GOOD = Result(ATTACKS["bodies"], during=[Look(0.2, "yes")], after=Look(0.1, "yes"), ending=1.0, text="yes")


@pytest.mark.parametrize(
    ("changes", "is_good"),
    [
        ({}, True),
        ({"skipped": "no control group can be made here"}, True),
        ({"during": []}, False),
        ({"during": [Look(0.2, "yes"), Look(2.5, "yes")]}, False),
        ({"during": [Look(0.2, "yes"), Look(0.2, "no")]}, False),
        ({"after": Look(0.1, None, "503, health 200")}, False),
        ({"ending": SHUTDOWN_SECONDS + 2.5}, False),
        ({"ending": None}, False),
        ({"notes": Notes(wrong=["1 tracebacks in the log"])}, False),
        ({"text": None, "during": [Look(0.1, None, "503")], "after": Look(0.1, None, "503")}, False),
    ],
)
def test_what_counts_as_borne(changes: dict[str, object], is_good: bool) -> None:
    assert replace(GOOD, **changes).is_good is is_good  # type: ignore[arg-type]


def test_the_table_says_what_failed() -> None:
    console = Console(width=130)
    bad = replace(GOOD, during=[Look(10.0, None, "ReadTimeout"), Look(0.1, "yes")], ending=None)
    with console.capture() as text:
        console.print(render([GOOD, bad]))
    assert "10.00 s; 1 of 2 failed: ReadTimeout" in " ".join(text.get().replace("│", " ").split())
    assert "NOT OK" in text.get()


def test_callbacks_that_take_long_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(seconds: float) -> None:
        deadline = time.thread_time() + seconds
        while time.thread_time() < deadline:
            pass

    async def work_long() -> None:
        work(2 * clocked_server.MOST_SECONDS)

    async def run() -> None:
        asyncio.get_running_loop().call_soon(work, 0.0)
        await asyncio.create_task(work_long())

    monkeypatch.setattr(asyncio.Handle, "_run", asyncio.Handle._run)
    monkeypatch.setattr(gc, "callbacks", list(gc.callbacks))
    clocked_server.watch_callbacks()
    asyncio.run(run())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(clocked_server.MARK) and "work_long" in line


@pytest.mark.slow
@pytest.mark.thorough
def test_hung_templates_are_borne() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "attack_server.py"), "--only", "templates"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hung and huge templates" in done.stdout
