"""vllm-router in front of replicas (extra `router`): it sends a prompt where its prefix is likely to be cached.

Its control endpoints need no key: whoever reaches them can send all requests elsewhere. So it listens on this machine
alone, and `configs/deploy/nginx.conf` lets other machines reach what clients need.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from jaxserve.tools.cluster.service import Service

_MODULE = "vllm_router"
_CHECK_SECONDS = 1  # between two looks at a replica
_ANSWER_SECONDS = 86_400  # of one answer; the replicas have limits of their own


def has_router() -> bool:
    """Returns whether vllm-router is installed."""
    return importlib.util.find_spec(_MODULE) is not None


def make_router(host: str, port: int, urls: Sequence[str], *, metrics_port: int, max_body_bytes: int) -> Service:
    """Returns the router as a process, listening on `host` and `port`.

    Args:
        host: a loopback address or name.
        urls: the replicas, which must be ready.
        metrics_port: of 127.0.0.1, for the router's own metrics.
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
        "prometheus-port": metrics_port,
        "log-level": "warning",
    }
    command = [sys.executable, "-m", f"{_MODULE}.launch_router", "--worker-urls", *urls]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    address = f"[{host}]" if ":" in host else host
    # Its flag for the level does not reach the part that writes most lines.
    quiet = {"RUST_LOG": "warn", "NO_COLOR": "1"}
    return Service("router", tuple(command), quiet, ready_url=f"http://{address}:{port}/health")
