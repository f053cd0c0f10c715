"""Attacks a local server: during each attack and right after it, other clients must be answered as before.

Each attack has its own server with the demo model on 127.0.0.1. During the attack and after it, a greedy request on a
new connection must return the same text as before, and /health/live must succeed, within two seconds (ten where it
shares the processor with 512 streams). Then SIGTERM must end the process within --shutdown-timeout plus two seconds. No
callback of the server's event loop may take more than 50 ms of CPU time meanwhile, collections of garbage aside
(clocked_server.py). The exit status is 1 if any of this fails.

    python scripts/attack_server.py [--only connections] [--hold-seconds 6]
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import httpx
from answer_attacks import ANSWER_ATTACKS
from attacks import ATTACKS as SERVER_ATTACKS
from attacks import SHUTDOWN_SECONDS, Attack, Notes, SkippedError
from cluster_attacks import CLUSTER_ATTACKS
from image_attacks import IMAGE_ATTACKS
from rich.console import Console
from rich.table import Table
from soak_server import Server
from tenant_attacks import TENANT_ATTACKS

HOLD_SECONDS = 6.0
ATTACKS = SERVER_ATTACKS | ANSWER_ATTACKS | TENANT_ATTACKS | IMAGE_ATTACKS | CLUSTER_ATTACKS
MOST_SECONDS = 2.0  # for SIGTERM beyond --shutdown-timeout
PROBE_LIMIT, PROBE_INTERVAL = 10.0, 0.2
PROBE = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
MIN_WIDTH = 130  # columns of the table if the terminal's width is unknown


@dataclass(frozen=True)
class Look:
    """One probe."""

    seconds: float
    text: str | None  # None: no answer, or not a valid one
    problem: str = ""


def look(server: Server) -> Look:
    """Requests the greedy text and the process's health, on new connections."""
    start = time.monotonic()
    text, problem = None, ""
    try:
        answer = httpx.post(f"{server.url}/v1/completions", json=PROBE, timeout=PROBE_LIMIT)
        health = httpx.get(f"{server.url}/health/live", timeout=PROBE_LIMIT)
        if (answer.status_code, health.status_code) == (200, 200):
            text = answer.json()["choices"][0]["text"]
        else:
            problem = f"{answer.status_code}, health {health.status_code}"
    except httpx.HTTPError as error:
        problem = type(error).__name__
    return Look(time.monotonic() - start, text, problem)


@dataclass
class Result:
    """The result of one attack."""

    attack: Attack
    notes: Notes = field(default_factory=Notes)
    during: list[Look] = field(default_factory=list)
    after: Look | None = None
    ending: float | None = None  # seconds from SIGTERM to the end; None: it was killed, or had ended before
    skipped: str = ""
    text: str | None = None

    @property
    def is_good(self) -> bool:
        if self.skipped:
            return True
        looks = [*self.during, *([self.after] if self.after is not None else [])]
        is_same = all(each.text == self.text and each.seconds <= self.attack.most_seconds for each in looks)
        was_well = self.text is not None and len(looks) > 1 and not self.notes.wrong
        return was_well and is_same and self.ends_in_time

    @property
    def verdict(self) -> str:
        """The verdict in the table."""
        return "[yellow]skipped[/]" if self.skipped else "[green]ok[/]" if self.is_good else "[red]NOT OK[/]"

    @property
    def ends_in_time(self) -> bool:
        return self.ending is not None and self.ending <= SHUTDOWN_SECONDS + MOST_SECONDS

    def describe(self, looks: list[Look]) -> str:
        """Returns the slowest probe in words, and how many probes failed."""
        if not looks:
            return "-"
        bad = [each for each in looks if each.text != self.text]
        slowest = f"{max(each.seconds for each in looks):.2f} s"
        if not bad:
            return slowest
        why = ", ".join(dict.fromkeys(each.problem or "another text" for each in bad))
        return f"{slowest}; {len(bad)} of {len(looks)} failed: {why}"


def run_attack(attack: Attack, hold_seconds: float = HOLD_SECONDS) -> Result:
    """Starts a server, attacks it for some time, and ends it."""
    result = Result(attack)
    try:
        with attack.start(result.notes) as server:
            result.text = look(server).text
            ended = threading.Event()
            prober = threading.Thread(target=_probe, args=(server, result, ended))
            prober.start()
            try:
                with attack.hold(server, result.notes):
                    time.sleep(hold_seconds)
                    ended.set()
                    prober.join()
            finally:
                ended.set()
                prober.join()
            result.after = look(server)
            result.ending = end(server)
            if server.num_tracebacks:
                result.notes.wrong.append(f"{server.num_tracebacks} tracebacks in the log")
            if slow := server.slow_callbacks:
                result.notes.wrong.append(f"{len(slow)} slow callbacks, the slowest {max(slow)}")
    except SkippedError as reason:
        result.skipped = str(reason)
    except SystemExit as reason:  # the server did not start
        result.notes.wrong.append(str(reason).splitlines()[-1])
    except Exception as error:  # if the server has ended, any step of an attack may fail; the other attacks still run
        result.notes.wrong.append(repr(error))
    return result


def _probe(server: Server, result: Result, ended: threading.Event) -> None:
    while not ended.is_set():
        result.during.append(look(server))
        ended.wait(PROBE_INTERVAL)


def end(server: Server) -> float | None:
    """Returns how long the server took to end after SIGTERM."""
    if server.process.poll() is not None:
        return None
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    try:
        server.process.wait(SHUTDOWN_SECONDS + 5 * MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    return time.monotonic() - start


def render(results: list[Result]) -> Table:
    table = Table("attack", "what happened", "probe during", "after", "SIGTERM", "", title="attacks", show_lines=True)
    for each in results:
        happened = "; ".join([*each.notes.said, *each.notes.wrong, each.skipped]).removesuffix("; ")
        ending = "-" if each.skipped else "does not end" if each.ending is None else f"{each.ending:.1f} s"
        after = each.describe([each.after] if each.after is not None else [])
        table.add_row(each.attack.title, happened, each.describe(each.during), after, ending, each.verdict)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(ATTACKS), action="append", help="this attack alone; repeatable")
    parser.add_argument("--hold-seconds", type=float, default=HOLD_SECONDS, metavar="SECONDS", help="of each attack")
    args = parser.parse_args()
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    results = []
    for name in args.only or ATTACKS:
        with console.status(ATTACKS[name].title):
            results.append(run_attack(ATTACKS[name], args.hold_seconds))
        console.print(f"{ATTACKS[name].title}: {results[-1].verdict}")
    console.print(render(results))
    return 0 if all(each.is_good for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
