"""Benchmark of HTTP: CPU per streamed chunk, latencies, and time compared with `LLM.generate`.

The server runs in a process of its own on a device that takes a fixed time for each step and computes nothing
(`bench_server_null.py`); tokenizer, scheduler, detokenizing, application and HTTP are real. The client is this process,
the load generator of `jaxserve bench serve`. Three things are measured:

1. The server's CPU microseconds per chunk for each number of streams: of the whole process, less its idle CPU time, and
   of its event loop alone (the rest is mostly the engine's thread, which works without HTTP as well).
2. Seconds to the first event when all streams begin at once, and between two events of one stream.
3. The serving tax: the seconds of the same requests over HTTP and through `LLM.generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop
from bench_server_process import PROGRAM, ServerProcess, read_busy, run_server
from rich.console import Console
from rich.table import Table

from jaxserve.tools.bench.environment import count_cores
from jaxserve.tools.bench.load.client import Client
from jaxserve.tools.bench.load.records import RequestRecord
from jaxserve.tools.bench.load.target import ENDPOINTS, Target

CONTEXT = 1900  # tokens that an answer of the demo model can have
SETTLE_SECONDS, IDLE_SECONDS = 1.0, 2.0
BEGIN_SECONDS = 120.0  # in which all streams have to begin
FIRST_SAMPLES = 64  # least number of measured times to the first event
AIM_US, AIM_TAX = 20, 0.05
QUANTILES = (0.5, 0.9, 0.99)
PROFILE_LINES = 25
PROFILED = {"MainThread": "event loop", "jaxserve-engine": "engine's thread"}


def make_prompt(index: int) -> str:
    """Returns a prompt of some dozens of tokens that shares no page with other prompts."""
    return f"{index}: Tell me a story about a cat, a dog and {index % 97} birds that live in the same old house."


class Streams:
    """Greedy answers that begin together, each on a connection of its own."""

    def __init__(self, port: int, prompts: Sequence[str], max_tokens: int, *, is_chat: bool = True) -> None:
        target = Target("127.0.0.1", port, ENDPOINTS["openai-chat" if is_chat else "openai"])
        common = {"max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
        self.records = [RequestRecord() for _ in prompts]
        self._client = Client(target, clock=time.perf_counter)
        self._requests = []
        for prompt in prompts:
            body = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
            self._requests.append(target.encode(body | common))
        self._tasks: list[asyncio.Future[None]] = []

    async def begin(self) -> None:
        """Sends all requests and waits for the first chunk of each."""
        pairs = zip(self._requests, self.records, strict=True)
        self._tasks = [asyncio.ensure_future(self._client.send(*pair)) for pair in pairs]
        deadline = time.perf_counter() + BEGIN_SECONDS
        while not all(record.chunk_times for record in self.records):
            self._check()
            if time.perf_counter() > deadline:
                raise RuntimeError(f"not all streams have begun after {BEGIN_SECONDS:g} s")
            await asyncio.sleep(0.005)

    async def finish(self) -> None:
        """Waits until every answer has ended; RuntimeError when one was refused or cut short."""
        await asyncio.wait_for(asyncio.gather(*self._tasks), 600)
        self._check()
        self._client.close()

    async def close(self) -> None:
        """Aborts all streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._client.close()

    @property
    def num_ended(self) -> int:
        """Streams that have ended."""
        return sum(task.done() for task in self._tasks)

    def first_times(self) -> list[float]:
        """Returns the seconds from each request to its first chunk."""
        return [record.ttft for record in self.records]

    def read_window(self, start: float, end: float) -> tuple[int, list[float]]:
        """Returns the chunks between two times, and the seconds between those of one stream."""
        gaps: list[float] = []
        count = 0
        for record in self.records:
            times = [each for each in record.chunk_times if start <= each < end]
            count += len(times)
            gaps += [after - before for before, after in pairwise(times)]
        return count, gaps

    def _check(self) -> None:
        failed = next((record.error for record in self.records if record.error is not None), None)
        if failed is not None:
            raise RuntimeError(f"a stream was refused or cut short: {failed}")


async def measure_idle(server: ServerProcess) -> float:
    """Returns the CPU seconds per second without requests."""
    await asyncio.sleep(1.0)
    before, start = server.read_cpu(), time.perf_counter()
    await asyncio.sleep(IDLE_SECONDS)
    return (server.read_cpu().process - before.process) / (time.perf_counter() - start)


async def measure_first(server: ServerProcess, streams: int, samples: int) -> list[float]:
    """Returns the seconds to first events in waves of streams, one wave after the other."""
    found: list[float] = []
    while len(found) < samples:
        wave = Streams(server.port, [make_prompt(len(found) + at) for at in range(streams)], 2)
        await wave.begin()
        await wave.finish()
        found += wave.first_times()
    return found


async def measure_streams(server: ServerProcess, streams: int, seconds: float, idle: float) -> dict[str, Any]:
    """Returns the figures of a window in which all streams run and none begins or ends."""
    wave = Streams(server.port, [make_prompt(at) for at in range(streams)], CONTEXT)
    await wave.begin()
    await asyncio.sleep(SETTLE_SECONDS)
    tokens_before, tokens_start = await asyncio.to_thread(server.read_generated), time.perf_counter()
    if server.profile is not None:
        server.toggle_profile()
    before, client, busy, start = server.read_cpu(), time.process_time(), read_busy(), time.perf_counter()
    await asyncio.sleep(seconds)
    after, client, taken = server.read_cpu(), time.process_time() - client, time.perf_counter() - start
    busy = read_busy() - busy
    if server.profile is not None:
        server.toggle_profile()
    tokens = await asyncio.to_thread(server.read_generated) - tokens_before
    tokens_rate = tokens / (time.perf_counter() - tokens_start)
    num_ended = wave.num_ended
    await wave.close()
    used, (chunks, gaps) = after.process - before.process - idle * taken, wave.read_window(start, start + taken)
    loop = after.event_loop - before.event_loop
    found = {
        "streams": streams,
        "ended": num_ended,
        "chunks": chunks,
        "chunks_per_second": chunks / taken,
        "tokens_per_second": tokens_rate,
        "cpu_us_per_chunk": 1e6 * used / chunks,
        "kernel_us_per_chunk": 1e6 * (after.kernel - before.kernel) / chunks,
        "event_loop_us_per_chunk": 1e6 * loop / chunks,
        "other_threads_us_per_chunk": 1e6 * (used - loop) / chunks,
        "server_cores": (after.process - before.process) / taken,
        "client_cores": client / taken,
        "other_cores": (busy - client - after.process + before.process) / taken,
        "ttft": wave.first_times(),
        "itl": find_quantiles(gaps),
    }
    if server.profile is not None:
        found["profile"] = await asyncio.to_thread(server.read_profile)
    return found


def find_quantiles(values: Any) -> list[float]:
    """Returns the 50th, 90th and 99th percentile."""
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in QUANTILES]


async def measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns one line for each number of streams, all from one server."""
    found = []
    with run_server(max(args.streams), args.ms, profile=args.profile) as server:
        await measure_first(server, 1, 4)
        idle = await measure_idle(server)
        for streams in args.streams:
            samples = 0 if streams >= FIRST_SAMPLES else min(FIRST_SAMPLES, args.max_first)
            ttft = await measure_first(server, streams, samples)
            line = await measure_streams(server, streams, args.seconds, idle)
            line["ttft"], line["idle_cores"] = find_quantiles(ttft or line["ttft"]), idle
            found.append(line)
            await asyncio.sleep(SETTLE_SECONDS)
    return found


async def measure_tax(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the median seconds of the same requests over HTTP and through `LLM.generate`."""
    streams, tokens = args.tax_streams, args.tax_tokens
    command = [sys.executable, str(PROGRAM), "generate", "--rows", str(streams), "--ms", str(args.ms)]
    command += ["--tokens", str(tokens), "--repeats", str(args.repeats)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    alone = json.loads(done.stdout.splitlines()[-1])
    over_http = []
    with run_server(streams, args.ms) as server:
        await measure_first(server, 1, 4)
        for _ in range(args.repeats):
            prompts = [make_prompt(at) for at in range(streams)]
            wave, start = Streams(server.port, prompts, tokens, is_chat=False), time.perf_counter()
            cpu = server.read_cpu().process
            await wave.begin()
            await wave.finish()
            taken = time.perf_counter() - start
            over_http.append({"seconds": taken, "cpu_seconds": server.read_cpu().process - cpu})
            await asyncio.sleep(SETTLE_SECONDS)
    total = streams * tokens
    inside, outside = (statistics.median(each["seconds"] for each in runs) for runs in (alone, over_http))
    cpu_inside, cpu_outside = (statistics.median(each["cpu_seconds"] for each in runs) for runs in (alone, over_http))
    return {
        "streams": streams,
        "tokens": tokens,
        "generate_tokens_per_second": total / inside,
        "http_tokens_per_second": total / outside,
        "generate_cpu_us_per_token": 1e6 * cpu_inside / total,
        "http_cpu_us_per_token": 1e6 * cpu_outside / total,
        "tax": 1 - inside / outside,
        "runs": {"generate": alone, "http": over_http},
    }


def show_streams(lines: list[dict[str, Any]], args: argparse.Namespace, console: Console) -> None:
    """Prints what streams cost and how long their events take."""
    table = Table(
        title=f"Server CPU per streamed chunk, microseconds; steps of {args.ms:g} ms, {args.seconds:g} s each"
    )
    rates = ("chunks_per_second", "tokens_per_second")
    costs = [f"{name}_us_per_chunk" for name in ("cpu", "kernel", "event_loop", "other_threads")]
    cores = [f"{name}_cores" for name in ("server", "client", "other")]
    for column in ("streams", "chunks/s", "tokens/s", "process", "in the kernel", "event loop", "other threads"):
        table.add_column(column, justify="right")
    for column in ("server cores", "client's", "others'"):
        table.add_column(column, justify="right")
    for line in lines:
        cells = [f"{line[name]:,.0f}" for name in rates] + [f"{line[name]:.1f}" for name in costs]
        table.add_row(str(line["streams"]), *cells, *(f"{line[name]:.2f}" for name in cores))
    console.print(table)
    console.print(f"Aim: {AIM_US} us of the process; {lines[0]['idle_cores']:.1%} of a core when idle is subtracted.")
    for line in lines:
        if line["ended"]:
            text = "streams had ended before all were measured: the server did not begin them together"
            console.print(f"[red]{line['ended']} of {line['streams']} {text}[/]")
    table = Table(title="Milliseconds to the first event (all streams begin at once), and between two events")
    for column in ("streams", *(f"{name} p{100 * q:g}" for name in ("TTFT", "ITL") for q in QUANTILES)):
        table.add_column(column, justify="right")
    for line in lines:
        table.add_row(str(line["streams"]), *(f"{1e3 * value:.1f}" for value in (*line["ttft"], *line["itl"])))
    console.print(table)


def show_tax(tax: dict[str, Any], args: argparse.Namespace, console: Console) -> None:
    """Prints the serving tax."""
    title = f"Serving tax: {tax['streams']} requests of {tax['tokens']} tokens, steps of {args.ms:g} ms"
    table = Table(title=f"{title}, median of {args.repeats}")
    for column in ("", "tokens/s", "CPU us per token"):
        table.add_column(column, justify="right")
    for name, text in (("generate", "LLM.generate"), ("http", "over HTTP")):
        rate, cpu = tax[f"{name}_tokens_per_second"], tax[f"{name}_cpu_us_per_token"]
        table.add_row(text, f"{rate:,.0f}", f"{cpu:.1f}")
    table.add_row("tax", f"{tax['tax']:.1%}", "")
    console.print(table)
    console.print(f"Aim: at most {AIM_TAX:.0%}.")


def show_profile(line: dict[str, Any], console: Console) -> None:
    """Prints where the threads spend their time."""
    for thread, text in PROFILED.items():
        found = line["profile"][thread]
        for kind, what in (("own", "functions themselves"), ("with_callees", "functions with what they call")):
            table = Table(title=f"{line['streams']} streams, {text}: microseconds per chunk of {what}")
            table.add_column("us", justify="right")
            table.add_column("share", justify="right")
            table.add_column("function", overflow="fold")
            top = sorted(found[kind].items(), key=lambda item: -item[1])[:PROFILE_LINES]
            for name, seconds in top:
                table.add_row(f"{1e6 * seconds / line['chunks']:.2f}", f"{seconds / found['seconds']:.1%}", name)
            console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--ms", type=float, default=20, help="what a step takes the device (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=8, help="of each window (default: %(default)s)")
    parser.add_argument("--tax-streams", type=int, default=256, help="0: leave out the serving tax")
    parser.add_argument("--tax-tokens", type=int, default=256, help="of each answer (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of the serving tax (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="show where the server's time goes; slows it a bit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--dry-run", action="store_true", help="few streams and short windows, to test the script")
    args = parser.parse_args()
    args.max_first = FIRST_SAMPLES
    if args.dry_run:
        args.streams, args.seconds, args.max_first = [1, 8], 1.0, 4
        args.tax_streams, args.tax_tokens, args.repeats = 8, 32, 1
    if args.seconds + 2 * SETTLE_SECONDS > CONTEXT * args.ms / 1e3:
        parser.error(f"--seconds: no answer is longer than {CONTEXT} tokens, {CONTEXT * args.ms / 1e3:g} s")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    console = Console()
    lines = uvloop.run(measure_all(args))
    show_streams(lines, args, console)
    tax = uvloop.run(measure_tax(args)) if args.tax_streams else None
    if tax is not None:
        show_tax(tax, args, console)
    console.print(f"Server and client share the {count_cores()} cores of this machine.")
    if args.profile:
        for line in lines:
            show_profile(line, console)
    if args.json:
        args.json.write_text(json.dumps({"streams": lines, "tax": tax}, indent=1) + "\n")


if __name__ == "__main__":
    main()
