"""Nodes over real sockets, as threads: what they agree on, and how a loss is noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from jaxserve.errors import ClusterError
from jaxserve.features.multinode import group as multihost_group
from jaxserve.features.multinode.group import FollowerGroup, LeaderGroup
from jaxserve.features.multinode.wire import greet_leader
from tests.features.multinode.groups import TOKEN, Losses, connect, find_port, join, make_options


def on_all(leader: LeaderGroup, followers: list[FollowerGroup], call: Callable[[Any], Any]) -> list[Any]:
    """Calls a function with each group at once; returns results and errors in the order of ranks."""
    groups = [leader, *followers]
    with ThreadPoolExecutor(len(groups)) as pool:
        jobs: list[Future[Any]] = [pool.submit(call, group) for group in groups]
        return [job.exception(20) or job.result() for job in jobs]


def test_nodes_agree() -> None:
    with join(3) as (leader, followers, losses):
        assert (
            on_all(leader, followers, lambda group: group.share({"a": [1]} if group.rank == 0 else None))
            == [{"a": [1]}] * 3
        )
        assert on_all(leader, followers, lambda group: group.take_least("pages", 100 - group.rank)) == [98] * 3
        facts = {"jax": "0.12", "model": {"sizes": (1, 2)}}
        assert on_all(leader, followers, lambda group: group.require_equal(facts)) == [None] * 3
        assert losses.empty()


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (lambda rank: {"model": {"layers": 3 if rank == 2 else 2}}, "model.layers: is 2 at rank 0 and 3 at rank 2"),
        (
            lambda rank: {"jax": "1"} if rank == 0 else {"jax": "1", "extra": 1},
            "extra: is null at rank 0 and 1 at rank 1",
        ),
        (lambda rank: {"jax": "1"} if rank else {"jax": "1", "extra": 1}, "extra: is 1 at rank 0 and null at rank 1"),
    ],
)
def test_what_differs_is_named_on_every_host(facts: Callable[[int], dict[str, Any]], text: str) -> None:
    with join(3) as (leader, followers, _):
        for error in on_all(leader, followers, lambda group: group.require_equal(facts(group.rank))):
            assert isinstance(error, ClusterError) and str(error).startswith(text)


def test_a_lost_host_is_noticed_though_nothing_is_expected() -> None:
    with join(3) as (leader, followers, losses):
        followers[0]._links[0]._connection.shutdown(socket.SHUT_RDWR)
        told = dict(losses.get(timeout=10) for _ in range(3))
        assert str(told[0]) == "rank 1: is gone"
        assert str(told[1]).startswith("rank 0: is gone")
        assert str(told[2]) == "rank 0: failed: rank 1: is gone"
        assert leader.wait_for_end(0)


def test_a_host_says_why_it_fails() -> None:
    with join(2) as (leader, followers, losses):
        followers[0].fail("no weights here")
        assert losses.get(timeout=10)[1].args == ("rank 1: failed: no weights here",)
        with pytest.raises(ClusterError, match="rank 1: failed: no weights here"):
            leader.receive(1)


def test_a_silent_host_is_a_lost_one() -> None:
    with join(2, step_timeout=0.8) as (leader, followers, losses):
        followers[0]._has_ended.set()  # its pings end; its connection stays
        rank, error = losses.get(timeout=10)
        assert (rank, str(error)) == (0, "rank 1: has not answered for 0.8 s")
        assert leader.wait_for_end(0)


def test_idle_nodes_are_not_silent() -> None:
    with join(2, step_timeout=0.5) as (leader, _, losses):
        assert not leader.wait_for_end(1.5)
        assert losses.empty()


def test_a_host_that_reads_nothing_is_lost_instead_of_waited_for() -> None:
    port, losses = find_port(), Losses()
    options = make_options(0, 2, port, step_timeout=1.0)
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(LeaderGroup.open, options, TOKEN, on_loss=lambda error: losses.put((0, error)))
        link = connect(port)
        greet_leader(link, TOKEN, 1, 2)
        leader = leading.result(20)
    sender = threading.Thread(target=lambda: leader.send({"mask": "x" * 32 * 2**20}))
    sender.start()
    rank, error = losses.get(timeout=20)
    assert rank == 0 and str(error).startswith("rank 1: ")
    sender.join(20)
    assert not sender.is_alive()
    link.close()


def test_a_step_that_fails_with_a_lost_host_is_that_nodes_loss() -> None:
    with join(2) as (leader, followers, losses):
        followers[0]._links[0]._connection.shutdown(socket.SHUT_RDWR)
        leader.lose_step(7, RuntimeError("a collective failed"))
        assert {str(losses.get(timeout=10)[1]) for _ in range(2)} >= {"rank 1: is gone"}


def test_a_step_that_fails_alone_is_told_to_all() -> None:
    with join(2) as (_, followers, losses):
        followers[0].lose_step(7, RuntimeError("out of memory"))
        told = {losses.get(timeout=10) for _ in range(2)}
        assert {(rank, str(error)) for rank, error in told} == {
            (1, "rank 1: step 7 failed: out of memory"),
            (0, "rank 1: failed: rank 1: step 7 failed: out of memory"),
        }


def test_calls_that_pile_up_are_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multihost_group, "_BACKLOG", 0)
    with join(2) as (leader, _, losses):
        leader.send({"call": "reset"})
        told = {losses.get(timeout=10) for _ in range(2)}
        assert {(rank, str(error)) for rank, error in told} >= {(0, "nnodes: the other nodes have left 0 calls unread")}
