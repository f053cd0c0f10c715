"""vllm-router behind nginx (extra `router`): it sends a prompt where its prefix is likely to be cached.

Its control endpoints need no key: whoever reaches them can send all requests elsewhere. Even a page in a browser on
this machine could, by trying all ports of 127.0.0.1. So the router listens on a loopback address and a port drawn at
random, and clients reach nginx (`tools/cluster/nginx.py`).
"""

from __future__ import annotations

import importlib.util
import secrets
import sys
from collections.abc import Sequence

from jaxserve.tools.cluster.service import Service

_MODULE = "vllm_router"
_CHECK_SECONDS = 1  # between two looks at a replica
_ANSWER_SECONDS = 86_400  # of one answer; the replicas have limits of their own
_NO_ORIGIN = "https://none.invalid"  # without a list, it lets pages of every origin read answers


def has_router() -> bool:
    """Returns whether vllm-router is installed."""
    return importlib.util.find_spec(_MODULE) is not None


def draw_address() -> str:
    """Returns a random address of the loopback network, which Linux has whole: 127.0.0.0/8."""
    return ".".join(["127", *(str(1 + secrets.randbelow(254)) for _ in range(3))])


def make_router(host: str, port: int, urls: Sequence[str], *, metrics_port: int, max_body_bytes: int) -> Service:
    """Returns the router as a process.

    Args:
        host: a loopback address, from `draw_address`.
        port: where it listens there.
        urls: the replicas, which must be ready.
        metrics_port: for its own metrics, there too.
    """
    flags = {
        "host": host,
        "port": port,
        "policy": "cache_aware",
        "health-check-endpoint": "/health",
        "health-check-interval-secs": _CHECK_SECONDS,
        "health-failure-threshold": 1,
        "health-success-threshold": 1,
        "worker-startup-check-interval": 1,
        "request-timeout-secs": _ANSWER_SECONDS,
        "max-payload-size": max_body_bytes,
        "cors-allowed-origins": _NO_ORIGIN,
        "prometheus-host": host,
        "prometheus-port": metrics_port,
        "log-level": "warning",
    }
    command = [sys.executable, "-m", f"{_MODULE}.launch_router", "--worker-urls", *urls]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    # Its flag for the level does not reach the part that writes most lines.
    quiet = {"RUST_LOG": "warn", "NO_COLOR": "1"}
    return Service("router", tuple(command), quiet, ready_url=f"http://{host}:{port}/health")
