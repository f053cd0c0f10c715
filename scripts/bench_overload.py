"""Goodput under overload: a server with its defaults, and twice as many requests as it can serve.

The capacity is measured first: answers per second when enough clients always wait for one. Then requests arrive at
random, independently of each other (Poisson), at a multiple of the capacity. An answer is good if its first event comes
within the SLO. Requests should be refused (429) at once, so that the others are good: goodput stays at the capacity.

Server and client share this machine's cores, so compare capacity and goodput within one run only. On a CPU the model
shares them too, and refusals slow the answers down. `--null-ms` replaces it by a device that takes that long for each
step and no core, as an accelerator does.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import uvloop
from bench_server_load import PROGRAM, Stream, count_cores, make_completion_request, run_command
from rich.console import Console
from rich.table import Table

DEFAULT_ROWS = 32  # the server's default on a CPU
SLO_SECONDS = 1.0  # to the first event
AIM_GOODPUT, AIM_REFUSAL = 0.9, 0.010  # share of the capacity; seconds
PROMPTS = ("What is continuous batching?", "Once upon a time there was", "What is 123 + 45?", "name: Ada, age: 36")


@dataclass
class Load:
    """The requests of one measurement, in place of the `Wave` of their streams."""

    port: int
    tokens: int
    records: bool = False  # gaps between events are not needed here
    ended: list[tuple[float, Stream]] = field(default_factory=list)  # with the time of their end
    at_end: Callable[[], None] = lambda: None
    num_begun: int = 0

    async def begin(self) -> None:
        """Sends one request on a connection of its own."""
        self.num_begun += 1
        prompt = f"{self.num_begun}: {PROMPTS[self.num_begun % len(PROMPTS)]}"
        stream = Stream(self, make_completion_request(0, self.tokens, prompt))  # type: ignore[arg-type]
        await asyncio.get_running_loop().create_connection(lambda: stream, "127.0.0.1", self.port)

    async def drain(self) -> None:
        """Waits until all requests have ended."""
        while len(self.ended) < self.num_begun:
            await asyncio.sleep(0.05)

    def note_first(self) -> None:
        """Does nothing: nothing waits for first events."""

    def note_end(self, stream: Stream) -> None:
        self.ended.append((time.perf_counter(), stream))
        self.at_end()


async def measure_capacity(port: int, tokens: int, clients: int, seconds: float) -> float:
    """Returns whole answers per second while `clients` clients always wait for one."""
    load, running = Load(port, tokens), set()

    def begin() -> None:
        task = asyncio.ensure_future(load.begin())
        running.add(task)
        task.add_done_callback(running.discard)

    load.at_end = begin
    for _ in range(clients):
        begin()
    await asyncio.sleep(seconds / 4)  # the first rows all begin and end together
    before, start = len(load.ended), time.perf_counter()
    await asyncio.sleep(seconds)
    counted = load.ended[before:]
    rate = sum(stream.is_whole for _, stream in counted) / (time.perf_counter() - start)
    load.at_end = lambda: None
    await load.drain()
    return rate


async def measure_arrivals(port: int, tokens: int, rate: float, seconds: float, seed: int) -> Load:
    """Returns the ended requests of a load that arrive at random, `rate` a second on average."""
    load, rng, tasks = Load(port, tokens), random.Random(seed), []
    start, at = time.perf_counter(), 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        tasks.append(asyncio.ensure_future(load.begin()))
    await asyncio.gather(*tasks)
    await load.drain()
    return load


def show(load: Load, capacity: float, seconds: float, factor: float, console: Console) -> bool:
    """Prints the outcome of the requests; returns whether both aims are met."""
    whole = [stream for _, stream in load.ended if stream.is_whole]
    first = sorted(stream.first - stream.start for stream in whole)
    good = sum(wait < SLO_SECONDS for wait in first)
    refused = [end - stream.start for end, stream in load.ended if b" 429 " in stream.head[:16]]
    table = Table(title=f"Arrivals at {factor:g} times the capacity of {capacity:.1f} answers/s, {seconds:g} s")
    for column in ("sent", "good", "late", "refused", "failed", "goodput", "TTFT p50", "p99", "refused in"):
        table.add_column(column, justify="right")
    goodput = good / seconds / capacity
    waits = [f"{first[int(share * (len(first) - 1))]:.2f} s" if first else "-" for share in (0.5, 0.99)]
    refusal = statistics.median(refused) if refused else 0.0
    counts = (load.num_begun, good, len(whole) - good, len(refused), load.num_begun - len(whole) - len(refused))
    table.add_row(*map(str, counts), f"{goodput:.0%}", *waits, f"{1e3 * refusal:.1f} ms" if refused else "-")
    console.print(table)
    console.print(
        f"Good: the first event within {SLO_SECONDS:g} s. Aims: goodput at least {AIM_GOODPUT:g} of the capacity, "
        f"refusals within {1e3 * AIM_REFUSAL:.0f} ms (median). Server and client share {count_cores()} cores."
    )
    return goodput >= AIM_GOODPUT and refusal <= AIM_REFUSAL and counts[-1] == 0


async def measure(args: argparse.Namespace, console: Console) -> bool:
    command = [sys.executable, "-m", "jaxserve", "serve", args.model, "--port", "0", "--no-access-log", *args.option]
    if args.null_ms is not None:
        command = [sys.executable, str(PROGRAM), "serve", "--rows", str(DEFAULT_ROWS), "--ms", str(args.null_ms)]
    with run_command(command) as server:
        capacity = await measure_capacity(server.port, args.tokens, args.clients, args.seconds / 2)
        load = await measure_arrivals(server.port, args.tokens, args.factor * capacity, args.seconds, args.seed)
        return show(load, capacity, args.seconds, args.factor, console)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="what is served (default: %(default)s)")
    parser.add_argument("--null-ms", type=float, help="what a step takes a device that computes nothing; no model then")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=48, help="that measure the capacity (default: %(default)s)")
    parser.add_argument("--factor", type=float, default=2.0, help="arrivals over capacity (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--option", action="append", default=[], help="a flag of the server, as --option=--name=value")
    args = parser.parse_args()
    if args.null_ms is not None and args.option:
        parser.error("--option is for a server with a model, and --null-ms has none")
    return 0 if uvloop.run(measure(args, Console())) else 1


if __name__ == "__main__":
    sys.exit(main())
