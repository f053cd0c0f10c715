"""What several servers share, and what is refused because they cannot."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.options import ServerConfig
from jaxserve.tools.cluster import replicas as room
from jaxserve.tools.cluster.router import make_router
from jaxserve.tools.cluster.service import Service


class Stopped(Exception):
    """In place of a supervisor's run."""


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the supervisor is given; nothing is started."""
    found: dict[str, Any] = {}

    class Recorder:
        def __init__(self, replicas: list[Service], fronts: Sequence[Service], **_: Any) -> None:
            found.update(replicas=replicas, fronts=fronts)
            for front in fronts[-1:]:
                path = Path(front.command[-1])
                found.update(configuration=path.read_text(), mode=path.stat().st_mode)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(room, "Supervisor", Recorder)
    monkeypatch.setattr(room, "configure_logging", lambda *_, **__: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return found


def serve(*flags: str, engine: dict[str, Any] | None = None, **server: Any) -> int:
    config = EngineConfig.from_options(data_parallel_size=3, **(engine or {}))
    return room.serve_replicas(["serve", "demo", *flags], config, ServerConfig.from_options(**server))


def test_each_replica_has_an_address_and_a_number_of_its_own(
    planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "has_router", lambda: False)
    assert serve("--data-parallel-size", "3", port=9000) == 0
    assert planned["fronts"] == ()
    for rank, service in enumerate(planned["replicas"]):
        own = ["--data-parallel-size", "1", "--data-parallel-rank", str(rank), "--host", "127.0.0.1"]
        words = [*own, "--port", str(9000 + rank)]
        assert list(service.command[2:]) == ["jaxserve", "serve", "demo", "--data-parallel-size", "3", *words]
        assert service.ready_url == f"http://127.0.0.1:{9000 + rank}/health/ready" and service.name == str(rank)


@pytest.fixture
def routed(planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The same where vllm-router and nginx are installed."""
    monkeypatch.setattr(room, "has_router", lambda: True)
    monkeypatch.setattr(room, "find_nginx", lambda: "/usr/sbin/nginx")
    return planned


def find_word(words: tuple[str, ...], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_clients_reach_nginx_alone(routed: dict[str, Any], host: str) -> None:
    (port,) = room.find_free_ports(1)
    serve(host=host, port=port, api_key=("a-secret-key",))
    urls = [service.ready_url.removesuffix("/health/ready") for service in routed["replicas"]]
    assert len(set(urls)) == 3 and all(url.startswith("http://127.0.0.1:") for url in urls)
    router, nginx = routed["fronts"]
    first = router.command.index("--worker-urls") + 1
    assert list(router.command[first : first + 3]) == urls
    assert find_word(router.command, "--port") != str(port)
    assert nginx.ready_url == f"http://127.0.0.1:{port}/health/live"
    assert f"listen {host}:{port};" in routed["configuration"]
    assert f"server {router.ready_url.removeprefix('http://').removesuffix('/health')};" in routed["configuration"]
    assert "a-secret-key" not in " ".join((*nginx.command, *router.command, routed["configuration"]))


def test_the_router_is_where_no_page_finds_it(routed: dict[str, Any]) -> None:
    nodes = set()
    for _ in range(2):
        serve(port=room.find_free_ports(1)[0])
        words = routed["fronts"][0].command
        nodes.add(find_word(words, "--host"))
        assert find_word(words, "--prometheus-host") == find_word(words, "--host")
        assert find_word(words, "--cors-allowed-origins").endswith(".invalid"), "not the default, which is every origin"
    assert len(nodes) == 2 and all(ipaddress.ip_address(host).is_loopback for host in nodes)
    assert routed["mode"] & 0o077 == 0, "others cannot read its address"


def test_a_router_needs_nginx(routed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "find_nginx", lambda: None)
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(ConfigError, match=r"^data_parallel_size: .*install nginx"):
            serve(host=host, port=room.find_free_ports(1)[0], api_key=("a-secret-key",))
    assert not routed


def test_a_taken_port_is_an_error_before_a_model_is_read(routed: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=r"^port: "):
        serve(port=taken.getsockname()[1])
    assert not routed


def test_a_public_address_needs_a_key_here_too(planned: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs an API key"):
        serve(host="0.0.0.0", port=9000)
    assert not planned


@pytest.mark.parametrize(
    ("engine", "server", "name"),
    [
        ({"nnodes": 2, "node_rank": 0}, {}, "nnodes"),
        ({"record_steps": "steps"}, {}, "record_steps"),
        ({}, {"uds": "socket"}, "uds"),
        ({}, {"admin_port": 9001}, "admin_port"),
        ({}, {"ssl_certfile": "a", "ssl_keyfile": "b"}, "ssl_certfile"),
        ({}, {"port": 0}, "port"),
    ],
)
def test_what_servers_cannot_share_is_refused(
    planned: dict[str, Any], engine: dict[str, Any], server: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        serve(engine=engine, **server)
    assert not planned


def test_one_engine_has_one_copy() -> None:
    with pytest.raises(ConfigError, match=r"data_parallel_size: .*jaxserve serve"):
        LLM(data_parallel_size=2)


def test_the_number_is_the_label_of_metrics() -> None:
    assert ServerMetrics("demo", rank=3).rank == "3"


def test_the_router_asks_each_second_and_lets_answers_take_long() -> None:
    service = make_router("127.9.9.9", 80, ["http://127.0.0.1:1"], metrics_port=2, max_body_bytes=5)
    words = list(service.command)
    assert words[words.index("--health-check-interval-secs") + 1] == "1"
    assert words[words.index("--max-payload-size") + 1] == "5"
    assert int(words[words.index("--request-timeout-secs") + 1]) > 3600
    assert service.ready_url == "http://127.9.9.9:80/health"
