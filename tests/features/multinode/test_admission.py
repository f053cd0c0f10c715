"""Nodes that join rank 0, and strangers who do not."""

from __future__ import annotations

import errno
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from jaxserve.errors import ClusterError, ConfigError
from jaxserve.features.multinode import admission as multihost_admission
from jaxserve.features.multinode.group import FollowerGroup, LeaderGroup
from jaxserve.features.multinode.places import Places
from jaxserve.features.multinode.wire import MAX_FRAME, Link, greet_leader, pack, raise_refusal
from jaxserve.parallel_options import NodeOptions
from tests.features.multinode.groups import TOKEN, connect, end, find_port, join, make_options


def answer_with(link: Link, **fields: Any) -> None:
    """Greets rank 0 as a node with a field of its own, and raises what rank 0 refuses."""
    assert link.receive() is not None  # the nonce
    link.send({"nonce": "00", "rank": 1, "nnodes": 2, "proof": "00"} | fields)
    raise_refusal(link.receive() or {})


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
        (1, 3, "nnodes: is 2 at rank 0 and 3 at rank 1; give all nodes the same"),
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


def test_two_nodes_of_one_rank_are_refused() -> None:
    port = find_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(LeaderGroup.open, make_options(0, 3, port), TOKEN, on_loss=print)
        links = [connect(port) for _ in range(2)]
        for link in links:
            greet_leader(link, TOKEN, 1, 3)
        with pytest.raises(ClusterError, match="two nodes say that they are rank 1"):
            leading.result(20)
        assert [link.receive()["refused"][0] for link in links] == ["node_rank"] * 2  # type: ignore[index]


def test_strangers_are_turned_away_and_nodes_still_come() -> None:
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
        with pytest.raises(ClusterError, match="is another one at rank 0"):
            answer_with(connect(port), proof="\ud800")  # half of a surrogate pair: JSON, and no text
        silent = [connect(port, "127.0.0.2") for _ in range(8)]
        following = pool.submit(FollowerGroup.join, make_options(1, 2, port), TOKEN, on_loss=print)
        groups = leading.result(20), following.result(20)
        for link in silent:
            link.close()
        for group in groups:
            end(group)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), 1)  # nobody else is expected


def test_strangers_who_drip_do_not_keep_the_nodes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are places, from many addresses, each with a byte before every wait is over."""
    monkeypatch.setattr(multihost_admission, "GREETING_SECONDS", 1.0)
    monkeypatch.setattr(multihost_admission, "_UNPROVEN", 16)
    port, ended = find_port(), threading.Event()

    def drip(link: Link) -> None:
        with suppress(OSError):
            while not ended.wait(0.3):
                link._connection.sendall(b"\0")
        gone.put(link)

    gone = queue.SimpleQueue[Link]()
    with ThreadPoolExecutor(18) as pool:
        leading = pool.submit(LeaderGroup.open, make_options(0, 2, port, init_timeout=60.0), TOKEN, on_loss=print)
        for index in range(16):
            pool.submit(drip, connect(port, f"127.0.0.{2 + index // 4}"))
        for _ in range(16):
            gone.get(timeout=60)  # each was closed, though a byte came in time
        following = pool.submit(FollowerGroup.join, make_options(1, 2, port), TOKEN, on_loss=print)
        for group in (leading.result(60), following.result(60)):
            end(group)
        ended.set()


def test_a_host_that_finds_no_place_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    def take(places: Places, address: str) -> bool:
        refused.append(address)
        return len(refused) > 2

    monkeypatch.setattr(Places, "take", take)
    monkeypatch.setattr(Places, "leave", lambda places, address: None)
    with join(2) as (leader, _, losses):
        assert refused == ["127.0.0.1"] * 3 and losses.empty() and leader.size == 2


def test_each_address_has_a_share_of_the_places() -> None:
    places = Places(5, 2)
    assert [places.take("192.0.2.1") for _ in range(3)] == [True, True, False]
    assert [places.take(f"2001:db8::{index}") for index in range(3)] == [True, True, False], "one network of 64 bits"
    assert [places.take("::ffff:192.0.2.1"), places.take("2001:db8:0:1::1"), places.take("192.0.2.2")] == [
        *(False, True),
        False,  # none is left
    ]
    places.leave("192.0.2.1")
    assert places.take("::ffff:192.0.2.1")


def test_a_connection_that_cannot_be_taken_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def accept(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with join(2) as (leader, _, losses):
        assert not failures and losses.empty() and leader.size == 2


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
    options = NodeOptions(nnodes=2, node_rank=0, master_addr="engine-0.example", init_timeout=0.1)
    with pytest.raises(ConfigError, match="JAXSERVE_CLUSTER_TOKEN: must be set on all nodes"):
        group(options, None, on_loss=print)


def test_a_taken_address_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"master_addr: rank 0 cannot listen on 127.0.0.1:{port}"):
            LeaderGroup.open(make_options(0, 2, port), TOKEN, on_loss=print)


def test_a_taken_port_of_jax_is_a_config_error() -> None:
    """As `--port` is, if it is the next after `--master-port`: JAX would end both processes without a word."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"master_port: JAX's coordinator .* 127.0.0.1:{port} .*--port"):
            LeaderGroup.open(make_options(0, 2, port - 1), TOKEN, on_loss=print)


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
    options = NodeOptions(nnodes=2, node_rank=0, master_addr="rank-0.invalid", init_timeout=0.6)
    with pytest.raises(ConfigError, match=r"master_addr: rank 0 cannot listen on rank-0.invalid:29501 \("):
        LeaderGroup.open(options, TOKEN, on_loss=print)
