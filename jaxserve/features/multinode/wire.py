"""A connection between two nodes of one engine: both prove the token, then exchange objects of JSON.

A frame is its length, 4 bytes big-endian, and JSON. Nothing is unpickled, and nothing is sent that a program runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from jaxserve.core.runtime.plan_codec import encode_object
from jaxserve.errors import ClusterError, shorten

MAX_FRAME = 64 * 2**20  # bytes
_MAX_GREETING = 4096  # bytes of a frame of somebody who has proved nothing
_BUFFER = 4 * 2**20  # bytes the system keeps for a peer that reads slowly
_LENGTH = struct.Struct("!I")
_NONCE = 32  # bytes
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=encode_object).encode


class Link:
    """One end of a connection. Any thread may send, and one receives.

    Args:
        peer: the rank at the other end.
    """

    def __init__(self, connection: socket.socket, peer: int = -1) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self.peer = peer
        self._connection, self._lock = connection, threading.Lock()
        self._deadline: float | None = None  # time.monotonic

    def set_timeout(self, seconds: float | None) -> None:
        """Bounds every later wait for the peer, and no more their sum; a wait that is longer raises TimeoutError."""
        self._deadline = None
        self._connection.settimeout(seconds)

    def set_deadline(self, seconds: float) -> None:
        """Bounds all that is sent and received from now on, together; TimeoutError when they have passed."""
        self._deadline = time.monotonic() + seconds

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends an object; OSError if the connection is lost."""
        self.send_frame(pack(message))

    def send_frame(self, frame: bytes) -> None:
        """Sends what `pack` returned."""
        with self._lock:
            self._use_time_left()
            self._connection.sendall(frame)

    def send_last(self, frame: bytes, seconds: float) -> None:
        """Sends a frame if that takes no longer than some seconds, whatever other threads send."""
        if not self._lock.acquire(timeout=seconds):
            return
        try:
            self._connection.settimeout(seconds)
            self._connection.sendall(frame)
        except OSError:  # the peer is the one that was lost
            return
        finally:
            self._lock.release()

    def receive(self, most: int = MAX_FRAME) -> dict[str, Any] | None:
        """Waits for the next object; None at the end of the connection.

        Raises:
            ClusterError: a frame is too long, or no object.
            OSError: the connection is lost.
        """
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        (size,) = _LENGTH.unpack(head)
        if size > most:
            raise ClusterError(f"a frame of {size} bytes is more than {most}", field="frame", value=size)
        body = self._read(size)
        if body is None:
            return None
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ClusterError(f"not JSON: {error}", field="frame") from error
        if not isinstance(message, dict):
            raise ClusterError(f"must be an object, got {type(message).__name__}", field="frame")
        return message

    def end(self) -> None:
        """Sends nothing more. What was sent still arrives, and the peer may go on for a moment."""
        with contextlib.suppress(OSError):  # it has ended already
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends the connection; a thread that waits in `receive` gets None. Further calls do nothing."""
        with contextlib.suppress(OSError):  # it has ended already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, size: int) -> bytes | None:
        parts, left = [], size
        while left:
            self._use_time_left()
            part = self._connection.recv(min(left, 2**20))
            if not part:
                return None
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _use_time_left(self) -> None:
        if self._deadline is None:
            return
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long")
        self._connection.settimeout(left)


def pack(message: Mapping[str, Any]) -> bytes:
    """Returns the frame of an object; dataclasses in it are written as recordings write them."""
    body = _encode(message).encode()
    return _LENGTH.pack(len(body)) + body


def greet_follower(link: Link, token: str | None, size: int) -> int:
    """Returns the rank of whoever connected, once it has proved the token.

    Each side proves it by an HMAC of both nonces, of the follower's rank, and of its own part, so that neither can send
    back what it was sent.

    Raises:
        ClusterError: the field is `token` for a stranger, and another for a node that knows the token but not the
            right rank or number of nodes; it was told why.
        OSError: the connection was lost, or too slow.
    """
    nonce = os.urandom(_NONCE).hex()
    link.send({"nonce": nonce})
    greeting = link.receive(_MAX_GREETING) or {}
    theirs, rank, nnodes = greeting.get("nonce"), greeting.get("rank"), greeting.get("nnodes")
    if not (isinstance(theirs, str) and type(rank) is int and type(nnodes) is int):
        raise ClusterError("whoever connected is not a node of an engine", field="token")
    facts = nonce, theirs, rank, nnodes
    if not _is_proof(greeting.get("proof"), token, "follower", facts):
        refuse(link, ClusterError("is another one at rank 0", field="JAXSERVE_CLUSTER_TOKEN"))
        raise ClusterError(f"a node that calls itself rank {shorten(rank)} has another token", field="token")
    if nnodes != size:
        message = f"is {size} at rank 0 and {nnodes} at rank {rank}; give all nodes the same"
        raise refuse(link, ClusterError(message, field="nnodes", value=nnodes))
    if not 0 < rank < size:
        message = f"must be 1 to {size - 1} above rank 0, got {rank}"
        raise refuse(link, ClusterError(message, field="node_rank", value=rank))
    link.send({"proof": _prove(token, "leader", facts)})
    return rank


def greet_leader(link: Link, token: str | None, rank: int, size: int) -> None:
    """Proves the token to rank 0, and lets it prove its own.

    Raises:
        ClusterError: it has another token, or refuses this node.
        OSError: the connection was lost, or too slow, or rank 0 has no place for one more; it may be tried again.
    """
    greeting = link.receive(_MAX_GREETING)
    if greeting is None:
        raise ConnectionError("it has no place for another node at the moment")
    nonce = greeting.get("nonce")
    if not isinstance(nonce, str):
        raise ClusterError("who answers there is not rank 0 of an engine", field="master_addr")
    ours = os.urandom(_NONCE).hex()
    facts = nonce, ours, rank, size
    link.send({"nonce": ours, "rank": rank, "nnodes": size, "proof": _prove(token, "follower", facts)})
    answer = link.receive(_MAX_GREETING) or {}
    raise_refusal(answer)
    if not _is_proof(answer.get("proof"), token, "leader", facts):
        raise ClusterError("who answers at master_addr does not know it", field="JAXSERVE_CLUSTER_TOKEN")


def refuse(link: Link, error: ClusterError) -> ClusterError:
    """Tells the peer of an error, which both ends then raise; returns it."""
    link.send({"refused": [error.field, str(error).removeprefix(f"{error.field}: ")]})
    return error


def raise_refusal(message: Mapping[str, Any]) -> None:
    """Raises the error that the peer sent by `refuse`, if this is one."""
    refused = message.get("refused")
    if isinstance(refused, list) and len(refused) == 2:
        raise ClusterError(str(refused[1]), field=str(refused[0]))


def _prove(token: str | None, part: str, facts: tuple[Any, ...]) -> str:
    text = json.dumps([part, *facts]).encode()
    return hmac.new((token or "").encode(), text, hashlib.sha256).hexdigest()


def _is_proof(proof: Any, token: str | None, part: str, facts: tuple[Any, ...]) -> bool:
    # Half of a surrogate pair, which JSON can hold, is no text; `compare_digest` takes strings only of ASCII.
    return (
        isinstance(proof, str)
        and proof.isascii()
        and hmac.compare_digest(proof.encode(), _prove(token, part, facts).encode())
    )
