"""Load and abuse: whatever clients do, the next one is answered, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server import faulty
from tests.server.conftest import MAX_BODY, SMALL
from tests.server.pressure import (
    CHAT,
    COMPLETIONS,
    check_idle,
    complete,
    connect,
    get_status,
    join_text,
    make_request,
    open_stream,
    probe,
    read_all,
    read_events,
    reset,
    wait_until,
)
from tests.server.running import RunningServer, run_server

CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
)
CHAT_BODY = {"messages": [{"role": "user", "content": "What is a KV cache?"}]}


# Clients that leave


def leave(server: RunningServer, number: int) -> None:
    """Asks for something and leaves at some moment: before the body is whole, in the queue, in the middle, or late."""
    draw = random.Random(number)
    path = draw.choice([COMPLETIONS, CHAT])
    body = {"prompt": "Once upon a time " * draw.choice([1, 1, 40])} if path == COMPLETIONS else dict(CHAT_BODY)
    body |= {"max_tokens": draw.choice([2, 8, 60]), "stream": draw.random() < 0.5, "n": draw.choice([1, 1, 3])}
    body |= {"ignore_eos": True, "temperature": 1.0} if draw.random() < 0.5 else {}
    data = make_request(path, body)
    client = connect(server)
    with contextlib.suppress(ConnectionError):
        client.sendall(data[: draw.randrange(1, len(data))] if draw.random() < 0.1 else data)
        time.sleep(draw.choice([0.0, draw.random() * 0.03, draw.random() * 0.3]))
        if draw.random() < 0.4:
            client.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                client.recv(draw.choice([1, 300, 3000]))
    if draw.random() < 0.5:
        reset(client)
    else:
        client.close()


@pytest.mark.slow
def test_a_thousand_clients_leave_at_random_moments(server: RunningServer, text: str) -> None:
    with ThreadPoolExecutor(50) as clients:
        list(clients.map(lambda number: leave(server, number), range(1000)))
    check_idle(server, text)
    assert server.metric("jaxserve:client_disconnects_total") > 300
    assert server.metric("jaxserve:request_success_total", finished_reason="abort") > 300
    assert server.metric("jaxserve:request_success_total", finished_reason="error") == 0


def test_a_few_clients_leave(server: RunningServer, text: str) -> None:
    with ThreadPoolExecutor(20) as clients:
        list(clients.map(lambda number: leave(server, number), range(1000, 1040)))
    check_idle(server, text)


def test_a_client_that_left_is_logged_as_499(server: RunningServer, text: str) -> None:
    client = open_stream(server, max_tokens=900, ignore_eos=True)
    client.recv(1000)
    aborted = server.metric("jaxserve:request_success_total", finished_reason="abort")
    reset(client)
    wait_until(lambda: server.metric("jaxserve:request_success_total", finished_reason="abort") == aborted + 1)
    wait_until(lambda: any(" 499 POST /v1/completions" in line for line in list(server.lines)))
    check_idle(server, text)


# Bodies that are none


def make_malformed(number: int) -> bytes:
    """Returns what a broken or malicious client sends."""
    draw = random.Random(number)
    whole = make_request(draw.choice([COMPLETIONS, CHAT]), {"prompt": "Once", "max_tokens": 2, **CHAT_BODY})
    head, _, body = whole.partition(b"\r\n\r\n")
    kinds: list[Callable[[], bytes]] = [
        lambda: make_request(COMPLETIONS, body[: draw.randrange(len(body))]),
        lambda: make_request(COMPLETIONS, body, length=len(body) + draw.choice([1, 1000])),
        lambda: make_request(COMPLETIONS, body, length=draw.randrange(len(body))),
        lambda: make_request(COMPLETIONS, body, length=10**12),
        lambda: head[: draw.randrange(1, len(head))],
        lambda: draw.randbytes(draw.randrange(1, 3000)),
        lambda: make_request(CHAT, draw.randbytes(draw.randrange(1, 3000))),
        lambda: make_request(CHAT, b"[" * draw.choice([10, 1000, 100_000])),
        lambda: make_request(CHAT, b'{"a":' * 20_000),
        lambda: make_request(COMPLETIONS, b'{"prompt": "' + b"\\ud800" * 50 + b'", "max_tokens": 2}'),
        lambda: make_request(COMPLETIONS, b'{"prompt": "Once", "max_tokens": ' + b"9" * 5000 + b"}"),
        lambda: make_request(COMPLETIONS, b'{"prompt": "Once", "temperature": 1e400}'),
        lambda: make_request(COMPLETIONS, b'{"prompt": ["' + b'","' * 20_000 + b'"]}'),
        lambda: CHUNKED + b"ffffffffffffffffffff\r\nx",
        lambda: CHUNKED + b"5\r\nhello\r\nnot a size\r\n",
        lambda: CHUNKED + (b"800\r\n" + b" " * 0x800 + b"\r\n") * (2 * MAX_BODY // 0x800),
        lambda: CHUNKED + b"0\r\n" + b"trailer: x\r\n" * 3000,
        lambda: head.replace(b"application/json", b"text/plain") + b"\r\n\r\n" + body,
        lambda: head + b"\r\nx: " + b"h" * 40_000 + b"\r\n\r\n" + body,
        lambda: head.replace(b"HTTP/1.1", b"HTTP/3.7") + b"\r\n\r\n" + body,
    ]
    return kinds[number % len(kinds)]()


def send_malformed(server: RunningServer, number: int) -> int:
    """Returns the status of the first answer; 0 when there is none."""
    client = connect(server, seconds=0.5)
    try:
        client.sendall(make_malformed(number))
        answer = client.recv(65536)
    except (TimeoutError, ConnectionError):
        answer = b""
    finally:
        client.close()
    return int(answer.split()[1]) if answer else 0


def test_two_hundred_malformed_bodies(server: RunningServer, text: str) -> None:
    with ThreadPoolExecutor(10) as clients:
        statuses = Counter(clients.map(lambda number: send_malformed(server, number), range(200)))
    assert set(statuses) <= {0, 400, 413, 415, 431}, statuses
    assert min(statuses[status] for status in (400, 413, 415, 431)) >= 5, statuses
    check_idle(server, text)
    for handler in (COMPLETIONS, CHAT, "other"):
        assert not any(server.metric("http_requests_total", handler=handler, status=s) for s in ("500", "503"))


def test_an_endless_body_is_cut_off(server: RunningServer, text: str) -> None:
    client = connect(server)
    client.sendall(CHUNKED)
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 20 * MAX_BODY:
            client.sendall(b"800\r\n" + b" " * 0x800 + b"\r\n")
            sent += 0x800
    client.close()
    assert sent < 20 * MAX_BODY
    wait_until(lambda: server.metric("http_requests_total", status="413") > 0)
    check_idle(server, text)


# Clients that do not read


@pytest.mark.slow
def test_slow_readers_are_given_up_and_others_get_the_same(server: RunningServer, text: str) -> None:
    prompts = [f"There was a {animal}" for animal in ("dog", "cat", "bird", "fish")]

    def ask(prompt: str) -> str:
        events, is_whole = read_events(open_stream(server, prompt=prompt, max_tokens=150, temperature=0))
        assert is_whole
        return join_text(events)

    alone = [ask(prompt) for prompt in prompts]
    body = {"max_tokens": 900, "ignore_eos": True, "n": 2, "logprobs": 20, "temperature": 1.0}
    sleepers = [open_stream(server, 4096, **body) for _ in range(3)]
    try:
        with ThreadPoolExecutor(4) as clients:
            assert list(clients.map(ask, prompts)) == alone
        wait_until(lambda: server.metric("jaxserve:slow_readers_total") >= 3, seconds=60)
        check_idle(server, text)
        wait_until(lambda: any("was not read for 1 s" in line for line in list(server.lines)))
        assert not any(" ERROR " in line for line in server.lines)
        ports = {sleeper.getsockname()[1] for sleeper in sleepers}
        wait_until(lambda: not ports & list_clients(server))  # the other clients of this server may be idle on theirs
    finally:
        for sleeper in sleepers:
            sleeper.close()


def list_clients(server: RunningServer) -> set[int]:
    """The ports of the clients whose connections the server holds."""
    port = f"{int(server.url.rpartition(':')[2]):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[2].rpartition(":")[2], 16) for row in rows if row[1].endswith(f":{port}") and row[3] == "01"}


# Requests that take too long


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_that_passes_its_deadline_ends(server: RunningServer, text: str, streams: bool) -> None:
    body = {"max_tokens": 900, "ignore_eos": True, "timeout": 0.4, "n": 8, "logprobs": 20, "temperature": 1.0}
    late = server.metric("jaxserve:request_success_total", finished_reason="timeout")
    if streams:
        events, is_whole = read_events(open_stream(server, **body))
        assert is_whole and events[-1]["error"]["code"] == "timeout"
        assert any(choice["text"] for event in events[:-1] for choice in event["choices"])
    else:
        response = complete(server, **body)
        assert response.status_code == 504 and response.headers["x-should-retry"] == "false"
        assert response.json()["error"]["type"] == "timeout_error"
    assert server.metric("jaxserve:request_success_total", finished_reason="timeout") == late + 1
    check_idle(server, text)


# Limits of the whole server


def test_a_full_server_refuses_at_once_and_loses_nothing(narrow: RunningServer) -> None:
    """Sixty at once, where three may be answered, and two of them fill all rows."""
    text = probe(narrow)
    data = make_request(COMPLETIONS, {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "temperature": 0, "n": 4})
    before = count_refusals(narrow)

    def ask(client: socket.socket) -> str:
        client.sendall(data)
        head, _, body = read_all(client).decode().partition("\r\n\r\n")
        if " 429 " not in head.splitlines()[0]:
            return head.split()[1]
        assert 1 <= int(head.lower().partition("retry-after: ")[2].split()[0]) <= 60
        error = json.loads(body)["error"]
        assert error["type"] == "rate_limit_error"
        return str(error["code"])

    with ThreadPoolExecutor(60) as clients:
        counts = Counter(clients.map(ask, [connect(narrow) for _ in range(60)]))
    assert counts["200"] >= 1 and set(counts) <= {"200", "rate_limit_exceeded", "too_many_streams"}, counts
    assert counts["200"] < 60, "all came one after the other"
    assert count_refusals(narrow) == [number + 60 - counts["200"] for number in before]
    check_idle(narrow, text)


def count_refusals(server: RunningServer) -> list[float]:
    """Returns how many answers were 429, by both counters of the server."""
    return [server.metric("http_requests_total", status="429"), server.metric("jaxserve:queue_full_total")]


@pytest.mark.slow
def test_probes_are_answered_while_long_prompts_arrive(server: RunningServer, text: str) -> None:
    """64 of the longest prompts, and two megabytes of text to tokenize, which is refused for its size only then."""
    is_done, seconds = threading.Event(), []

    def watch() -> None:
        with httpx.Client() as client:
            while not is_done.is_set():
                for path in ("/health", "/ping"):
                    start = time.monotonic()
                    assert client.get(server.url + path, timeout=60).status_code == 200
                    seconds.append(time.monotonic() - start)
                time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        prompt = "the cat and the dog " * 90
        with ThreadPoolExecutor(64) as clients:
            answers = list(clients.map(lambda n: complete(server, prompt=f"{n} {prompt}", max_tokens=2), range(64)))
        assert {answer.status_code for answer in answers} == {200}
        assert min(answer.json()["usage"]["prompt_tokens"] for answer in answers) > 700
        refused = complete(server, prompt="word " * (MAX_BODY // 5 - 100), max_tokens=2)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    finally:
        is_done.set()
        watcher.join()
    seconds.sort()
    print(f"{len(seconds)} probes: median {seconds[len(seconds) // 2] * 1e3:.1f} ms, worst {seconds[-1] * 1e3:.0f} ms")
    assert len(seconds) > 20 and seconds[len(seconds) // 2] < 2.0
    check_idle(server, text)


# A device with faults


@pytest.fixture(scope="module")
def broken() -> Iterator[RunningServer]:
    """A server whose device fails when it is asked to; it ends as any other."""
    with run_server(*SMALL, "--watchdog-timeout", "1", program=Path(faulty.__file__)) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def its_text(broken: RunningServer) -> str:
    return probe(broken)


@pytest.mark.parametrize("fault", [faulty.FAIL_START, faulty.FAIL_RESULT])
@pytest.mark.parametrize("streams", [False, True])
def test_a_failed_step_ends_its_requests_and_no_others(
    broken: RunningServer, its_text: str, fault: int, streams: bool
) -> None:
    failed = broken.metric("jaxserve:request_success_total", finished_reason="error")
    running = open_stream(broken, max_tokens=900, ignore_eos=True, temperature=0)
    running.recv(300)
    if streams:
        answer = read_all(open_stream(broken, max_tokens=20, priority=fault))
        assert b" 500 " in answer.splitlines()[0] and b"device_step_failed" in answer
    else:
        response = complete(broken, max_tokens=20, priority=fault)
        assert response.status_code == 500 and response.json()["error"]["code"] == "device_step_failed"
        assert "as it was asked to" not in response.text, "what failed is for the log"
    last = read_all(running)  # it was in the same step
    assert b"device_step_failed" in last and last.rstrip().endswith(b"0")
    assert broken.metric("jaxserve:request_success_total", finished_reason="error") == failed + 2
    wait_until(lambda: any("as it was asked to" in line for line in list(broken.lines)))
    check_idle(broken, its_text)


def test_requests_that_wait_outlive_a_failed_step(broken: RunningServer, its_text: str) -> None:
    body = {"temperature": 0, "ignore_eos": True}
    slow = {"priority": faulty.SLOW + 15, **body}
    before = [open_stream(broken, max_tokens=80 + 10 * number, **slow) for number in range(8)]
    wait_until(lambda: broken.metric("jaxserve:num_requests_running") == 8)
    failing = open_stream(broken, max_tokens=4, priority=faulty.FAIL_RESULT)
    after = [open_stream(broken, max_tokens=4, priority=9999, **body) for _ in range(6)]
    assert b" 500 " in read_all(failing).splitlines()[0]
    ends = [read_events(stream) for stream in after]
    assert all(is_whole for _, is_whole in ends)
    assert {join_text(events) for events, _ in ends} == {join_text(ends[0][0])} != {""}
    for events, is_whole in map(read_events, before):  # those in the same step have failed with it
        assert is_whole and (len(events) >= 70 or events[-1]["error"]["code"] == "device_step_failed")
    check_idle(broken, its_text)


def test_logits_that_are_not_finite_end_one_request(broken: RunningServer, its_text: str) -> None:
    body = {"max_tokens": 100, "temperature": 0, "ignore_eos": True}
    alone = complete(broken, **body).json()["choices"][0]["text"]
    with ThreadPoolExecutor(4) as clients:
        others = [clients.submit(complete, broken, **body) for _ in range(3)]
        response = complete(broken, max_tokens=50, priority=faulty.NOT_FINITE)
        assert response.status_code == 500 and response.json()["error"]["code"] == "non_finite_logits"
        assert [other.result().json()["choices"][0]["text"] for other in others] == [alone] * 3
    assert broken.metric("jaxserve:non_finite_logits_total") == 1
    check_idle(broken, its_text)


def test_a_stuck_device_fails_the_probes_and_recovers(broken: RunningServer, its_text: str) -> None:
    with ThreadPoolExecutor(2) as clients:
        stuck = clients.submit(complete, broken, max_tokens=1, priority=faulty.STUCK)
        wait_until(lambda: get_status(broken, "/health") == 503)
        assert {get_status(broken, path) for path in ("/health/live", "/health/ready", "/ping")} == {503}
        assert httpx.get(broken.url + "/health").json()["status"] == "stuck"
        assert get_status(broken, "/metrics") == 200, "what does not need the device is answered"
        late = clients.submit(complete, broken, max_tokens=2)
        assert stuck.result().status_code == late.result().status_code == 200
    assert get_status(broken, "/health") == get_status(broken, "/health/live") == 200
    wait_until(lambda: any("no step has ended for 1 s" in line for line in list(broken.lines)))
    check_idle(broken, its_text)


def test_preparing_prompts_holds_up_nobody(broken: RunningServer, its_text: str) -> None:
    """Hundreds of texts, each as long as may be, keep the tokenizer busy for long."""
    is_done, seconds = threading.Event(), []

    def ping() -> None:
        with httpx.Client() as client:
            while not is_done.is_set():
                start = time.monotonic()
                assert client.get(broken.url + "/ping", timeout=60).status_code == 200
                seconds.append(time.monotonic() - start)
                time.sleep(0.005)

    pinging = threading.Thread(target=ping)
    pinging.start()
    try:
        texts = ["long " * 1100] + ["word " * 1000] * 250
        response = httpx.post(broken.url + "/v1/embeddings", json={"input": texts}, timeout=60)
        assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    finally:
        is_done.set()
        pinging.join()
    print(f"{len(seconds)} pings while 250,000 words are tokenized, the slowest {max(seconds) * 1e3:.0f} ms")
    assert len(seconds) >= 5, "they were answered meanwhile"
    check_idle(broken, its_text)


def test_half_open_connections_cost_nobody_an_answer(broken: RunningServer, its_text: str) -> None:
    idle: list[socket.socket] = []
    try:
        for beginning in [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nx: "] * 100:
            client = connect(broken)
            client.sendall(beginning)
            idle.append(client)
        assert probe(broken) == its_text
    finally:
        for client in idle:
            client.close()
    check_idle(broken, its_text)
