"""TLS: its files, and handshakes that count as idle connections."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import uvicorn

from jaxserve.errors import ConfigError
from jaxserve.server.http import LimitedHttp
from jaxserve.server.options import ListenOptions
from jaxserve.server.sockets import has_data


def secure(config: uvicorn.Config, listen: ListenOptions) -> ssl.SSLContext | None:
    """Reads the TLS files, and makes every connection begin with a handshake; returns None without TLS.

    Raises:
        ConfigError: one of the files cannot be used; the message names them.
    """
    try:
        config.load()
    except OSError as error:
        files = ", ".join(each for each in (listen.ssl_certfile, listen.ssl_keyfile, listen.ssl_ca_certs) if each)
        message = f"cannot be used ({files}): {error.strerror or error}"
        raise ConfigError(message, field="ssl_certfile", value=listen.ssl_certfile) from error
    context, config.ssl = config.ssl, None  # otherwise the event loop would do the handshake, uncounted
    if context is not None:
        make_http: Any = config.http_protocol_class
        config.http_protocol_class = lambda **state: Handshake(make_http(**state), context)  # type: ignore[assignment]
    return context


def reload_certificates(context: ssl.SSLContext, listen: ListenOptions) -> None:
    """Reads the files again for later handshakes. OSError: one cannot be used, and nothing has changed."""
    assert listen.ssl_certfile is not None, "there would be no context without"
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for each in (trial, context):  # a mismatched pair must not be loaded halfway into the context in use
        each.load_cert_chain(listen.ssl_certfile, listen.ssl_keyfile)
        if listen.ssl_ca_certs is not None:
            each.load_verify_locations(listen.ssl_ca_certs)


class Handshake(asyncio.Protocol):
    """A connection during its TLS handshake; afterwards the HTTP protocol replaces it.

    It counts as idle, so clients that open sockets and send nothing make room for others.
    """

    def __init__(self, http: LimitedHttp, context: ssl.SSLContext) -> None:
        self._http, self._context = http, context
        self._early: list[bytes] = []  # data that followed the handshake at once
        self._has_ended = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._http.server_state.connections.add(self)  # type: ignore[arg-type]
        self._http.limiter.add(self)
        # Started eagerly: uvloop begins to read when this returns, and the data belongs to the handshake.
        self._task = asyncio.Task(self._shake(), loop=self._http.loop, eager_start=True)

    @property
    def has_unread(self) -> bool:
        """See `Connection`."""
        return has_data(self._transport)

    def drop(self) -> None:
        """Closes at once."""
        self._transport.abort()

    shutdown = drop  # uvicorn's name

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def eof_received(self) -> None:
        self._has_ended = True

    async def _shake(self) -> None:
        try:
            secured = await self._http.loop.start_tls(
                self._transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._http.head_timeout,
            )
        except OSError:  # the client does not speak TLS, leaves or takes too long
            secured = None
        finally:
            self._http.limiter.remove(self)
            self._http.server_state.connections.discard(self)  # type: ignore[arg-type]
        if secured is None or self._transport.is_closing():  # uvloop does not report that the client has left
            self._transport.abort()
        else:
            self._serve(secured)

    def _serve(self, secured: asyncio.Transport) -> None:
        secured.set_protocol(self._http)
        self._http.connection_made(secured)
        for data in self._early:
            self._http.data_received(data)
        if self._has_ended:
            self._http.eof_received()
