"""Benchmark of several nodes: rank 0's host time per step by the number of nodes that are told of it.

The loop is that of `bench_host.py`, on a device that does nothing. The other nodes are processes of this machine that
read and answer each step as a follower does, and run nothing; they leave rank 0 a processor of its own. Time is CPU of
the engine's thread: others send, and read what the nodes answer.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from instrument import make_parser, read_run
from rich.progress import track

from jaxserve.features.multinode.group import FollowerGroup, LeaderGroup
from jaxserve.parallel_options import NodeOptions

if TYPE_CHECKING:
    from bench_host import Tee

TOKEN = "of this bench"
AIM, AIM_EACH = 40.0, 5.0  # microseconds a step, and for each other node


class _NullRunner:
    """A runner whose steps are done at once."""

    def start(self, plan: Any) -> Any:
        done = SimpleNamespace(wait=lambda: None)
        return SimpleNamespace(sample=lambda mask: done)

    def reset(self) -> None:
        """Has no state."""

    warm_thread = reset


def follow(options: NodeOptions, processors: set[int]) -> None:
    """Answers rank 0 until it stops; runs in a process of its own."""
    import queue

    os.sched_setaffinity(0, processors)
    from jaxserve.features.multinode.follower import Follower

    group = FollowerGroup.join(options, TOKEN, on_loss=lambda error: None)
    unused: Any = None
    runner: Any = _NullRunner()
    follower = Follower(
        group, runner, num_mask_words=1, open_update=unused, digest_params=unused, additions=queue.SimpleQueue()
    )
    follower.run()


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def open_group(count: int, processors: set[int]) -> Iterator[LeaderGroup]:
    """Yields rank 0's group with some followers, each a process that runs on `processors`."""
    port = find_port()
    options = [
        NodeOptions(nnodes=count + 1, node_rank=rank, master_addr="127.0.0.1", master_port=port, init_timeout=30)
        for rank in range(count + 1)
    ]
    spawn = multiprocessing.get_context("spawn").Process
    processes = [spawn(target=follow, args=(each, processors), daemon=True) for each in options[1:]]
    for process in processes:
        process.start()
    group = LeaderGroup.open(options[0], TOKEN, on_loss=lambda error: None)
    try:
        yield group
    finally:
        group.stop(lambda: None)
        for process in processes:
            process.join(10)


def tell_followers(group: LeaderGroup) -> Tee:
    """Returns a `Tee` that sends every call to the followers."""
    from jaxserve.core.runtime.tee import TeeRunner
    from jaxserve.features.multinode.leader import Followers

    def tee(runner: Any) -> Any:
        followers = Followers(group)
        return TeeRunner(runner, followers), [(followers, "start"), (followers, "sample")]

    return tee


def measure_with(count: int, rows: int, steps: int, processors: set[int]) -> dict[str, float]:
    """Returns microseconds of the engine's thread per step, by part, with some followers on `processors`."""
    from bench_host import _Characters, measure

    if count == 0:
        return measure(rows, steps, _Characters())
    with open_group(count, processors) as group:
        return measure(rows, steps, _Characters(), tee=tell_followers(group))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=64, help="rows that decode (default: 64)")
    parser.add_argument("--followers", type=int, nargs="+", default=[0, 1, 3, 7], help="other nodes (default: 0 1 3 7)")
    parser.add_argument("--steps", type=int, default=1000, help="steps measured for each (default: 1000)")
    run = read_run(parser, {"rows": 4, "followers": [0, 1], "steps": 20})
    args = run.args
    first, *others = sorted(os.sched_getaffinity(0))  # rank 0 has a processor of its own if there are two
    os.sched_setaffinity(0, {first})
    figures, lines = [], []
    for count in track(args.followers, "Measuring", transient=True):
        parts = measure_with(count, args.rows, args.steps, set(others or [first]))
        loop, aim = sum(parts.values()) - parts["detokenize"], AIM + AIM_EACH * count
        figures.append(
            {"followers": count, "rows": args.rows, "loop_us": loop, "tell_us": parts["tell"], "aim_us": aim}
        )
        more = loop - figures[0]["loop_us"]
        shown = (f"{more:.0f}", f"{parts['tell']:.0f}", f"{aim:.0f}", f"{more / aim:.2f}") if count else ("",) * 4
        lines.append((str(count), f"{loop:.0f}", *shown))
    os.sched_setaffinity(0, {first, *others})  # the report tells of all
    title = f"Rank 0's host time per step at {args.rows} rows, microseconds (median of {args.steps} steps)"
    header = "other nodes", "loop", "more than alone", "of it telling them", "aim", "more / aim"
    run.show(title, header, lines, left=())
    run.save({"points": figures})


if __name__ == "__main__":
    main()
