"""`jaxserve serve --data-parallel-size N`: a server for each copy of the model, and a router in front of them."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence

from jaxserve.config import EngineConfig, read_environment
from jaxserve.errors import ConfigError
from jaxserve.server.launch import read_server_keys
from jaxserve.server.logs import configure_logging
from jaxserve.server.options import ServerConfig
from jaxserve.tools.cluster.device_share import share_devices
from jaxserve.tools.cluster.router import has_router, make_router
from jaxserve.tools.cluster.service import Service
from jaxserve.tools.cluster.supervisor import Supervisor

_log = logging.getLogger(__name__)
_LOCAL = "127.0.0.1"


def serve_replicas(argv: Sequence[str], engine: EngineConfig, config: ServerConfig) -> int:
    """Serves until a signal; returns the exit status.

    Args:
        argv: the arguments of this `serve`. Each replica gets them, with its own address and number after them.

    Raises:
        ConfigError: an option cannot be shared by several servers, or there are too few devices.
    """
    refuse_with_replicas(engine, config)
    read_server_keys(config)  # its errors, before anything starts
    configure_logging(config.logs.log_level, json=config.logs.log_format == "json")
    count, listen = engine.replicas.data_parallel_size, config.listen
    shares = share_devices(count, engine.parallel.tensor_parallel_size, read_environment())
    routed = has_router()
    if routed:
        host, (*ports, metrics_port) = _LOCAL, find_free_ports(count + 1)
    else:
        host, ports = listen.host, [listen.port + rank for rank in range(count)]
        metrics_port = 0
    urls = [f"http://{_LOCAL if routed else _reach(host)}:{port}" for port in ports]
    replicas = [
        Service(str(rank), make_command(argv, rank, host, port), share, f"{url}/health/ready")
        for rank, (port, share, url) in enumerate(zip(ports, shares, urls, strict=True))
    ]
    front = None
    if routed:
        limits = config.limits
        front = make_router(
            listen.host, listen.port, urls, metrics_port=metrics_port, max_body_bytes=limits.max_body_bytes
        )
    else:
        _log.warning(
            "vllm-router is not installed (pip install '.[router]' in a checkout): clients choose a replica themselves"
        )

    def tell() -> None:
        place = f"http://{_reach(listen.host)}:{listen.port}, in front of " if routed else ""
        _log.info("%d replicas are ready: %s%s", count, place, ", ".join(urls))

    return Supervisor(replicas, front, on_ready=tell, show_names=config.logs.log_format != "json").run()


def refuse_with_replicas(engine: EngineConfig, config: ServerConfig) -> None:
    """Raises ConfigError for what several servers cannot share."""
    listen, count = config.listen, engine.replicas.data_parallel_size
    hint = f"leave it out with data_parallel_size={count}"
    for field, value, text in (
        (
            "nnodes",
            engine.hosts.nnodes if (engine.hosts.nnodes or 1) > 1 else None,
            "a replica is an engine of one host",
        ),
        ("uds", listen.uds, "several servers cannot listen on one path"),
        ("admin_port", listen.admin_port, "several servers cannot listen on one port"),
        ("ssl_certfile", listen.ssl_certfile, "vllm-router speaks no TLS; put configs/deploy/nginx.conf in front"),
        ("record_steps", engine.observability.record_steps, "several engines cannot write one file"),
    ):
        if value is not None:
            raise ConfigError(f"{text}; {hint}", field=field, value=value)
    if has_router() and not config.is_local:
        message = (
            "vllm-router has control endpoints without a key, by which a stranger could take over all requests; leave "
            "it at 127.0.0.1, and put configs/deploy/nginx.conf in front for other machines"
        )
        raise ConfigError(message, field="host", value=listen.host)
    if listen.port == 0:
        raise ConfigError(f"the address of {count} replicas must be known; give a port", field="port", value=0)
    if not has_router() and listen.port + count - 1 > 65535:
        raise ConfigError(f"{count} replicas need the ports from it on", field="port", value=listen.port)


def make_command(argv: Sequence[str], rank: int, host: str, port: int) -> tuple[str, ...]:
    """Returns the command of one replica: `argv`, and after it what is its own, as the last of equal flags counts."""
    own = {"data-parallel-size": 1, "data-parallel-rank": rank, "host": host, "port": port}
    flags = [part for name, value in own.items() for part in (f"--{name}", str(value))]
    return (sys.executable, "-m", "jaxserve", *argv, *flags)


def find_free_ports(count: int) -> list[int]:
    """Returns ports of the loopback address that nobody listens on."""
    sockets = [socket.create_server((_LOCAL, 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _reach(host: str) -> str:
    """Returns an address at which a server that listens on `host` can be reached from here."""
    if host in ("0.0.0.0", "::", ""):
        return _LOCAL
    return f"[{host}]" if ":" in host else host
