"""Sockets: those that listen, data that waits in one, and how many connections the limit of open files allows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.server.connections import PROBE_RESERVE
from jaxserve.server.options import ListenOptions

ADMIN_CONNECTIONS = 32  # on the admin port, beside its reserve for probes
# Descriptors for everything else: listening sockets, weights, compile cache, threads, grammar workers, devices.
DESCRIPTOR_RESERVE = 256 + ADMIN_CONNECTIONS + 2 * PROBE_RESERVE
_LEAST_CONNECTIONS = 16
_MACOS_DESCRIPTORS = 10240  # OPEN_MAX: the most that macOS grants where it reports no limit
_ACCEPTS_PER_TURN = 32
_BACKLOG = 2048  # connections that the kernel queues until they are accepted


def raise_descriptor_limit() -> int | None:
    """Raises the soft limit of open files to the hard one, and returns it; None: unlimited."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, _MACOS_DESCRIPTORS):
        if soft != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or wanted > soft):
            with contextlib.suppress(ValueError, OSError):  # macOS reports infinity but does not accept it
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                break
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def clamp_connections(wanted: int, descriptors: int | None) -> int:
    """Returns how many connections the process can hold at once, at most `wanted`.

    Args:
        descriptors: the limit of open files; None: unlimited.

    Raises:
        ConfigError: too few are left to serve.
    """
    if descriptors is None:
        return wanted
    left = descriptors - DESCRIPTOR_RESERVE
    if left < min(wanted, _LEAST_CONNECTIONS):
        least = DESCRIPTOR_RESERVE + _LEAST_CONNECTIONS
        message = f"the process may open {descriptors} files and needs {least}; raise the hard limit (ulimit -Hn)"
        raise ConfigError(message, field="max_connections", value=wanted)
    return min(wanted, left)


def open_sockets(listen: ListenOptions) -> list[socket.socket]:
    """Returns many duplicates of the listening socket.

    Some versions of uvloop accept one connection per socket in each iteration. Under load an iteration takes tens of
    milliseconds, so with one socket the last of a thousand simultaneous clients would wait for half a minute.

    Raises:
        ConfigError: the server cannot listen on the address.
    """
    first = open_port(listen.host, listen.port, "port") if listen.uds is None else _open_unix(listen.uds)
    return [first, *(first.dup() for _ in range(_ACCEPTS_PER_TURN - 1))]


def has_data(transport: asyncio.BaseTransport) -> bool:
    """Whether bytes have arrived on a connection that its protocol has not been given yet."""
    try:
        import fcntl
        import termios
    except ImportError:  # Windows
        return False
    connection = transport.get_extra_info("socket")
    if connection is None:
        return False
    with contextlib.suppress(OSError, ValueError):  # it is closed
        return any(fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4)))
    return False


def open_port(host: str, port: int, field: str) -> socket.socket:
    """Returns a socket that listens on a port; on failure, a ConfigError names the option `field`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        message = f"{host}:{port} cannot be listened on: {error.strerror or error}"
        raise ConfigError(message, field=field, value=port) from error


def _open_unix(path: str) -> socket.socket:
    """Returns a socket that listens on a path. From the first moment only the process's user can connect to it.

    Raises:
        ConfigError: another process listens on the path, or this one cannot.
    """
    _refuse_taken(path)
    listening = socket.socket(socket.AF_UNIX)
    previous = os.umask(0o177)  # no other thread that creates files runs yet
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path, follow_symlinks=False).st_mode):
                Path(path).unlink()  # left by a server that was killed
        listening.bind(path)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        message = f"{path} cannot be listened on: {error.strerror or error}"
        raise ConfigError(message, field="uds", value=path) from error
    finally:
        os.umask(previous)
    return listening


def _refuse_taken(path: str) -> None:
    """Raises ConfigError when another process listens on a Unix socket: replacing it would go unnoticed."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(path)
        except OSError:
            return
    raise ConfigError(f"{path} cannot be listened on: another process already does", field="uds", value=path)
