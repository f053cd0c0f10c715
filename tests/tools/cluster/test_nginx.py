"""`configs/deploy/nginx.conf`: what reaches the router behind it, of everything that a stranger may ask for."""

from __future__ import annotations

import http.client
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.nodes.hosts import ROOT, find_ports

NGINX = shutil.which("nginx")
pytestmark = pytest.mark.skipif(NGINX is None, reason="needs nginx")
ALLOWED = (
    *("/", "/health", "/health/live", "/health/ready", "/tokenize", "/detokenize", "/v1/models", "/v1/models/a%2Fb"),
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/responses/resp_1?a=..b"),
)
# Every route of vllm-router 0.1.17 but those of clients.
CONTROL = (
    *("/add_worker?url=http://192.0.2.1", "/remove_worker?url=http://127.0.0.1", "/list_workers", "/workers"),
    *("/workers/http%3A%2F%2F127.0.0.1", "/flush_cache", "/get_loads", "/get_load", "/get_server_info"),
    *("/get_model_info", "/readiness", "/liveness", "/health_generate", "/server_info", "/generate", "/rerank"),
    *("/metrics", "/abort_request", "/v1"),
)
DISGUISED = (
    *("//add_worker?url=http://192.0.2.1", "/v1/../add_worker", "/v1/%2e%2e/add_worker", "/v1/%2E./add_worker"),
    *("/v1/x/..%2f..%2fadd_worker", "/./add_worker", "/health/../add_worker", "/health/../../list_workers"),
    *("/%61dd_worker", "/add_worker/", "/tokenize/../workers", "/v1/..;/add_worker", "/V1/models", "/health%00"),
)
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")


class Router:
    """In place of the router: notes each request that reaches it."""

    def __init__(self) -> None:
        seen = self.seen = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do(self) -> None:
                seen.append((self.command, self.path, self.headers.get("Authorization")))
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else b"ok")

            do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_PATCH = do

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.port = self.server.server_address[1]


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    router = Router()
    yield router
    router.server.shutdown()


@pytest.fixture(scope="module")
def port(router: Router, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The open port of nginx with the shipped configuration, before `router`."""
    folder = tmp_path_factory.mktemp("nginx")
    (port,) = find_ports(1)
    text = Path(ROOT, "configs", "deploy", "nginx.conf").read_text()
    for shipped, here in (
        ("server 127.0.0.1:8000;", f"server 127.0.0.1:{router.port};"),
        ("listen 8080;", f"listen {port};"),
    ):
        assert text.count(shipped) == 1
        text = text.replace(shipped, here)
    (folder / "nginx.conf").write_text(text)
    process = subprocess.Popen(
        [str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
            break
        except OSError:
            time.sleep(0.05)
    assert process.poll() is None, process.communicate()[1]
    yield port
    process.terminate()
    process.wait(30)


def ask(port: int, method: str, path: str, key: str | None = None) -> int:
    """Sends a path as it is, which clients' libraries would tidy; returns the status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest(method, path, skip_accept_encoding=True)
    if key is not None:
        connection.putheader("Authorization", f"Bearer {key}")
    if method in ("POST", "PUT", "PATCH"):
        connection.putheader("Content-Length", "2")
    connection.endheaders(b"{}" if method in ("POST", "PUT", "PATCH") else None)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("key", [None, "a-key"])
def test_no_control_endpoint_is_reached(router: Router, port: int, key: str | None) -> None:
    router.seen.clear()
    found = {(method, path): ask(port, method, path, key) for path in (*CONTROL, *DISGUISED) for method in METHODS}
    assert router.seen == [], "nothing of it got through"
    assert not {asked: status for asked, status in found.items() if status < 400}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_clients_need_gets_through_as_it_came(router: Router, port: int, method: str) -> None:
    router.seen.clear()
    assert {ask(port, method, path, "a-key") for path in ALLOWED} == {200}
    assert router.seen == [(method, path, "Bearer a-key") for path in ALLOWED]


def test_other_methods_are_refused(router: Router, port: int) -> None:
    router.seen.clear()
    assert {ask(port, method, "/v1/models") for method in ("PUT", "DELETE", "PATCH")} == {403}
    assert router.seen == []
