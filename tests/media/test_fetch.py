"""Fetching: hosts that are allowed, addresses that are public, and hosts that want to lead elsewhere."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx
import pytest

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.media import fetch as module
from jaxserve.media.addresses import is_public
from jaxserve.media.fetch import Fetcher, resolve

NAME = "pictures.test"
BODY = b"a picture"
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n" + BODY
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Host:
    """A host on this machine that answers each request in the same way, and keeps the heads of all."""

    def __init__(self, answer: bytes | Answer = GOOD, context: ssl.SSLContext | None = None) -> None:
        self.heads: list[str] = []
        self.names: list[str | None] = []  # that TLS asked for
        self._answer, self._context = answer, context
        if context is not None:
            context.sni_callback = lambda _, name, __: self.names.append(name)

    async def __aenter__(self) -> Host:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            if isinstance(self._answer, bytes):
                writer.write(self._answer)
                await writer.drain()
            else:
                await self._answer(writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client left
        finally:
            writer.close()


class Resolver:
    """Answers with each list in turn, then with the last."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers, self.asked = list(answers), []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def make(port: int, resolver: Resolver | None = None, *, timeout_s: float = 10.0, is_checked: bool = False) -> Fetcher:
    return Fetcher(
        (NAME, f"{NAME}:{port}"),
        max_bytes=64,
        timeout_s=timeout_s,
        resolve=resolver or Resolver(["127.0.0.1"]),
        is_allowed_address=is_public if is_checked else lambda address: address == "127.0.0.1",
    )


async def refuse(fetcher: Fetcher, url: str) -> str:
    with pytest.raises(InvalidRequestError) as error:
        await fetcher.fetch(url, "messages[0].content[1]")
    assert error.value.field == "messages[0].content[1]"
    return str(error.value)


def test_an_allowed_host_is_asked_by_its_name_at_the_checked_address() -> None:
    async def run() -> None:
        async with Host() as host:
            resolver = Resolver(["127.0.0.1"])
            url = f"http://{NAME.upper()}:{host.port}/a%20b?c=1#here"
            assert await make(host.port, resolver).fetch(url, "part") == BODY
            assert resolver.asked == [(NAME, host.port)]
            (head,) = host.heads
            assert head.startswith("GET /a%20b?c=1 HTTP/1.1\r\n") and f"Host: {NAME}:{host.port}\r\n" in head
            assert "Accept-Encoding: identity" in head

    asyncio.run(run())


def test_the_certificate_is_checked_for_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed, so there is no certificate to test TLS with")
    files = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x"]
    command += ["-addext", f"subjectAltName=DNS:{NAME}", "-keyout", str(files[0]), "-out", str(files[1])]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setattr(module, "_make_context", lambda: ssl.create_default_context(cafile=str(files[1])))

    async def run() -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(files[1], files[0])
        async with Host(context=context) as host:
            assert await make(host.port).fetch(f"https://{NAME}:{host.port}/", "part") == BODY
            assert host.names == [NAME]
            other = Fetcher(
                (f"other.test:{host.port}",),
                max_bytes=64,
                resolve=Resolver(["127.0.0.1"]),
                is_allowed_address=bool,
            )
            await refuse(other, f"https://other.test:{host.port}/")
            assert len(host.heads) == 1, "no request went to a host without its certificate"

    asyncio.run(run())


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test/",
        f"http://{NAME}.other.test/",
        f"http://other.{NAME}/",
        f"http://{NAME}./",
        f"http://{NAME}:81/",
        f"http://user@{NAME}/",
        f"http://other.test@{NAME}/",
        f"http://{NAME}@other.test/",
        f"http://{NAME}\\@other.test/",
        f"http://other.test#@{NAME}/",
        f"http://other.test?@{NAME}/",
        f"http:///{NAME}/",
        f"http://{NAME}\t.other.test/",
        f"ftp://{NAME}/",
        f"http://{NAME}:99999/",
        "http://[::1",
        "http:",
        f"http://{NAME}/" + "\0",
    ],
)
def test_other_hosts_are_not_even_resolved(url: str) -> None:
    async def run() -> None:
        resolver = Resolver(["127.0.0.1"])
        await refuse(make(1, resolver), url)
        assert resolver.asked == []

    asyncio.run(run())


ADDRESSES = (
    *("127.0.0.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("192.0.0.192", "198.18.0.1", "224.0.0.1", "255.255.255.255", "100.100.100.200", "168.63.129.16", "240.0.0.1"),
    *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "fec0::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:a9fe:a9fe", "::127.0.0.1"),
    *("64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b::10.1.2.3", "64:ff9b:1::7f00:1", "64:ff9b:1::8.8.8.8"),
    *("2002:7f00:1::", "2002:a9fe:a9fe::1", "2002:808:808::1", "2001:0:7f00:1::", "2001:0:808:808::1"),
    *("::ffff:0:127.0.0.1", "100::1", "2001:2::1", "4000::1", "not an address", ""),
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["::ffff:127.0.0.1"], ["8.8.8.8", "10.0.0.1"], []])
def test_a_name_that_leads_inside_is_refused(addresses: list[str]) -> None:
    async def run() -> None:
        async with Host() as host:
            text = await refuse(make(host.port, Resolver(addresses), is_checked=True), f"http://{NAME}:{host.port}/")
            assert "allowed_media_domains" in text and "127" not in text and "10.0" not in text
            assert host.heads == []

    asyncio.run(run())


def test_addresses_as_hosts_are_checked_too() -> None:
    """Also in forms that only the resolver understands. An operator may have allowed them by mistake."""

    async def run() -> None:
        async with Host() as host:
            for name in ("127.0.0.1", "2130706433", "0x7f000001", "127.1", "localhost", "[::1]"):
                fetcher = Fetcher((f"{name}:{host.port}",), max_bytes=64)
                await refuse(fetcher, f"http://{name}:{host.port}/")
            assert host.heads == []

    asyncio.run(run())


def test_a_name_is_resolved_once() -> None:
    """A resolver that answers with another address the second time is not asked a second time."""

    async def run() -> None:
        async with Host() as host:
            resolver = Resolver(["127.0.0.1"], ["127.0.0.2"])
            assert await make(host.port, resolver).fetch(f"http://{NAME}:{host.port}/", "part") == BODY
            assert len(resolver.asked) == 1

    asyncio.run(run())


def test_the_next_address_is_tried_where_none_listens() -> None:
    async def run() -> None:
        async with Host() as host:
            fetcher = Fetcher(
                (f"{NAME}:{host.port}",),
                max_bytes=64,
                resolve=Resolver(["127.0.0.9", "127.0.0.1"]),
                is_allowed_address=bool,
            )
            assert await fetcher.fetch(f"http://{NAME}:{host.port}/", "part") == BODY

    asyncio.run(run())


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(status: int) -> None:
    async def run() -> None:
        async with Host() as inside:
            target = f"http://{NAME}:{inside.port}/secret"
            answer = f"HTTP/1.1 {status} Moved\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode()
            async with Host(answer) as host:
                text = await refuse(make(host.port), f"http://{NAME}:{host.port}/")
                assert "redirects" in text and "allowed_media_domains" in text and "secret" not in text
                assert inside.heads == [] and len(host.heads) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 secret\r\nContent-Length: 6\r\n\r\nsecret",
        b"HTTP/1.1 500 secret\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nContent-Length: 6\r\n\r\nsecret",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 6\r\n\r\nsecret",
        b"HTTP/1.1 200 OK\r\nContent-Length: 65\r\n\r\n" + b"s" * 65,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"41\r\n" + b"s" * 65 + b"\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nsecret",
        b"HTTP/1.1 200 OK\r\nX: " + b"s" * 1_000_000 + b"\r\n\r\n",
        b"\x00\x01secret",
        b"",
    ],
)
def test_what_a_host_answers_is_not_told(answer: bytes) -> None:
    async def run() -> None:
        async with Host(answer) as host:
            text = await refuse(make(host.port), f"http://{NAME}:{host.port}/")
            assert "secret" not in text and "404" not in text and "allowed_media_domains" in text

    asyncio.run(run())


def test_hosts_that_never_end_are_left_in_time() -> None:
    """One drips its head, one its body, one sends without end, one says nothing."""

    async def drip(writer: asyncio.StreamWriter, first: bytes, each: bytes, pause: float) -> None:
        writer.write(first)
        while True:
            writer.write(each)
            await writer.drain()
            await asyncio.sleep(pause)

    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    cases = (
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", 0.05),
        (head, b"1\r\ns\r\n", 0.05),
        (head, b"3\r\nsss\r\n", 0.0),
        (b"", b"", 0.05),
    )

    async def run() -> None:
        for case in cases:
            async with Host(lambda writer, case=case: drip(writer, *case)) as host:
                fetcher = make(host.port, timeout_s=0.4)
                async with asyncio.timeout(30):
                    assert "allowed_media_domains" in await refuse(fetcher, f"http://{NAME}:{host.port}/")

    asyncio.run(run())


def test_a_resolver_that_fails_or_hangs_is_no_answer() -> None:
    async def fail(host: str, port: int) -> list[str]:
        raise OSError("secret")

    async def hang(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    async def run() -> None:
        for each in (fail, hang):
            fetcher = Fetcher((NAME,), max_bytes=64, timeout_s=0.1, resolve=each)
            assert "secret" not in await refuse(fetcher, f"http://{NAME}/")

    asyncio.run(run())


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def run() -> None:
        async with Host() as host:
            assert await make(host.port).fetch(f"http://{NAME}:{host.port}/", "part") == BODY

    asyncio.run(run())


def test_the_systems_resolver_gives_addresses() -> None:
    assert set(asyncio.run(resolve("localhost", 80))) <= {"127.0.0.1", "::1"}
    with pytest.raises(OSError):
        asyncio.run(resolve("nowhere.invalid", 80))


@pytest.mark.parametrize("domain", ["", "*", "*.test", "http://a.test", "a.test/b", "u@a.test", "a.test:x", "a.test?b"])
def test_domains_must_be_hosts(domain: str) -> None:
    with pytest.raises(ConfigError) as error:
        Fetcher((domain,), max_bytes=64)
    assert error.value.field == "allowed_media_domains"


def test_the_list_of_domains_is_compared_as_urls_are() -> None:
    async def run() -> None:
        fetcher = Fetcher(("MÜNCHEN.test",), max_bytes=64, resolve=Resolver(["10.0.0.1"]))
        assert "not public" in await refuse(fetcher, "https://münchen.TEST/")
        assert "not public" in await refuse(fetcher, "https://xn--mnchen-3ya.test:443/")

    asyncio.run(run())
    assert httpx.URL("http://a.test:80").netloc == b"a.test"
