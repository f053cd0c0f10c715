"""Two servers behind nginx and vllm-router, as `serve --data-parallel-size 2` starts them; for `make test-cluster`."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest

from jaxserve.tools.cluster.nginx import find_nginx
from tests.nodes.nodes import FLAGS, ROOT, find_ports
from tests.programs import PROGRAMS
from tests.tools.cluster.clients import stream_sum
from tests.tools.cluster.test_nginx import CONTROL, DISGUISED, METHODS, Stand

pytest.importorskip("vllm_router", reason="needs the extra router")
pytestmark = pytest.mark.skipif(find_nginx() is None, reason="needs nginx")
KEY = "a-key-of-this-test"
SECONDS = 180.0


class Pair:
    """The supervisor, and what it wrote."""

    def __init__(self, log: Path) -> None:
        (self.port,) = find_ports(1)
        self.log = log
        command = [sys.executable, "-m", "jaxserve", "serve", "--data-parallel-size", "2", "--port", str(self.port)]
        command += [*FLAGS, "--api-key", KEY, "--compilation-cache-dir", str(PROGRAMS)]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=file, stderr=file
            )
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=KEY, max_retries=0)

    def wait_for(self, text: str, count: int = 1) -> None:
        """Waits until the log has a text so many times."""
        deadline = time.monotonic() + SECONDS
        while self.log.read_text().count(text) < count:
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.1)

    def wait_until_answered(self) -> None:
        """Waits until the router answers a request."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                self.client.models.list()
                return
            except openai.APIError:
                assert time.monotonic() < deadline, self.log.read_text()[-3000:]
                time.sleep(0.1)

    def find_servers(self) -> list[tuple[int, str]]:
        """Returns (process, URL) of each server."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            words = path.read_bytes().decode(errors="replace").split("\0") if path.exists() else []
            if "--data-parallel-rank" in words and str(self.port) in words:
                port = words[len(words) - 1 - words[::-1].index("--port") + 1]
                found.append((int(path.parent.name), f"http://127.0.0.1:{port}"))
        return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair") / "log")
    try:
        pair.wait_for("2 replicas are ready")
        pair.wait_until_answered()
        yield pair
        servers = pair.find_servers()
        pair.process.send_signal(signal.SIGTERM)
        assert pair.process.wait(60) == 0, pair.log.read_text()[-3000:]
        assert servers and not any(Path(f"/proc/{pid}").exists() for pid, _ in servers)
    finally:
        if pair.process.poll() is None:
            pair.process.kill()
            pair.process.wait(20)


def ask(pair: Pair, text: str, **fields: Any) -> str:
    given: dict[str, Any] = {"max_tokens": 64, "temperature": 0, **fields}
    answer = pair.client.chat.completions.create(model="demo", messages=[{"role": "user", "content": text}], **given)
    return answer.choices[0].message.content or ""


def test_openai_clients_see_one_server(pair: Pair) -> None:
    assert pair.client.models.list().data[0].id == "demo"
    assert ask(pair, "What is 123 + 45?").endswith("168")
    found = stream_sum(pair.client)
    assert found[-1].usage is not None and found[-1].usage.completion_tokens == 43
    completion = pair.client.completions.create(model="demo", prompt="Once", max_tokens=5, n=2, seed=1, logprobs=1)
    assert len(completion.choices) == 2
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    assert '"age"' in ask(pair, "name: Ada, age: 36", response_format=form, max_tokens=60)


@pytest.mark.parametrize("key", [None, KEY])
def test_nobody_adds_a_server_through_the_open_port(pair: Pair, key: str | None) -> None:
    """Asks for every route of vllm-router but the four of clients: by `/add_worker` a stranger got all requests."""
    stranger = Stand("127.0.0.1", checks_keys=False)
    head = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    body = json.dumps({"url": f"http://{stranger.place}"}).encode()
    for path in (*CONTROL, *DISGUISED):
        for method in METHODS:
            here = path.replace("192.0.2.1", stranger.place)
            ask_raw(pair, method, here, head, b"" if method in ("GET", "HEAD", "OPTIONS") else body)
    for _, url in pair.find_servers():
        for path in (f"/remove_worker?url={url}", f"/workers/{quote(url, safe='')}"):
            for method in ("POST", "DELETE"):
                assert ask_raw(pair, method, path, head, b"") >= 400
    assert [ask(pair, f"What is {index} + 45?", max_tokens=4) for index in range(8)]
    assert stranger.seen == []
    stranger.shutdown()


def ask_raw(pair: Pair, method: str, path: str, head: dict[str, str], body: bytes) -> int:
    """Sends a path as it is; returns the status."""
    connection = http.client.HTTPConnection("127.0.0.1", pair.port, timeout=30)
    connection.putrequest(method, path)
    for name, value in (head | ({"content-length": str(len(body))} if body else {})).items():
        connection.putheader(name, value)
    connection.endheaders(body)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_long_bodies_get_through_in_every_form(pair: Pair, path: str) -> None:
    body = json.dumps({"prompt": "a " * 300_000}).encode()
    head = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    for content in (body, iter([body[:70_000], body[70_000:]])):
        answer = httpx.post(f"http://127.0.0.1:{pair.port}{path}", content=content, headers=head, timeout=60)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "context_length_exceeded", "all of it was read"


def test_no_stranger_holds_memory_with_a_body(pair: Pair) -> None:
    with socket.create_connection(("127.0.0.1", pair.port), 30) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999\r\n\r\n")
        assert client.recv(2**16).startswith(b"HTTP/1.1 401 ")


def test_errors_pass_through(pair: Pair) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(pair, "Hi", temperature=-1)
    with pytest.raises(openai.AuthenticationError):
        pair.client.with_options(api_key="another").chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hi"}]
        )


def test_a_shared_prefix_stays_on_one_server(pair: Pair) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 2
    before = count_requests(pair)
    for turn in range(6):
        ask(pair, f"{text} {turn}", max_tokens=2)
    gained = sorted(after - one for after, one in zip(count_requests(pair), before, strict=True))
    assert sum(gained) == 6 and gained[-1] >= 5


def count_requests(pair: Pair) -> list[float]:
    counts = []
    for _, url in sorted(pair.find_servers()):
        text = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=10).text
        lines = [line for line in text.splitlines() if line.startswith("jaxserve:request_success_total{")]
        counts.append(sum(float(line.rpartition(" ")[2]) for line in lines))
    return counts


def test_metrics_name_the_replica(pair: Pair) -> None:
    engines = set()
    for _, url in pair.find_servers():
        text = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=10).text
        engines |= {name for name in ("0", "1") if f'engine="{name}"' in text}
    assert engines == {"0", "1"}


def test_a_killed_server_costs_its_own_streams_and_comes_back(pair: Pair) -> None:
    streams = [Stream(pair, f"Once upon a time {index}") for index in range(6)]
    for stream in streams:
        assert stream.has_begun.wait(60)
    servers = dict(pair.find_servers())
    victim = next(pid for pid, url in servers.items() if count_running(url))
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:  # requests may fail until the router has noticed
        time.sleep(0.1)
    assert [ask(pair, f"What is {index} + 45?", max_tokens=4) for index in range(8)]
    for stream in streams:
        stream.thread.join(60)
        assert not stream.thread.is_alive()
    ends = {stream.end for stream in streams}
    assert "error" in ends and ends <= {"error", "length"}
    pair.wait_for("it starts again in 1 s")
    again = time.monotonic() + SECONDS
    while len(pair.find_servers()) < 2:
        assert time.monotonic() < again
        time.sleep(0.1)
    fresh = next(url for pid, url in pair.find_servers() if pid not in servers)
    while True:
        try:
            if httpx.get(f"{fresh}/health/ready", timeout=5).status_code == 200:
                break
        except httpx.HTTPError:
            pass
        assert time.monotonic() < again
        time.sleep(0.1)


def count_running(url: str) -> float:
    text = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith("jaxserve:num_requests_running{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


class Stream:
    """A long answer that is read on a thread; how it ended is `error` or `length`."""

    def __init__(self, pair: Pair, prompt: str) -> None:
        self.has_begun = threading.Event()
        self.end = ""
        self._pair, self._prompt = pair, prompt
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        extra = {"ignore_eos": True}
        try:
            for chunk in self._pair.client.completions.create(
                model="demo", prompt=self._prompt, max_tokens=240, stream=True, extra_body=extra
            ):
                self.has_begun.set()
                self.end = chunk.choices[0].finish_reason or self.end if chunk.choices else self.end
        except (openai.APIError, httpx.HTTPError):
            self.end = "error"
        self.end = self.end or "error"  # cut short
