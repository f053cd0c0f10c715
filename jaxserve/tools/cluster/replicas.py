"""`jaxserve serve --data-parallel-size N`: a server for each copy of the model; nginx and a router in front of them."""

from __future__ import annotations

import logging
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxserve.config import EngineConfig, read_environment
from jaxserve.errors import ConfigError
from jaxserve.server.launch import read_server_keys
from jaxserve.server.logs import configure_logging
from jaxserve.server.options import ServerConfig
from jaxserve.server.sockets import open_port, raise_descriptor_limit
from jaxserve.tools.cluster.device_share import share_devices
from jaxserve.tools.cluster.nginx import find_nginx, make_nginx, reach
from jaxserve.tools.cluster.router import draw_address, has_router, make_router
from jaxserve.tools.cluster.service import Service
from jaxserve.tools.cluster.supervisor import Supervisor

_log = logging.getLogger(__name__)
_LOCAL = "127.0.0.1"


def serve_replicas(argv: Sequence[str], engine: EngineConfig, config: ServerConfig) -> int:
    """Serves until a signal; returns the exit status.

    Args:
        argv: the arguments of this `serve`. Each replica gets them, with its own address and number after them.

    Raises:
        ConfigError: an option cannot be shared by several servers, there are too few devices, or nginx is missing.
    """
    refuse_with_replicas(engine, config)
    read_server_keys(config)  # its errors, before anything starts
    configure_logging(config.logs.log_level, json=config.logs.log_format == "json")
    raise_descriptor_limit()  # of all that is started here
    count, listen = engine.replicas.data_parallel_size, config.listen
    shares = share_devices(count, engine.parallel.tensor_parallel_size, read_environment())
    routed = has_router()
    host = _LOCAL if routed else listen.host
    ports = find_free_ports(count, host) if routed else [listen.port + rank for rank in range(count)]
    places = [f"{reach(host)}:{port}" for port in ports]
    replicas = [
        Service(str(rank), make_command(argv, rank, host, port), share, f"http://{place}/health/ready")
        for rank, (port, share, place) in enumerate(zip(ports, shares, places, strict=True))
    ]
    with tempfile.TemporaryDirectory(prefix="jaxserve-nginx-") as folder:
        fronts = _make_fronts(config, Path(folder), places) if routed else ()
        if not routed:
            _log.warning(
                "vllm-router is not installed (pip install '.[router]' in a checkout): "
                "clients choose a replica themselves"
            )

        def tell() -> None:
            front = f"http://{reach(listen.host)}:{listen.port}, in front of " if routed else ""
            _log.info("%d replicas are ready: %s%s", count, front, ", ".join(f"http://{place}" for place in places))

        return Supervisor(replicas, fronts, on_ready=tell, show_names=config.logs.log_format != "json").run()


def _make_fronts(config: ServerConfig, folder: Path, places: Sequence[str]) -> tuple[Service, Service]:
    """Returns vllm-router, and nginx in front of it, which clients reach."""
    program = find_nginx()
    if program is None:
        message = (
            "vllm-router is installed, and nginx is not, which keeps clients from its control endpoints; install nginx "
            "(a package of the system), or uninstall vllm-router: then clients choose a replica by its port"
        )
        raise ConfigError(message, field="data_parallel_size")
    listen = config.listen
    open_port(listen.host, listen.port, "port").close()  # its error, before a model is read
    hidden = draw_address()
    port, metrics_port = find_free_ports(2, hidden)
    urls = [f"http://{place}" for place in places]
    most = config.limits.max_body_bytes
    router = make_router(hidden, port, urls, metrics_port=metrics_port, max_body_bytes=most)
    return router, make_nginx(program, folder, config, router=f"{hidden}:{port}", copies=places)


def refuse_with_replicas(engine: EngineConfig, config: ServerConfig) -> None:
    """Raises ConfigError for what several servers cannot share."""
    listen, count = config.listen, engine.replicas.data_parallel_size
    hint = f"leave it out with data_parallel_size={count}"
    for field, value, text in (
        (
            "nnodes",
            engine.nodes.nnodes if (engine.nodes.nnodes or 1) > 1 else None,
            "a replica is an engine of one node",
        ),
        ("uds", listen.uds, "several servers cannot listen on one path"),
        ("admin_port", listen.admin_port, "several servers cannot listen on one port"),
        ("ssl_certfile", listen.ssl_certfile, "the router speaks no TLS; put a proxy in front"),
        ("record_steps", engine.observability.record_steps, "several engines cannot write one file"),
    ):
        if value is not None:
            raise ConfigError(f"{text}; {hint}", field=field, value=value)
    if listen.port == 0:
        raise ConfigError(f"the address of {count} replicas must be known; give a port", field="port", value=0)
    if not has_router() and listen.port + count - 1 > 65535:
        raise ConfigError(f"{count} replicas need the ports from it on", field="port", value=listen.port)


def make_command(argv: Sequence[str], rank: int, host: str, port: int) -> tuple[str, ...]:
    """Returns the command of one replica: `argv`, and after it what is its own, as the last of equal flags counts."""
    own = {"data-parallel-size": 1, "data-parallel-rank": rank, "host": host, "port": port}
    flags = [part for name, value in own.items() for part in (f"--{name}", str(value))]
    return (sys.executable, "-m", "jaxserve", *argv, *flags)


def find_free_ports(count: int, host: str = _LOCAL) -> list[int]:
    """Returns ports of an address of this machine that nobody listens on."""
    sockets = [socket.create_server((host, 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
