"""Minutes or hours of everything that users do to a server, and a check that it is the same afterwards.

A server with the demo model runs in a process of its own; users ask, leave, pause and send malformed requests. The load
stops three times, after a warm-up, in the middle and at the end, to sample the idle server: its memory, files, threads
and gauges. The exit status is 0 if nothing grew and nothing failed.

    python scripts/soak_server.py --minutes 10 --json soak.json
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from soak_load import Load

FLAGS = (
    *("--port", "0", "--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-model-len", "1024"),
    *("--slow-reader-timeout", "2", "--keep-alive-timeout", "1", "--no-access-log", "--status-interval", "0"),
    *("--max-num-queued-reqs", "1024"),  # a user may have several sequences, and none may be refused
)
GAUGES = ("num_requests_running", "num_requests_waiting", "num_queued_tokens", "kv_cache_usage_perc")
MAX_GROWTH_MB, MAX_FDS, MAX_THREADS = 100.0, 5, 4  # between the middle and the end; pools start threads when needed
WARM_UP_SHARE, MAX_WARM_UP = 0.15, 60.0
SAMPLE_SECONDS = 1.0
CLOSING_SECONDS = 2.0  # wait for idle connections to close
START_SECONDS, IDLE_SECONDS = 300.0, 30.0
LOG_LINES, SHOWN_FAILURES = 40, 10
MIN_WIDTH = 110  # columns of a line if the terminal's width is unknown


@dataclass(frozen=True)
class Sample:
    """One sample of the server."""

    seconds: float  # since the load began
    memory_mb: float  # private to it and its children, swapped or not
    fds: int
    threads: int
    compiles: int
    gauges: dict[str, float]


@dataclass
class Server:
    """The process under test."""

    process: subprocess.Popen[str]
    url: str = ""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    num_tracebacks: int = 0
    slow_callbacks: list[str] = field(default_factory=list)  # lines of `clocked_server.py`

    def listen(self) -> None:
        """Reads the server's log until the server ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.last_lines.append(line.rstrip())
            self.num_tracebacks += line.startswith("Traceback")
            if line.startswith("slow callback:"):
                self.slow_callbacks.append(line.partition(":")[2].strip())
            if not self.url and (found := re.search(r"listening on (http://\S+)", line)):
                self.url = found[1]

    def look(self, since: float) -> Sample:
        """Returns a sample of the server's resources now."""
        own = self.process.pid
        metrics = read_metrics(httpx.get(f"{self.url}/metrics", timeout=60).text)
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        memory = sum(read_status(pid, "RssAnon") + read_status(pid, "VmSwap") for pid in (str(own), *children))
        return Sample(
            time.monotonic() - since,
            memory / 1024,
            len(list(Path(f"/proc/{own}/fd").iterdir())),
            read_status(str(own), "Threads"),
            int(metrics["compiles_total"]),
            {name: metrics[name] for name in GAUGES},
        )


def read_status(pid: str, name: str) -> int:
    """Returns a number of /proc/PID/status; 0 when the process has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(text.partition(f"{name}:")[2].split()[0])


def read_metrics(text: str) -> dict[str, float]:
    """Returns the sum of each of the server's own metrics over its labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := re.match(r"jaxserve:(\w+)\{.*\} (\S+)$", line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def start_server(
    flags: Sequence[str] = FLAGS, prefix: Sequence[str] = (), program: Sequence[str] = ("-m", "jaxserve")
) -> Server:
    """Starts the server and waits until it is ready.

    Args:
        prefix: a command that runs the server's command.
        program: what Python runs; it takes the arguments of `jaxserve`.
    """
    command = [*prefix, sys.executable, *program, "serve", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    server = Server(process)
    threading.Thread(target=server.listen, daemon=True).start()
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if server.url and httpx.get(f"{server.url}/health/ready").status_code == 200:
                return server
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    process.kill()
    raise SystemExit("the server did not start:\n" + "\n".join(server.last_lines))


async def wait_until_idle(server: Server, since: float) -> Sample:
    """Waits until nothing runs, and a little longer for connections to close; returns a sample of what is left."""
    deadline = time.monotonic() + IDLE_SECONDS
    while any(server.look(since).gauges.values()) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    await asyncio.sleep(CLOSING_SECONDS)
    return server.look(since)


class Soak:
    """One run: its phases, its samples and its output."""

    def __init__(self, server: Server, load: Load, console: Console) -> None:
        self._server, self._load, self._console = server, load, console
        self._start = time.monotonic()
        self.samples: list[Sample] = []
        self.idle: list[Sample] = []  # at the beginning, in the middle, at the end

    async def run(self, minutes: float, num_users: int, interval: float) -> None:
        """Runs the load in three parts, and samples the idle server after each."""
        seconds = minutes * 60
        warm_up = min(MAX_WARM_UP, WARM_UP_SHARE * seconds)
        columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self._console, transient=True) as progress:
            bar = progress.add_task("warming up", total=seconds)
            await self._load.learn_texts()
            watching = asyncio.ensure_future(self._watch(interval, lambda done: progress.update(bar, completed=done)))
            for name, part in (("warming up", warm_up), *[(f"half {n}", (seconds - warm_up) / 2) for n in (1, 2)]):
                progress.update(bar, description=name)
                await self._load.run(num_users, part)
                self.idle.append(await wait_until_idle(self._server, self._start))
            watching.cancel()
            await asyncio.wait([watching])
            if not watching.cancelled():
                watching.result()  # raises its error

    async def _watch(self, interval: float, show: Any) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            sample = await asyncio.to_thread(self._server.look, self._start)
            self.samples.append(sample)
            show(sample.seconds)
            if time.monotonic() - last >= interval:
                last = time.monotonic()
                self._console.print(self._render(sample))  # tables of one row with aligned columns

    def _render(self, sample: Sample) -> Table:
        tallies = self._load.tallies.values()
        latencies = sorted(seconds for tally in tallies for seconds in tally.seconds)
        values = {
            "minutes": f"{sample.seconds / 60:.1f}",
            "answers": len(latencies),
            "left": sum(tally.num_left for tally in tallies),
            "failures": sum(len(tally.failures) for tally in tallies),
            "p50 ms": f"{find_quantile(latencies, 0.5) * 1e3:.0f}",
            "p99 ms": f"{find_quantile(latencies, 0.99) * 1e3:.0f}",
            "MB": f"{sample.memory_mb:.0f}",
            "open": sample.fds,
            "threads": sample.threads,
            "running": int(sample.gauges["num_requests_running"]),
            "waiting": int(sample.gauges["num_requests_waiting"]),
            "compiles": sample.compiles,
        }
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        for name in values:
            table.add_column(name, width=8)
        table.add_row(*map(str, values.values()))
        return table


def find_quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def judge(soak: Soak, load: Load, server: Server, status: int) -> list[tuple[str, str, bool]]:
    """Returns (what was checked, what was found, whether it is right)."""
    _, middle, end = soak.idle
    failures = [failure for tally in load.tallies.values() for failure in tally.failures]
    growth, more_fds = end.memory_mb - middle.memory_mb, end.fds - middle.fds
    untried = [kind for kind, tally in load.tallies.items() if not tally.seconds and not tally.num_left]
    return [
        ("memory from the middle to the end", f"{growth:+.1f} MB of {end.memory_mb:.0f}", growth < MAX_GROWTH_MB),
        ("open files", f"{more_fds:+d} of {end.fds}", abs(more_fds) <= MAX_FDS),
        ("threads", f"{middle.threads} and {end.threads}", end.threads - middle.threads <= MAX_THREADS),
        ("gauges", ", ".join(f"{value:g}" for value in end.gauges.values()), not any(end.gauges.values())),
        ("compilations after ready", str(end.compiles), end.compiles == 0),
        ("answers that were not as expected", str(len(failures)), not failures),
        ("kinds of requests that never came to an end", ", ".join(untried) or "none", not untried),
        ("tracebacks in the log", str(server.num_tracebacks), not server.num_tracebacks),
        ("exit status after SIGTERM", str(status), status == 0),
    ]


def print_kinds(console: Console, load: Load) -> None:
    table = Table("kind", "answers", "left", "failures", "p50 ms", "p99 ms", title="by kind of request")
    for kind, tally in load.tallies.items():
        ordered = sorted(tally.seconds)
        quantiles = [f"{find_quantile(ordered, share) * 1e3:.0f}" if ordered else "" for share in (0.5, 0.99)]
        table.add_row(kind, str(len(ordered)), str(tally.num_left), str(len(tally.failures)), *quantiles)
    console.print(table)


async def run(server: Server, args: argparse.Namespace, console: Console) -> tuple[Soak, Load]:
    load = Load(server.url, args.seed)
    soak = Soak(server, load, console)
    try:
        await soak.run(args.minutes, args.users, args.interval)
    finally:
        await load.close()
    return soak, load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--interval", type=float, default=30.0, help="seconds between two lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all findings as JSON")
    args = parser.parse_args()
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    server = start_server()
    console.print(f"serving on {server.url}, process {server.process.pid}")
    try:
        soak, load = asyncio.run(run(server, args, console))
        server.process.send_signal(signal.SIGTERM)
        status = server.process.wait(60)
    finally:
        server.process.kill()
    print_kinds(console, load)
    verdict = judge(soak, load, server, status)
    table = Table("after the soak", "found", "", title="verdict")
    for name, found, is_right in verdict:
        table.add_row(name, found, "[green]ok[/]" if is_right else "[red]NOT OK[/]")
    console.print(table)
    if not (is_good := all(is_right for _, _, is_right in verdict)):
        failures = [f"{kind}: {text}" for kind, tally in load.tallies.items() for text in tally.failures]
        console.print("\n".join([*failures[:SHOWN_FAILURES], *server.last_lines]), markup=False, soft_wrap=True)
    if args.json is not None:
        document = {
            "minutes": args.minutes,
            "users": args.users,
            "ok": is_good,
            "verdict": [{"name": name, "found": found, "ok": is_right} for name, found, is_right in verdict],
            "kinds": {kind: dataclasses.asdict(tally) for kind, tally in load.tallies.items()},
            "idle": [dataclasses.asdict(sample) for sample in soak.idle],
            "samples": [dataclasses.asdict(sample) for sample in soak.samples],
        }
        args.json.write_text(json.dumps(document) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
