"""Hosts over real sockets, as threads: who is let in, what they agree on, and how a loss is noticed."""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from jaxserve.errors import ClusterError, ConfigError
from jaxserve.features.multinode import group as multihost_group
from jaxserve.features.multinode.group import FollowerGroup, LeaderGroup
from jaxserve.features.multinode.wire import MAX_FRAME, Link, greet_leader, pack
from jaxserve.parallel_options import HostOptions

TOKEN = "secret"
Losses = queue.SimpleQueue[tuple[int, ClusterError]]


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_options(rank: int, size: int, port: int, **options: Any) -> HostOptions:
    given = {"init_timeout": 10.0, "step_timeout": 10.0} | options
    return HostOptions(nnodes=size, node_rank=rank, master_addr="127.0.0.1", master_port=port, **given)


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


def on_all(leader: LeaderGroup, followers: list[FollowerGroup], call: Callable[[Any], Any]) -> list[Any]:
    """Calls a function with each group at once; returns results and errors in the order of ranks."""
    groups = [leader, *followers]
    with ThreadPoolExecutor(len(groups)) as pool:
        jobs: list[Future[Any]] = [pool.submit(call, group) for group in groups]
        return [job.exception(20) or job.result() for job in jobs]


def test_hosts_agree() -> None:
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


def test_idle_hosts_are_not_silent() -> None:
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


def connect(port: int) -> Link:
    """Connects to a port that is about to be listened on."""
    while True:
        try:
            return Link(socket.create_connection(("127.0.0.1", port), 10))
        except ConnectionRefusedError:
            continue


def test_missing_ranks_are_named() -> None:
    port = find_port()
    options = make_options(0, 4, port, init_timeout=1.0)
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(LeaderGroup.open, options, TOKEN, on_loss=print)
        link = connect(port)
        greet_leader(link, TOKEN, 2, 4)
        with pytest.raises(ClusterError, match="nnodes: rank 1, 3 did not come within 1 s"):
            leading.result(20)
        assert link.receive() == {"refused": ["nnodes", "rank 1, 3 did not come within 1 s"]}
        assert link.receive() is None


def test_rank_0_may_never_answer() -> None:
    with pytest.raises(ClusterError, match=r"master_addr: rank 0 did not answer at 127\.0\.0\.1:\d+ for 0.3 s"):
        FollowerGroup.join(make_options(1, 2, find_port(), init_timeout=0.3), TOKEN, on_loss=print)


@pytest.mark.parametrize(
    ("rank", "size", "text"),
    [
        (1, 3, "nnodes: is 2 at rank 0 and 3 at rank 1; give all hosts the same"),
        (2, 2, "node_rank: must be 1 to 1 above rank 0, got 2"),
        (0, 2, "node_rank: must be 1 to 1 above rank 0, got 0"),
    ],
)
def test_a_host_that_does_not_belong_is_refused_at_both_ends(rank: int, size: int, text: str) -> None:
    port = find_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(LeaderGroup.open, make_options(0, 2, port), TOKEN, on_loss=print)
        with pytest.raises(ClusterError, match=text):
            greet_leader(connect(port), TOKEN, rank, size)
        with pytest.raises(ClusterError, match=text):
            leading.result(20)


def test_two_hosts_of_one_rank_are_refused() -> None:
    port = find_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(LeaderGroup.open, make_options(0, 3, port), TOKEN, on_loss=print)
        links = [connect(port) for _ in range(2)]
        for link in links:
            greet_leader(link, TOKEN, 1, 3)
        with pytest.raises(ClusterError, match="two hosts say that they are rank 1"):
            leading.result(20)
        assert [link.receive()["refused"][0] for link in links] == ["node_rank"] * 2  # type: ignore[index]


def test_strangers_are_turned_away_and_hosts_still_come() -> None:
    port = find_port()
    with ThreadPoolExecutor(2) as pool:
        leading = pool.submit(LeaderGroup.open, make_options(0, 2, port), TOKEN, on_loss=print)
        for garbage in (
            os.urandom(64),
            struct.pack("!I", MAX_FRAME + 1),
            pack({"rank": 1}),
            pack({"nonce": 1, "rank": []}),
        ):
            link = connect(port)
            link._connection.sendall(garbage)
            assert link.receive() is not None  # the nonce
            with pytest.raises((OSError, AssertionError)):  # closed, perhaps before all was read
                assert link.receive() is not None
        with pytest.raises(ClusterError, match="JAXSERVE_CLUSTER_TOKEN: is another one at rank 0"):
            greet_leader(connect(port), "guess", 1, 2)
        silent = [connect(port) for _ in range(8)]
        following = pool.submit(FollowerGroup.join, make_options(1, 2, port), TOKEN, on_loss=print)
        groups = leading.result(20), following.result(20)
        for link in silent:
            link.close()
        for group in groups:
            end(group)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), 1)  # nobody else is expected


def test_an_impostor_in_place_of_rank_0_is_not_believed() -> None:
    """It can send back what it was sent, but not prove the token for rank 0's part."""
    listener = socket.create_server(("127.0.0.1", 0))

    def reflect() -> None:
        link = Link(listener.accept()[0])
        link.send({"nonce": "00"})
        greeting = link.receive()
        assert greeting is not None
        link.send({"proof": greeting["proof"]})

    thread = threading.Thread(target=reflect)
    thread.start()
    with pytest.raises(ClusterError, match="JAXSERVE_CLUSTER_TOKEN: who answers at master_addr does not know it"):
        greet_leader(Link(socket.create_connection(listener.getsockname(), 10)), TOKEN, 1, 2)
    thread.join()
    listener.close()


@pytest.mark.parametrize("group", [LeaderGroup.open, FollowerGroup.join])
def test_without_a_token_only_this_machine_is_trusted(group: Callable[..., Any]) -> None:
    options = HostOptions(nnodes=2, node_rank=0, master_addr="engine-0.example", init_timeout=0.1)
    with pytest.raises(ConfigError, match="JAXSERVE_CLUSTER_TOKEN: must be set on all hosts"):
        group(options, None, on_loss=print)


def test_a_taken_address_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"master_addr: rank 0 cannot listen on 127.0.0.1:{port}"):
            LeaderGroup.open(make_options(0, 2, port), TOKEN, on_loss=print)


def test_the_name_of_rank_0_may_be_known_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's name comes into the DNS some seconds after its container has started."""
    real, failures = socket.getaddrinfo, [socket.gaierror(socket.EAI_NONAME, "Name or service not known")]

    def look_up(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with join(2) as (leader, _, losses):
        assert not failures and losses.empty() and leader.size == 2


def test_a_name_that_stays_unknown_is_a_config_error() -> None:
    options = HostOptions(nnodes=2, node_rank=0, master_addr="rank-0.invalid", init_timeout=0.6)
    with pytest.raises(ConfigError, match=r"master_addr: rank 0 cannot listen on rank-0.invalid:29501 \("):
        LeaderGroup.open(options, TOKEN, on_loss=print)


def test_a_step_that_fails_with_a_lost_host_is_that_hosts_loss() -> None:
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
        assert {(rank, str(error)) for rank, error in told} >= {(0, "nnodes: the other hosts have left 0 calls unread")}
