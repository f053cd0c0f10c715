"""What several servers share, and what is refused because they cannot."""

from __future__ import annotations

import re
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
        def __init__(self, replicas: list[Service], front: Service | None, **_: Any) -> None:
            found.update(replicas=replicas, front=front)

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
    assert planned["front"] is None
    for rank, service in enumerate(planned["replicas"]):
        own = ["--data-parallel-size", "1", "--data-parallel-rank", str(rank), "--host", "127.0.0.1"]
        words = [*own, "--port", str(9000 + rank)]
        assert list(service.command[2:]) == ["jaxserve", "serve", "demo", "--data-parallel-size", "3", *words]
        assert service.ready_url == f"http://127.0.0.1:{9000 + rank}/health/ready" and service.name == str(rank)


def test_behind_a_router_only_this_machine_reaches_them(
    planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "has_router", lambda: True)
    serve(host="localhost", port=9000, api_key=("a-secret-key",))
    urls = [service.ready_url.removesuffix("/health/ready") for service in planned["replicas"]]
    assert len(set(urls)) == 3 and all(url.startswith("http://127.0.0.1:") for url in urls)
    words = planned["front"].command
    first = words.index("--worker-urls") + 1
    assert list(words[first : first + 3]) == urls
    assert words[words.index("--host") + 1] == "localhost" and words[words.index("--port") + 1] == "9000"
    assert planned["front"].ready_url == "http://localhost:9000/health"
    assert "a-secret-key" not in " ".join(words)


def test_nginx_takes_the_bodies_that_the_servers_take() -> None:
    text = Path(__file__).parents[3].joinpath("configs", "deploy", "nginx.conf").read_text()
    (megabytes,) = re.findall(r"client_max_body_size (\d+)m;", text)
    assert int(megabytes) * 2**20 == ServerConfig().limits.max_body_bytes


def test_a_public_address_needs_a_key_here_too(planned: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs an API key"):
        serve(host="0.0.0.0", port=9000)
    assert not planned


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_router_is_for_this_machine_alone(
    planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr(room, "has_router", lambda: True)
    with pytest.raises(ConfigError, match=r"^host: .*nginx\.conf"):
        serve(host=host, port=9000, api_key=("a-secret-key",))
    assert not planned
    monkeypatch.setattr(room, "has_router", lambda: False)  # each copy then checks keys itself
    assert serve(host=host, port=9000, api_key=("a-secret-key",)) == 0


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
    service = make_router("::1", 80, ["http://127.0.0.1:1"], metrics_port=2, max_body_bytes=5)
    words = list(service.command)
    assert words[words.index("--health-check-interval-secs") + 1] == "1"
    assert words[words.index("--max-payload-size") + 1] == "5"
    assert int(words[words.index("--request-timeout-secs") + 1]) > 3600
    assert service.ready_url == "http://[::1]:80/health"
