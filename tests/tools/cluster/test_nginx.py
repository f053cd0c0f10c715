"""nginx in front of vllm-router: what reaches the router and the copies, of everything that a stranger may ask for."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jaxserve.server.options import ServerConfig
from jaxserve.tools.cluster.nginx import find_nginx, make_nginx
from jaxserve.tools.cluster.replicas import find_free_ports
from jaxserve.tools.cluster.router import draw_address
from jaxserve.tools.cluster.service import RunningService

pytestmark = pytest.mark.skipif(find_nginx() is None, reason="needs nginx")
KEY = "a-key-of-this-test"
WORK = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
# Every other route of vllm-router 0.1.17.
CONTROL = (
    *("/add_worker?url=http://192.0.2.1", "/remove_worker?url=http://127.0.0.1", "/list_workers", "/workers"),
    *("/workers/http%3A%2F%2F127.0.0.1", "/flush_cache", "/get_loads", "/get_server_info", "/get_model_info"),
    *("/readiness", "/liveness", "/health", "/health_generate", "/generate", "/rerank", "/v1/rerank", "/v1/models"),
    *("/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/v1/responses/resp_1/input"),
)
DISGUISED = (
    *("//add_worker?url=http://192.0.2.1", "/v1/../add_worker", "/v1/%2e%2e/add_worker", "/v1/%2E./add_worker"),
    *("/v1/x/..%2f..%2fadd_worker", "/./add_worker", "/health/../add_worker", "/health/../../list_workers"),
    *("/%61dd_worker", "/add_worker/", "/tokenize/../workers", "/v1/..;/add_worker", "/V1/completions", "/health%00"),
    *("/v1/completions/../../add_worker", "/v1/completions%0a", "/v1/completions/", "/add_worker#/v1/completions"),
)
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")


class Page(BaseHTTPRequestHandler):
    """Notes each request; with `keys`, refuses those without the key."""

    protocol_version = "HTTP/1.1"
    server: Stand

    def do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, self.path, body))
        self.server.heads.append(dict(self.headers))
        refused = self.server.checks_keys and self.headers.get("Authorization") != f"Bearer {KEY}"
        self.send_response(401 if refused else self.server.status)
        answer = b"a key is required" if refused else b"ok"
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else answer)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_PATCH = do

    def log_message(self, *_: object) -> None:
        pass


class Stand(ThreadingHTTPServer):
    """In place of the router or a copy."""

    daemon_threads = True

    def __init__(self, host: str, *, checks_keys: bool) -> None:
        super().__init__((host, 0), Page)
        self.checks_keys, self.status = checks_keys, 200
        self.seen: list[tuple[str, str, bytes]] = []
        self.heads: list[dict[str, str]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def place(self) -> str:
        return f"{self.server_address[0]!s}:{self.server_address[1]}"

    def forget(self) -> None:
        self.seen.clear()
        self.heads.clear()
        self.status = 200


class Front:
    """nginx before a router and two copies, of which the second does not listen."""

    def __init__(self, folder: Path) -> None:
        self.router, self.copy = Stand(draw_address(), checks_keys=False), Stand("127.0.0.1", checks_keys=True)
        self.port, closed = find_free_ports(2)
        config = ServerConfig.from_options(port=self.port, max_body_bytes=1000)
        places = [self.copy.place, f"127.0.0.1:{closed}"]
        service = make_nginx(str(find_nginx()), folder, config, router=self.router.place, copies=places)
        self.copy.checks_keys = False  # for the probe
        self.process = RunningService(service)
        self.process.start()
        deadline = time.monotonic() + 60
        while not self.process.is_ready:
            assert self.process.is_running and time.monotonic() < deadline
            self.process.look()
            time.sleep(0.05)

    def forget(self) -> None:
        self.router.forget()
        self.copy.forget()
        self.copy.checks_keys = True

    def ask(self, method: str, path: str, key: str | None = KEY, **headers: str) -> tuple[int, bytes]:
        """Sends a path as it is, which clients' libraries would tidy; returns the status and the body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.putrequest(method, path, skip_accept_encoding=True)
        if key is not None:
            connection.putheader("Authorization", f"Bearer {key}")
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        has_body = method in ("POST", "PUT", "PATCH")
        if has_body:
            connection.putheader("Content-Length", "2")
        connection.endheaders(b"{}" if has_body else None)
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    def end(self) -> None:
        self.process.send(signal.SIGTERM)
        self.process.wait(30)
        self.router.shutdown()
        self.copy.shutdown()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    front = Front(tmp_path_factory.mktemp("nginx"))
    yield front
    front.end()


@pytest.fixture
def front(started: Front) -> Front:
    started.forget()
    return started


@pytest.mark.parametrize("key", [None, KEY])
def test_no_control_endpoint_is_reached(front: Front, key: str | None) -> None:
    for path in (*CONTROL, *DISGUISED):
        for method in METHODS:
            front.ask(method, path, key)
    assert front.router.seen == [], "nothing of it got through to the router"
    assert ("POST", CONTROL[0], b"{}") in front.copy.seen, "a copy refuses it, as it does without a router"


def test_work_reaches_the_router_with_its_key(front: Front) -> None:
    for path in WORK:
        assert front.ask("POST", path, X_Label="a") == (200, b"ok")
    assert front.router.seen == [("POST", path, b"{}") for path in WORK]
    assert {head["Authorization"] for head in front.router.heads} == {f"Bearer {KEY}"}
    assert {head["X-Label"] for head in front.router.heads} == {"a"}
    assert front.copy.seen == [("GET", "/version", b"")] * len(WORK), "a copy was asked about the key"


@pytest.mark.parametrize("path", ["/v1//completions", "/v1/x/../completions", "/v1/%63ompletions", "/v1/./completions"])
def test_the_router_gets_each_path_as_the_configuration_writes_it(front: Front, path: str) -> None:
    front.ask("POST", path)
    assert front.router.seen == [("POST", "/v1/completions", b"{}")]


def test_other_methods_are_for_a_copy_to_refuse(front: Front) -> None:
    for method in METHODS:
        if method != "POST":
            front.ask(method, WORK[0], None)
    assert front.router.seen == []
    assert [method for method, *_ in front.copy.seen] == [method for method in METHODS if method != "POST"]


def test_everything_else_reaches_a_copy_as_it_came(front: Front) -> None:
    paths = ("/", "/health", "/health/ready", "/v1/models/a%2Fb", "/tokenize?a=..b", "/playground/chat.js")
    for path in paths:
        assert front.ask("GET", path) == (200, b"ok")
    assert front.copy.seen == [("GET", path, b"") for path in paths]


@pytest.mark.parametrize("path", ["/metrics", "/live"])
def test_what_one_copy_knows_of_itself_is_not_there(front: Front, path: str) -> None:
    assert front.ask("GET", path)[0] == 404
    assert front.copy.seen == []


def test_a_key_is_refused_before_its_body_is_taken(front: Front) -> None:
    with socket.create_connection(("127.0.0.1", front.port), 30) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer no\r\nContent-Length: 999\r\n\r\n"
        )
        answer = client.recv(2**16)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401 ") and json.loads(body)["error"]["code"] == "invalid_api_key"
    assert front.router.seen == []


def test_a_body_beyond_the_limit_is_refused(front: Front) -> None:
    assert front.ask("POST", WORK[0], Content_Length="1001")[0] in (400, 413)
    with socket.create_connection(("127.0.0.1", front.port), 30) as client:
        client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 1001\r\n\r\n")
        assert client.recv(2**16).startswith(b"HTTP/1.1 413 ")
    assert front.router.seen == front.copy.seen == []


def test_pages_of_this_address_are_not_foreign(front: Front) -> None:
    here = f"127.0.0.1:{front.port}"
    for origin in (f"http://{here}", "https://elsewhere.example", f"http://{here}.elsewhere.example", "null"):
        front.ask("POST", WORK[0], Origin=origin)
    foreign = [None, "https://elsewhere.example", f"http://{here}.elsewhere.example", "null"]
    assert [head.get("Origin") for head in front.router.heads] == foreign
    assert [head.get("Origin") for head in front.copy.heads] == foreign
    assert {head["Host"] for head in front.copy.heads} == {here}


def test_a_foreign_page_gets_an_error_that_clients_read(front: Front) -> None:
    front.copy.status = 403
    status, body = front.ask("POST", WORK[0], Origin="https://elsewhere.example")
    assert status == 403 and "--allowed-origins" in json.loads(body)["error"]["message"]
    assert front.router.seen == []


def test_without_a_copy_the_error_is_one_that_clients_know(front: Front) -> None:
    front.copy.status = 503
    front.copy.checks_keys = False
    status, body = front.ask("POST", WORK[0])
    assert status == 503 and json.loads(body)["error"]["type"] == "service_unavailable_error"
    assert front.router.seen == []


def test_it_ends_with_whoever_started_it(tmp_path: Path) -> None:
    (port,) = find_free_ports(1)
    program = (
        "import sys, time; from pathlib import Path\n"
        "from jaxserve.tools.cluster.nginx import *; from jaxserve.tools.cluster.service import *\n"
        f"config = ServerConfig.from_options(port={port})\n"
        f"RunningService(make_nginx(find_nginx(), Path({str(tmp_path)!r}), config, router='127.0.0.1:1',"
        " copies=['127.0.0.1:1'])).start()\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    wait_for(port, listens=True)
    process.kill()
    process.wait()
    wait_for(port, listens=False)


def wait_for(port: int, *, listens: bool) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
            found = True
        except OSError:
            found = False
        if found == listens:
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)
