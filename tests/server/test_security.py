"""Who gets in, what leaves, and what listens: keys, logs, sockets, origins, TLS."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import uvicorn

from jaxserve.server import launch as launch_module
from jaxserve.tools.cli import main
from tests.server.conftest import SMALL
from tests.server.pressure import wait_until
from tests.server.refusals import KEYLESS, check_refusal
from tests.server.running import START_SECONDS, RunningServer, launch

FLAG, FILED, SECOND, ENVIRONED = "key-from-flag-1", "key-from-file-2", "key-from-file-3", "key-from-environment-4"
CRAWLER = "key-of-a-tenant-5"
KEYS = (FLAG, FILED, SECOND, ENVIRONED, CRAWLER)
ORIGIN = "https://page.example"
OPEN = ("/", "/health", "/health/generate", "/health/live", "/health/ready", "/ping")
GUARDED = (
    *("/v1/models", "/v1/models/demo", "/metrics", "/live", "/openapi.json", "/version", "/tokenize"),
    *(
        "/v1/responses/input_tokens",
        "/detokenize",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        *("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/pooling", "/v2/embed"),
        "/nothing",
        "/v1",
    ),
)
# More than one page of tokens, so that a repetition finds some of them in the prefix cache.
PROMPT = "The little dog walked to the garden and sat down under the tall tree. " * 6


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    path.write_text(f"{FILED}\n\n  {SECOND}  \n")
    tenants = path.with_name("tenants.toml")
    tenants.touch(0o600)
    tenants.write_text(write_tenant("crawler", CRAWLER, 'tiers = ["flex"]'))
    flags = ("--api-key", FLAG, "--api-key-file", str(path), "--tenants", str(tenants), "--allowed-origins", ORIGIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSERVE_API_KEY", f"{ENVIRONED},")
        running = launch(*SMALL, *flags)
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.stop()


def write_tenant(name: str, key: str, *fields: str) -> str:
    """A table of a tenants file."""
    hashed = hashlib.sha256(key.encode()).hexdigest()
    return "\n".join(["[[tenants]]", f'name = "{name}"', f'key_hash = "{hashed}"', *fields, ""])


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def complete(server: RunningServer, key: str | None = None, **fields: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, **fields}
    return httpx.post(
        f"{server.url}/v1/completions", json=body, headers=bearer(key) if key is not None else {}, timeout=60
    )


# --- keys


def test_every_key_opens(guarded: RunningServer) -> None:
    for key in KEYS:
        assert complete(guarded, key).status_code == 200
        assert openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key).models.list().data[0].id == "demo"
    for headers in ({"Authorization": f"bearer  {FLAG}"}, {"X-Api-Key": FLAG}):
        assert httpx.get(f"{guarded.url}/v1/models", headers=headers).status_code == 200


def test_everything_else_stays_closed(guarded: RunningServer) -> None:
    wrong = [{}, bearer("x"), {"authorization": FLAG}, {"api-key": FLAG}, {"x-api-key": "x"}]
    wrong.append({"x-api-key": FLAG, "authorization": "Bearer x"})
    with httpx.Client(base_url=guarded.url) as http:
        for headers in wrong:
            answer = http.get("/v1/models", headers=headers)
            assert answer.headers["www-authenticate"] == "Bearer"
            check_refusal(answer, KEYLESS)
        for path in GUARDED:
            for method in ("GET", "POST", "OPTIONS", "HEAD", "PUT"):
                assert http.request(method, path).status_code == 401, (method, path)
            assert http.get(f"{path}?api_key={FLAG}").status_code == 401
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong-key").models.list()


def test_health_and_the_page_are_open(guarded: RunningServer) -> None:
    with httpx.Client(base_url=guarded.url) as http:
        for path in OPEN:
            answer = http.get(path)
            assert answer.status_code == 200, path
            assert not any(key in answer.text for key in KEYS) and "demo" not in answer.headers.values()
        page = http.get("/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        for name in re.findall(r'(?:src|href)="(/playground/[^"]+)"', page.text):
            assert http.get(name).status_code == 200


def test_no_way_of_writing_a_path_goes_around_the_key(guarded: RunningServer) -> None:
    paths = [
        *("//v1/models", "/v1//models", "/./v1/models", "/v1/../health", "/health/../v1/models", "/v1/%2e%2e/health"),
        *("/%2f/v1/models", "/health%2f..%2fv1/models", "/health/", "/health?/v1/models", "/V1/models", "/v1/models/"),
        *("http://a/v1/models", "/playground/../v1/models", "/playground/..%2fv1/models", "/health#/v1/models", "*"),
        *("/health;/v1/models", "/v1/models%00", "/health%00/v1/models", "\\health", "/health\\..\\v1\\models"),
    ]
    for path in paths:
        for host in ("a", "a/health", "a:80@b", "/health", ""):
            status, answer = _send(guarded, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
            assert status != 200 or path.startswith("/health"), (path, host, answer)
            assert b'"owned_by"' not in answer
    heads = (
        "X-Forwarded-Prefix: /health\r\nX-Original-URL: /health\r\nX-Rewrite-URL: /health\r\nX-Forwarded-For: 127.0.0.1"
    )
    assert _send(guarded, f"GET /v1/models HTTP/1.1\r\nHost: a\r\n{heads}\r\nConnection: close\r\n\r\n")[0] == 401
    double = f"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer x\r\nAuthorization: Bearer {FLAG}\r\n"
    assert _send(guarded, f"{double}Connection: close\r\n\r\n")[0] == 401


def _send(server: RunningServer, text: str) -> tuple[int, bytes]:
    address, found = urlsplit(server.url), b""
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(text.encode())
        while piece := connection.recv(2**16):
            found += piece
    return int(found.split(b" ", 2)[1]), found


def test_keys_share_no_cached_prefixes(guarded: RunningServer) -> None:
    def cached(key: str, **fields: Any) -> int:
        answer = complete(guarded, key, prompt=f"Once there was a salt. {PROMPT}", **fields)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(FLAG) == 0 < cached(FLAG)
    assert cached(FILED) == 0 < cached(FILED)
    assert cached(FLAG, cache_salt="mine") == 0 < cached(FLAG, cache_salt="mine")
    assert cached(FLAG) > 0


def test_logs_hold_neither_keys_nor_texts(guarded: RunningServer) -> None:
    secret = "Xylophone-quartz-91"
    complete(guarded, FLAG, prompt=f"{secret} {PROMPT}")
    complete(guarded, f"wrong-{secret}")
    complete(guarded, FLAG, prompt=f"{secret} " * 2000)
    complete(guarded, FLAG, temperature=secret)
    complete(guarded, FLAG, user=secret, cache_salt=secret, stop=[secret], bad_words=[secret], model=secret)
    complete(guarded, FLAG, **{secret: secret})
    complete(guarded, FLAG, structured_outputs={"regex": f"{secret}("})
    url = f"{guarded.url}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 20}
    assert httpx.post(url, json=body, headers=bearer(FLAG)).status_code == 200
    with httpx.stream("POST", url, json={**body, "stream": True, "max_tokens": 500}, headers=bearer(FLAG)) as stream:
        next(stream.iter_lines())  # and away
    httpx.get(f"{guarded.url}/v1/models?key={secret}", headers=bearer(FLAG))
    httpx.get(f"{guarded.url}/v1/models", headers={**bearer(FLAG), "user-agent": secret, "referer": secret})
    deadline = time.monotonic() + 10
    while not any("GET /v1/models" in line for line in guarded.lines[-2:]) and time.monotonic() < deadline:
        time.sleep(0.05)
    text = "\n".join(guarded.lines)
    assert "/v1/chat/completions" in text
    assert secret not in text and "little dog" not in text
    assert not any(key in text for key in KEYS)
    assert not any(key in Path(f"/proc/{guarded.process.pid}/environ").read_text() for key in KEYS if key != ENVIRONED)


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens in this process, and the process stays as it is."""

    async def listen(*_: object) -> None:
        raise AssertionError("it starts")

    monkeypatch.setattr(uvicorn.Server, "startup", listen)
    monkeypatch.setattr(launch_module, "_SWITCH_INTERVAL", sys.getswitchinterval())
    monkeypatch.setattr(launch_module, "raise_descriptor_limit", lambda: None)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--host", "0.0.0.0"), "host"),
        (("--host", "::"), "host"),
        (("--host", "192.168.0.1"), "host"),
        (("--api-key", "short"), "api_key"),
        (("--api-key", "with a blank in it"), "api_key"),
        (("--api-key-file", "/nowhere/keys"), "api_key_file"),
        (("--tenants", "/nowhere/tenants.toml"), "tenants"),
        (("--tenants", __file__), "tenants"),
        (("--ssl-certfile", "/nowhere/cert.pem"), "ssl_certfile"),
        (("--ssl-certfile", "/nowhere/cert.pem", "--ssl-keyfile", "/nowhere/key.pem"), "/nowhere/cert.pem"),
        (("--ssl-certfile", __file__, "--ssl-keyfile", __file__), "ssl_certfile"),
        (("--ssl-ca-certs", "/nowhere/ca.pem"), "ssl_ca_certs"),  # without TLS nobody is asked for a certificate
        (("--uds", ""), "uds"),
        (("--uds", "/nowhere/serve.sock"), "/nowhere/serve.sock"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_safe_does_not_start(
    never: None, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], names: str
) -> None:
    assert main(["serve", *flags]) == 2
    (line,) = "".join(capsys.readouterr()).splitlines()
    assert names in line
    assert "short" not in line and "blank in it" not in line


def test_an_admin_port_that_is_taken_ends_the_start_with_a_reason(
    never: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--admin-port", str(taken.getsockname()[1])]) == 2
    (line,) = "".join(capsys.readouterr()).splitlines()
    assert "admin_port" in line


# --- origins


def test_browsers_of_other_origins_are_let_in_by_option_only(guarded: RunningServer, server: RunningServer) -> None:
    def ask(running: RunningServer, origin: str) -> httpx.Response:
        headers = {"origin": origin, "access-control-request-method": "POST"}
        headers["access-control-request-headers"] = "authorization,content-type"
        return httpx.options(f"{running.url}/v1/chat/completions", headers=headers)

    allowed = ask(guarded, ORIGIN)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in allowed.headers
    assert ask(guarded, "https://evil.example").headers.get("access-control-allow-origin") is None
    answer = httpx.get(f"{guarded.url}/v1/models", headers={"origin": ORIGIN, **bearer(FLAG)})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == ORIGIN
    assert httpx.get(f"{guarded.url}/v1/models", headers={"origin": ORIGIN}).status_code == 401
    for origin in (ORIGIN, "null", server.url):
        answer = ask(server, origin)
        is_own = origin == server.url
        assert answer.status_code == (405 if is_own else 403)
        assert not any(name.startswith("access-control") for name in answer.headers)
        plain = httpx.get(f"{server.url}/v1/models", headers={"origin": origin})
        assert plain.status_code == (200 if is_own else 403)
        assert not any(name.startswith("access-control") for name in plain.headers)


def test_a_page_of_anybodys_cannot_use_a_server_without_keys(server: RunningServer) -> None:
    """Forms and fetches of a plain type, for which a browser does not ask first, are in the table of refusals."""
    body = b'{"prompt": "Once", "max_tokens": 1}'
    headers = {"content-type": "application/json", "origin": "https://evil.example"}
    assert httpx.post(f"{server.url}/v1/completions", content=body, headers=headers).status_code == 403
    headers = {"content-type": "application/json; charset=utf-8", "origin": server.url}
    assert httpx.post(f"{server.url}/v1/completions", content=body, headers=headers).status_code == 200


# --- tenants


def test_a_tenant_may_do_what_its_key_may(guarded: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=CRAWLER, max_retries=0)
    named: Any = {"model": "demo", "prompt": "Once", "max_tokens": 2}
    assert client.completions.create(**named, extra_body={"service_tier": "flex"}).service_tier == "flex"
    assert client.completions.create(**named, extra_body={"service_tier": "auto"}).service_tier == "flex"
    for fields, param in (({"service_tier": "priority"}, "service_tier"), ({"priority": -1}, "priority")):
        kind = openai.PermissionDeniedError if param == "service_tier" else openai.BadRequestError
        with pytest.raises(kind) as refused:
            client.completions.create(**named, extra_body=fields)
        assert refused.value.param == param
    wait_until(lambda: any(" crawler  " in line and " 403 POST /v1/completions" in line for line in guarded.lines))


def test_tenants_are_read_again_at_sighup(guarded: RunningServer) -> None:
    path, new = find_file(guarded, "--tenants"), "key-of-a-tenant-6"
    content = path.read_text()
    try:
        reload_file(guarded, path, content + write_tenant("new", new), "SIGHUP: 6 keys")
        assert complete(guarded, new, service_tier="priority").status_code == 200
        path.chmod(0o666)
        reload_file(guarded, path, content, "SIGHUP: nothing is changed")
        assert complete(guarded, new).status_code == 200
    finally:
        path.chmod(0o600)
        reload_file(guarded, path, content, "SIGHUP: 5 keys")
    assert complete(guarded, new).status_code == 401


# --- reloading


def find_file(guarded: RunningServer, flag: str) -> Path:
    return Path(guarded.process.args[guarded.process.args.index(flag) + 1])  # type: ignore[arg-type, index, union-attr]


def reload_file(guarded: RunningServer, path: Path, content: str, says: str) -> None:
    """Writes a file, tells the server, and waits for the line that begins so."""

    def count() -> int:
        return sum(says in line for line in list(guarded.lines))

    path.write_text(content)
    before = count()
    guarded.process.send_signal(signal.SIGHUP)
    wait_until(lambda: count() > before)


def test_keys_are_read_again_at_sighup(guarded: RunningServer) -> None:
    path = find_file(guarded, "--api-key-file")
    content, new = path.read_text(), "key-from-file-new-5"

    def reload(content: str, says: str) -> None:
        reload_file(guarded, path, content, says)

    try:
        reload(f"{FILED}\n{new}\n", "SIGHUP: 5 keys")
        assert [complete(guarded, key).status_code for key in (new, FILED, FLAG, ENVIRONED)] == [200] * 4
        assert complete(guarded, SECOND).status_code == 401, "it is not in the file any more"
        reload("short", "SIGHUP: nothing is changed")
        assert complete(guarded, new).status_code == 200
        assert "short" not in guarded.lines[-1]
    finally:
        reload(content, "SIGHUP: 5 keys")
    assert complete(guarded, new).status_code == 401 and complete(guarded, SECOND).status_code == 200


# --- sockets


def test_only_the_port_listens_and_on_this_machine_only(server: RunningServer) -> None:
    complete(server, structured_outputs={"choice": ["a", "b"]})  # starts the worker that checks grammars
    found = [entry for pid in _list_family(server.process.pid) for entry in _list_sockets(pid)]
    listening = {(address, port) for address, port, state in found if state == "0A"}
    assert listening == {("0100007F", urlsplit(server.url).port)}
    connected = {address for address, _, state in found if state != "0A"}
    assert connected <= {"0100007F"}  # none to anywhere else


def _list_family(pid: int) -> list[int]:
    """The process and everything that it has started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [each for child in (task / "children").read_text().split() for each in _list_family(int(child))]
    return found


def _list_sockets(pid: int) -> list[tuple[str, int, str]]:
    """(address, port, state) of the process's own TCP and UDP sockets, as /proc/net has them."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
        except OSError:
            continue  # closed meanwhile
    found = []
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in own:
                address, _, port = fields[1].partition(":")
                found.append((address, int(port, 16), fields[3] if kind.startswith("tcp") else "0A"))
    return found


def test_a_unix_socket_takes_the_place_of_the_port(tmp_path: Path, never: None) -> None:
    path = tmp_path / "serve.sock"
    running = launch(*SMALL, "--uds", str(path))
    try:
        deadline = time.monotonic() + START_SECONDS
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as http:
            while time.monotonic() < deadline and running.process.poll() is None:
                if path.exists() and http.get("/health").status_code in (200, 503):
                    break
                time.sleep(0.05)
            assert http.get("/ping").status_code in (200, 503), running.lines
            assert http.get("/version").json()["version"]
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert main(["serve", "--uds", str(path)]) == 2, "it would take the socket away"
            assert http.get("/ping").status_code in (200, 503)
        assert not [entry for entry in _list_sockets(running.process.pid) if entry[2] == "0A"]
    finally:
        assert running.stop() in (0, -15)
