"""HEAD, HTTP/1.0 and protocol errors as uptime monitors, old proxies and browsers meet them, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from jaxserve.server.app import make_app
from jaxserve.server.options import ServerConfig
from tests.server.asgi import Answer, Client, make_scope, make_state
from tests.server.running import RunningServer

PATHS = ("/", "/health", "/health/live", "/ping", "/version", "/metrics", "/v1/models", "/openapi.json")


def exchange(server: RunningServer, data: bytes) -> tuple[bytes, bytes]:
    """Sends bytes; returns the head and the rest of what came until the end of the connection."""
    address = urlsplit(server.url)
    found = b""
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        connection.sendall(data)
        while piece := connection.recv(2**16):
            found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    return head.lower(), body


def post(body: bytes, version: bytes = b"1.0") -> bytes:
    head = b"POST /v1/completions HTTP/%s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (version, len(body)) + body


@pytest.mark.parametrize("path", PATHS)
def test_head_is_get_without_a_body(http: httpx.Client, path: str) -> None:
    head, got = http.head(path), http.get(path)
    assert head.status_code == got.status_code == 200 and head.content == b""
    assert head.headers.get("content-type") == got.headers.get("content-type")
    if path != "/metrics":  # which changes
        assert head.headers["content-length"] == got.headers["content-length"]


def test_head_of_a_stream_ends_and_of_no_get_is_refused(http: httpx.Client) -> None:
    answer = http.head("/live")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    refused = http.head("/v1/completions")
    assert refused.status_code == 405 and refused.headers["allow"] == "POST" and refused.content == b""
    assert http.post("/v1/models").headers["allow"] == "GET, HEAD"
    assert http.head("/nothing").status_code == 404


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("streams", [False, True])
def test_http_1_0_gets_no_chunks(server: RunningServer, http: httpx.Client, n: int, streams: bool) -> None:
    body = {"prompt": "Once", "max_tokens": 8, "temperature": 0, "n": n, "stream": streams}
    head, answer = exchange(server, post(json.dumps(body).encode()))
    assert head.startswith(b"http/1.1 200") and b"transfer-encoding" not in head and b"connection: close" in head
    texts = dict.fromkeys(range(n), "")
    if streams:
        *events, end, nothing = answer.decode().split("\n\n")
        assert (end, nothing) == ("data: [DONE]", "")
        found = [choice for event in events for choice in json.loads(event.removeprefix("data: "))["choices"]]
    else:
        found = json.loads(answer)["choices"]
    for choice in found:
        texts[choice["index"]] += choice["text"]
    (alone,) = http.post("/v1/completions", json={**body, "n": 1, "stream": False}).json()["choices"]
    assert texts == dict.fromkeys(range(n), alone["text"])


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"GET /health HTTP/9.9\r\n\r\n", 400, "invalid_http"),
        (b"\x16\x03\x01\x02\x00" + b"\x01" * 100, 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_host"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "invalid_host"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 20_000, 431, "head_too_large"),
    ],
    ids=["version", "tls", "no host", "two nodes", "long head"],
)
def test_protocol_errors_have_openais_form(server: RunningServer, data: bytes, status: int, code: str) -> None:
    head, body = exchange(server, data)
    assert head.startswith(b"http/1.1 %d" % status)
    assert b"\r\nx-request-id: " in head and b"\r\ncontent-type: application/json" in head
    assert json.loads(body)["error"]["code"] == code


def test_http_1_0_needs_no_host(server: RunningServer) -> None:
    assert exchange(server, b"GET /health HTTP/1.0\r\n\r\n")[0].startswith(b"http/1.1 200")


def preflight(headers: str, **options: Any) -> Answer:
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = headers
    app = make_app(make_state(allowed_origins=("https://page.example",), access_log=False, **options))
    return asyncio.run(Client().ask(app, make_scope("/v1/chat/completions", "OPTIONS", headers=asked.items())))


def test_the_headers_of_openais_javascript_client_pass() -> None:
    sent = "authorization,content-type,x-stainless-arch,x-stainless-retry-count,x-stainless-timeout"
    answer = preflight(sent)
    allowed = answer.headers["access-control-allow-headers"]
    assert answer.status == 200 and set(sent.split(",")) <= set(allowed.split(","))
    assert preflight(sent, allowed_headers=("Content-Type",)).status == 400, "the operator's list stands"


def test_idle_connections_outlive_the_pools_of_clients_and_proxies() -> None:
    """Node's agents and httpx keep an idle connection for 5 s, nginx and cloud balancers for 60 s."""
    assert ServerConfig.from_options().limits.keep_alive_timeout == 75.0
