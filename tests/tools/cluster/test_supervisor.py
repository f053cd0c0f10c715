"""Processes that are kept running, and end together; the servers are fakes that start in a moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from jaxserve.tools.cluster.replicas import find_free_ports
from jaxserve.tools.cluster.service import RunningService, Service

FAKE = str(Path(__file__).with_name("fake_server.py"))
ROOT = Path(__file__).parents[3]
SECONDS = 60.0  # only a hang takes so long
CLIENT = httpx.Client(timeout=5, trust_env=False, verify=False)  # creating one for each request takes long

SUPERVISE = """
import json, sys
from jaxserve.tools.cluster.service import Service
from jaxserve.tools.cluster.supervisor import Supervisor
def make(name, words, url):
    return Service(name, (sys.executable, *words), {}, url)
replicas, front = json.loads(sys.argv[1])
tell = lambda: print("all are ready", file=sys.stderr, flush=True)
sys.exit(Supervisor([make(*each) for each in replicas], [make(*front)] if front else [], on_ready=tell).run())
"""


class Group:
    """A supervisor in a process of its own."""

    def __init__(self, log: Path, kinds: list[str], *, front: str | None = None) -> None:
        self.ports = find_free_ports(len(kinds) + 1)
        urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        described = [
            [str(rank), [FAKE, str(port), kind], url]
            for rank, (port, kind, url) in enumerate(zip(self.ports, kinds, urls, strict=False))
        ]
        last = None if front is None else ["front", [FAKE, str(self.ports[-1]), front], urls[-1]]
        command = [sys.executable, "-c", SUPERVISE, json.dumps([described, last])]
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(command, cwd=ROOT, stderr=file, start_new_session=True)
        self.pids: list[int] = []

    def find_pid(self, index: int) -> int | None:
        """Returns the process that answers at a port; None if nobody does."""
        try:
            text = CLIENT.get(f"http://127.0.0.1:{self.ports[index]}/").text
        except httpx.HTTPError:
            return None
        self.pids.append(int(text))
        return int(text)

    def end(self) -> str:
        """Waits until the supervisor ends; returns what it wrote."""
        self.process.wait(SECONDS)
        return self.log

    @property
    def log(self) -> str:
        """What it has written."""
        return self._log.read_text()

    def wait_until_ready(self) -> None:
        """Waits until the supervisor says so."""
        wait_for(lambda: True if "all are ready" in self.log else None)


def wait_for[T](ask: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if (found := ask()) is not None:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def make(*kinds: str, front: str | None = None) -> Group:
        groups.append(Group(tmp_path / f"log{len(groups)}", list(kinds), front=front))
        return groups[-1]

    yield make
    for group in groups:
        if group.process.poll() is None:
            group.process.kill()
        group.process.wait(SECONDS)
        for pid in group.pids:
            wait_for(lambda pid=pid: None if is_alive(pid) else True)  # none is left behind


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_all_start_and_a_signal_ends_all_well(start: Callable[..., Group]) -> None:
    group = start("", "", front="")
    group.wait_until_ready()
    group.process.send_signal(signal.SIGTERM)
    text = group.end()
    assert group.process.returncode == 0, text
    assert "all are ready" in text and "[0] drained" in text and "[1] drained" in text and "[front] drained" in text
    assert text.index("[front] listening") < text.index("all are ready")
    assert max(text.index("[0] drained"), text.index("[1] drained")) < text.index("[front] drained")


def test_what_ends_is_started_again_and_the_others_go_on(start: Callable[..., Group]) -> None:
    group = start("", "")
    group.wait_until_ready()
    first, other = (wait_for(lambda index=index: group.find_pid(index)) for index in (0, 1))
    os.kill(first, signal.SIGKILL)
    again = wait_for(lambda: pid if (pid := group.find_pid(0)) not in (None, first) else None)
    assert again != first and group.find_pid(1) == other
    group.process.send_signal(signal.SIGTERM)
    assert "0 ended with status -9; it starts again in 1 s" in group.end()


def test_what_was_never_ready_ends_all(start: Callable[..., Group]) -> None:
    group = start("", "fails", front="")
    text = group.end()
    assert group.process.returncode == 2
    assert "[1] max_num_seqs: must be an integer" in text and "1 could not start (status 2), so all end" in text
    assert "[front]" not in text


def test_the_second_signal_ends_at_once(start: Callable[..., Group]) -> None:
    group = start("slow")
    wait_for(lambda: group.find_pid(0))
    group.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    group.process.send_signal(signal.SIGINT)
    text = group.end()
    assert group.process.returncode == 2 and "drained" not in text


def test_a_killed_supervisor_leaves_nobody(start: Callable[..., Group]) -> None:
    group = start("", "", front="")
    pids = [wait_for(lambda index=index: group.find_pid(index)) for index in range(3)]
    group.process.kill()
    for pid in pids:
        wait_for(lambda pid=pid: None if is_alive(pid) else True)


def test_delays_double_up_to_a_minute_and_are_forgotten_after_one() -> None:
    now = [0.0]
    (port,) = find_free_ports(1)
    command = (sys.executable, FAKE, str(port))
    running = RunningService(Service("0", command, {}, f"http://127.0.0.1:{port}"), clock=lambda: now[0])

    def start_and_fail() -> None:
        running.look()
        assert running.is_running
        running.send(signal.SIGKILL)
        assert running.wait(SECONDS) == -signal.SIGKILL
        assert running.note_end() == -signal.SIGKILL

    for delay in (1, 2, 4, 8, 16, 32, 60, 60):
        start_and_fail()
        now[0] += delay - 0.5
        running.look()
        assert not running.is_running
        now[0] += 0.5
    running.look()
    try:
        wait_for(lambda: step(running, now) or None)
        now[0] += 61
        running.look()
    finally:
        running.send(signal.SIGKILL)
        running.wait(SECONDS)
    running.note_end()
    now[0] += 1
    running.look()
    assert running.is_running
    running.send(signal.SIGKILL)
    running.wait(SECONDS)


def step(running: RunningService, now: list[float]) -> bool:
    now[0] += 0.5
    running.look()
    return running.is_ready
