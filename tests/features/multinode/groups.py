"""Groups of nodes over real sockets, as threads."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from jaxserve.errors import ClusterError
from jaxserve.features.multinode.group import FollowerGroup, LeaderGroup
from jaxserve.features.multinode.wire import Link
from jaxserve.parallel_options import NodeOptions
from tests.nodes.nodes import find_ports

TOKEN = "secret"
Losses = queue.SimpleQueue[tuple[int, ClusterError]]


def find_port() -> int:
    """Returns a free port whose next one is free, too: JAX's coordinator takes it."""
    return find_ports(2)[0]


def make_options(rank: int, size: int, port: int, **options: Any) -> NodeOptions:
    given = {"init_timeout": 10.0, "step_timeout": 10.0} | options
    return NodeOptions(nnodes=size, node_rank=rank, master_addr="127.0.0.1", master_port=port, **given)


def end(group: LeaderGroup | FollowerGroup) -> None:
    group.fail("the test has ended")


@contextmanager
def join(size: int, **options: Any) -> Iterator[tuple[LeaderGroup, list[FollowerGroup], Losses]]:
    """Yields a whole group, and the losses that its members are told of, with their ranks."""
    port, losses = find_port(), Losses()
    with ThreadPoolExecutor(size) as pool:
        leading = pool.submit(
            LeaderGroup.open,
            make_options(0, size, port, **options),
            TOKEN,
            on_loss=lambda error: losses.put((0, error)),
        )
        following = [
            pool.submit(
                FollowerGroup.join,
                make_options(rank, size, port, **options),
                TOKEN,
                on_loss=lambda error, rank=rank: losses.put((rank, error)),
            )
            for rank in range(1, size)
        ]
        leader, followers = leading.result(20), [each.result(20) for each in following]
    try:
        yield leader, followers, losses
    finally:
        for group in (leader, *followers):
            end(group)


def connect(port: int, source: str = "127.0.0.1") -> Link:
    """Connects, from an address of this machine, to a port that is about to be listened on."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return Link(socket.create_connection(("127.0.0.1", port), 10, (source, 0)))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
