"""Fetches images from hosts that the operator allowed, without being led anywhere else.

A name is resolved once, and the connection goes to an address that was checked: a second answer of the resolver, a
redirect, a proxy or the URL's spelling cannot change it. Nothing that the host says reaches the client.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, final

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.media.addresses import is_public

if TYPE_CHECKING:
    import httpx

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # of a name and a port: addresses, without zones
_OPTION = "allowed_media_domains"
_PORTS = {"http": 80, "https": 443}
_MOST_ADDRESSES = 4  # that are tried


async def resolve(host: str, port: int) -> list[str]:
    """Returns the addresses of a name; OSError where there are none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


@final
class Fetcher:
    """Fetches from allowed hosts."""

    def __init__(
        self,
        domains: Sequence[str],
        *,
        max_bytes: int,
        timeout_s: float = 10.0,
        resolve: Resolve = resolve,
        is_allowed_address: Callable[[str], bool] = is_public,
    ) -> None:
        """Opens nothing.

        Args:
            domains: hosts as URLs have them, each perhaps with a port.
            max_bytes: of an answer's body.
            timeout_s: seconds for one image: the name, the connection, the answer to its end.
            resolve, is_allowed_address: replaced by tests.

        Raises:
            ConfigError: a domain is no host.
        """
        self._hosts = frozenset(map(_read_domain, domains))
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._resolve, self._is_allowed_address = resolve, is_allowed_address

    async def fetch(self, url: str, field: str) -> bytes:
        """Returns what a URL of http or https has.

        Raises:
            InvalidRequestError: the host is not allowed, or has no public address, or did not answer with a body
                within the limits; names `field`, and never what the host answered.
        """
        parsed = self._check(url, field)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._get(parsed, field)
        except TimeoutError as error:
            raise self._refuse(field) from error

    def _check(self, url: str, field: str) -> httpx.URL:
        """Returns the URL as the one parser reads it that also makes the request."""
        import httpx

        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidRequestError("is no URL of http or https", field=field) from error
        if parsed.scheme not in _PORTS or not parsed.host:
            raise InvalidRequestError("is no URL of http or https", field=field)
        if parsed.userinfo:
            raise InvalidRequestError("a URL with a user's name is not fetched", field=field)
        if parsed.netloc.decode("ascii") not in self._hosts:
            message = f"its host is not among those that images are fetched from ({_OPTION}); send the image as data"
            raise InvalidRequestError(message, field=field)
        return parsed

    async def _get(self, url: httpx.URL, field: str) -> bytes:
        """Connects to the first checked address that accepts, and reads the body."""
        import httpx

        port = url.port or _PORTS[url.scheme]
        try:
            addresses = await self._resolve(url.raw_host.decode("ascii"), port)
        except (OSError, UnicodeError) as error:
            raise self._refuse(field) from error
        if not addresses or not all(map(self._is_allowed_address, addresses)):
            message = f"its host has an address that is not public, which is not fetched from ({_OPTION})"
            raise InvalidRequestError(message, field=field)
        for address in addresses[:_MOST_ADDRESSES]:
            try:
                return await self._read(url, address, field)
            except httpx.ConnectError:
                continue
            except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError) as error:
                raise self._refuse(field) from error
        raise self._refuse(field)

    async def _read(self, url: httpx.URL, address: str, field: str) -> bytes:
        """Asks one address, with the name of the host in the request and in TLS, for whose certificate it counts."""
        import httpx

        headers = {"Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"}
        client = httpx.AsyncClient(
            verify=_make_context(), trust_env=False, follow_redirects=False, timeout=self._timeout_s
        )
        async with client:
            extensions = {"sni_hostname": url.raw_host.decode("ascii")}
            request = client.build_request("GET", url.copy_with(host=address), headers=headers, extensions=extensions)
            response = await client.send(request, stream=True)
            try:
                if response.is_redirect:
                    message = f"its host redirects, which is not followed; give the last URL, of a host in {_OPTION}"
                    raise InvalidRequestError(message, field=field)
                if response.status_code != 200 or response.headers.get("content-encoding", "identity") != "identity":
                    raise self._refuse(field)
                body = bytearray()
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > self._max_bytes:
                        raise self._refuse(field)
                return bytes(body)
            finally:
                await response.aclose()

    def _refuse(self, field: str) -> InvalidRequestError:
        message = (
            f"its host ({_OPTION}) gave no image of at most {self._max_bytes:,} bytes "
            f"in {self._timeout_s:g} s; send the image as data"
        )
        return InvalidRequestError(message, field=field)


def _read_domain(domain: str) -> str:
    """Returns a host, and its port if that is not the scheme's, as a URL that is read has it."""
    import httpx

    try:
        url = httpx.URL(f"http://{domain}")
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"must be hosts, got {domain!r}", field=_OPTION, value=domain) from error
    if not url.host or url.userinfo or url.raw_path != b"/" or url.fragment or "*" in url.host:
        message = f"must be hosts, each with a port where it is not that of http or https, got {domain!r}"
        raise ConfigError(message, field=_OPTION, value=domain)
    return url.netloc.decode("ascii")


@functools.cache
def _make_context() -> ssl.SSLContext:
    """Returns the certificates of the authorities that are trusted; reading them takes a while."""
    import httpx

    return httpx.create_ssl_context(trust_env=False)
