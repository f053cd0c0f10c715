"""TLS: certificates of one's own and their renewal, and handshakes that hold nothing open."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import SMALL
from tests.server.pressure import wait_until
from tests.server.running import START_SECONDS, RunningServer, launch

KEY = "sk-tls-0123456789"
BEARER = {"Authorization": f"Bearer {KEY}"}
MAX_CONNECTIONS, MAX_HANDSHAKE = 8, 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def certify(folder: Path) -> Callable[[], ssl.SSLContext]:
    """What makes a new pair of files, and returns a context that trusts it."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed, so there is no certificate to test TLS with")

    def make() -> ssl.SSLContext:
        command = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        command += ["-addext", "subjectAltName=IP:127.0.0.1"]
        command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
        subprocess.run(command, check=True, capture_output=True)
        return ssl.create_default_context(cafile=str(folder / "cert.pem"))

    return make


@pytest.fixture(scope="module")
def trust(certify: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    return certify()


@pytest.fixture(scope="module")
def server(folder: Path, trust: ssl.SSLContext) -> Iterator[RunningServer]:
    files = ("--ssl-keyfile", str(folder / "key.pem"), "--ssl-certfile", str(folder / "cert.pem"))
    limits = ("--max-connections", str(MAX_CONNECTIONS), "--body-timeout", str(MAX_HANDSHAKE))
    running = launch(*SMALL, *files, *limits, "--api-key", KEY)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not running.url and time.monotonic() < deadline and running.process.poll() is None:
            time.sleep(0.05)
        assert running.url.startswith("https://"), running.lines
        yield running
    finally:
        assert running.stop() in (0, -signal.SIGTERM)


def connect(server: RunningServer) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port), timeout=30)


def is_open(client: socket.socket) -> bool:
    client.settimeout(0.001)
    try:
        return client.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


def test_more_silent_sockets_than_connections_keep_nobody_out(server: RunningServer, trust: ssl.SSLContext) -> None:
    """They begin no handshake, so nobody would know of them where the event loop shakes hands."""
    crowd = [connect(server) for _ in range(30 * MAX_CONNECTIONS)]
    try:
        with httpx.Client(base_url=server.url, verify=trust, headers=BEARER) as http:
            assert http.get("/version").status_code == 200
            wait_until(lambda: sum(map(is_open, crowd)) < MAX_CONNECTIONS)
            assert http.get("/version").status_code == 200, "the connection that was used last stays"
            wait_until(lambda: not any(map(is_open, crowd)), MAX_HANDSHAKE + 10)
    finally:
        for client in crowd:
            client.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\x00" * 4096])
def test_what_is_no_handshake_is_closed(server: RunningServer, trust: ssl.SSLContext, data: bytes) -> None:
    with connect(server) as client:
        client.sendall(data)
        wait_until(lambda: not is_open(client), MAX_HANDSHAKE + 10)
    assert httpx.get(f"{server.url}/health/live", verify=trust).status_code == 200


def test_a_request_right_behind_the_handshake(server: RunningServer, trust: ssl.SSLContext) -> None:
    """Both may come in one packet, before HTTP's part of the connection is there."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    talk = trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with connect(server) as client:
        while True:
            try:
                talk.do_handshake()
                break
            except ssl.SSLWantReadError:
                client.sendall(outgoing.read())
                incoming.write(client.recv(1 << 16))
        talk.write(b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        client.sendall(outgoing.read())  # the last bytes of the handshake, and the request
        answer = b""
        while not answer.startswith(b"HTTP/1.1 200"):
            try:
                answer += talk.read()
            except ssl.SSLWantReadError:
                data = client.recv(1 << 16)
                assert data, "closed without an answer"
                incoming.write(data)


def test_many_requests_share_a_connection(server: RunningServer, trust: ssl.SSLContext) -> None:
    ports = set()
    with httpx.Client(base_url=server.url, verify=trust, headers=BEARER) as http:
        for path in ["/health/live", "/playground/playground.js", "/openapi.json", "/metrics"] * 10:
            answer = http.get(path)
            assert answer.status_code == 200
            ports.add(answer.extensions["network_stream"].get_extra_info("client_addr")[1])
    assert len(ports) == 1


def test_certificates_of_ones_own_and_new_ones(
    server: RunningServer, folder: Path, certify: Callable[[], ssl.SSLContext], trust: ssl.SSLContext
) -> None:
    with httpx.Client(base_url=server.url, verify=trust) as http:
        assert http.get("/health").status_code in (200, 503)
        assert http.get("/version").status_code == 401
        assert http.get("/version", headers=BEARER).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")  # nobody vouches for the certificate
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url.replace('https', 'http')}/health")
    newer = certify()
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: any("SIGHUP: 1 keys, and the TLS files" in line for line in list(server.lines)))
    assert httpx.get(f"{server.url}/health/live", verify=newer).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health/live", verify=trust)
    (folder / "key.pem").write_text("broken")
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: any("SIGHUP: nothing is changed" in line for line in list(server.lines)))
    assert httpx.get(f"{server.url}/health/live", verify=newer).status_code == 200
