"""nginx in front of vllm-router: the port that clients reach, with an allow-list of what reaches the router."""

from __future__ import annotations

import os
import shutil
import signal
import string
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jaxserve.config import read_environment
from jaxserve.server.options import ServerConfig
from jaxserve.tools.cluster.service import Service

_PATH = "/usr/sbin:/usr/local/sbin"  # Debian's place, which is in no user's PATH
_SPARE_CONNECTIONS = 512  # kept open to router and copies


class _Template(string.Template):
    """A text whose blanks are %{name}, as nginx has variables of its own that begin with $."""

    delimiter = "%"


def find_nginx() -> str | None:
    """Returns the path of nginx; None if it is not installed."""
    return shutil.which("nginx", path=os.pathsep.join([read_environment().get("PATH", os.defpath), _PATH]))


def make_nginx(program: str, folder: Path, config: ServerConfig, *, router: str, copies: Sequence[str]) -> Service:
    """Returns nginx as a process that listens on the address of `config`, and writes its configuration.

    Args:
        program: from `find_nginx`.
        folder: an empty one, for its files.
        router: host and port of vllm-router.
        copies: hosts and ports of the servers, which must be ready.
    """
    listen, limits = config.listen, config.limits
    address = f"[{listen.host}]" if ":" in listen.host else listen.host
    text = (resources.files("jaxserve.tools.cluster") / "nginx.conf").read_text()
    filled = _Template(text).substitute(
        listen=f"{address}:{listen.port}",
        router=router,
        # A copy that ended or still warms up is asked each time, and the next one answers.
        copies="\n    ".join(f"server {each} max_fails=0;" for each in copies),
        worker_connections=2 * limits.max_connections + _SPARE_CONNECTIONS,  # a client's, and the one behind it
        max_body_bytes=limits.max_body_bytes,
        max_header_bytes=limits.max_header_bytes,
        body_ms=round(1000 * limits.body_timeout),
        reading_ms=round(1000 * limits.slow_reader_timeout),
        keep_alive_ms=round(1000 * limits.keep_alive_timeout),
    )
    path = folder / "nginx.conf"
    path.touch(mode=0o600)  # the router's address is nobody else's business
    path.write_text(filled)
    command = program, "-e", "stderr", "-p", str(folder), "-c", str(path)
    ready = f"http://{reach(listen.host)}:{listen.port}/health/live"
    return Service("nginx", command, ready_url=ready, end_signal=signal.SIGTERM)


def reach(host: str) -> str:
    """Returns an address, as in a URL, at which what listens on `host` can be reached from here."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1" if host != "::" else "[::1]"
    return f"[{host}]" if ":" in host else host
