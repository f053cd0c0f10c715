"""Hung templates cost their own request: others are answered at once, and SIGTERM ends the server in time."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import SMALL
from tests.server.pressure import CHAT, check_idle, probe, wait_until
from tests.server.running import RunningServer, launch, run_server

HI = [{"role": "user", "content": "What is a KV cache?"}]
LOOPS = "{% for a in range(9999) %}" * 4 + "{% endfor %}" * 4
TRIGGER, GLUTTON = "hang", "eat"  # what the model's own template of a test hangs on, and takes all memory on
HUGE = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
SOON = 2.0  # seconds
LIMIT = 40  # seconds for the model's own template that hangs
FLAGS = (*SMALL, "--allow-request-chat-template")


def ask(server: RunningServer, template: str | None = None, **body: Any) -> httpx.Response:
    body = {
        "messages": HI,
        "max_tokens": 8,
        "temperature": 0,
        **({"chat_template": template} if template else {}),
    } | body
    return httpx.post(server.url + CHAT, json=body, timeout=60)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with run_server(*FLAGS, "--template-timeout", "2") as running:
        yield running


@pytest.fixture
def hung() -> Iterator[list[threading.Thread]]:
    threads: list[threading.Thread] = []
    yield threads
    for thread in threads:
        thread.join(60)


def test_hung_templates_keep_nobody_else_waiting(server: RunningServer, hung: list[threading.Thread]) -> None:
    text, answer = probe(server), ask(server).json()["choices"]
    found: list[httpx.Response] = []
    hung += [threading.Thread(target=lambda: found.append(ask(server, LOOPS))) for _ in range(8)]
    for thread in hung:
        thread.start()
    rounds = 0
    while any(thread.is_alive() for thread in hung):
        assert probe(server) == text
        assert ask(server).json()["choices"] == answer
        rounds += any(thread.is_alive() for thread in hung)
        time.sleep(0.1)
    assert rounds, "the others were answered behind those that hang"
    assert {response.status_code for response in found} == {400}
    assert {response.json()["error"]["code"] for response in found} == {"preparation_timeout"}
    wait_until(lambda: ask(server, "{{ messages[0].content }}").status_code == 200)
    check_idle(server, text)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ '%2000000000d' % 1 }}", "memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "Recursion"),
        ("{{ raise_exception('no') }}", "refused by the chat template"),
        ("{% if %}", "not valid Jinja"),
    ],
)
def test_a_request_with_a_bad_template_is_refused(server: RunningServer, template: str, message: str) -> None:
    response = ask(server, template)
    assert response.status_code == 400
    assert message.lower() in response.json()["error"]["message"].lower()
    assert ask(server, "{{ messages[0].content }}").status_code == 200


def test_the_models_own_template_may_hang_or_take_all_memory(tmp_path: Any, hung: list[threading.Thread]) -> None:
    """On the event loop, where short messages are prepared, in threads, more than there are, and while it drains."""
    path = tmp_path / "template.jinja"
    cases = f"{{% if said == '{TRIGGER}' %}}{LOOPS}{{% elif said == '{GLUTTON}' %}}{HUGE}{{% endif %}}"
    path.write_text(f"{{% set said = messages[0].content %}}{cases}{{{{ said }}}}")
    flags = ("--chat-template", str(path), "--template-timeout", str(LIMIT), "--shutdown-timeout", "1")
    server = launch(*SMALL, *flags)
    try:
        server.wait_until_ready()
        text, statuses = probe(server), []
        refused = ask(server, messages=[{"role": "user", "content": GLUTTON}])
        assert refused.status_code == 400, refused.text
        assert re.search("MemoryError|more than 256 MiB", refused.json()["error"]["message"])
        assert probe(server) == text and ask(server).status_code == 200
        bad = [{"role": "user", "content": TRIGGER}]
        for _ in range(8):
            hung.append(threading.Thread(target=lambda: statuses.append(ask(server, messages=bad).status_code)))
            hung[-1].start()
        for _ in range(10):
            start = time.monotonic()
            assert probe(server) == text
            assert ask(server).status_code == 200
            assert time.monotonic() - start < LIMIT / 4, "nobody waits for the limit of those that hang"
        start = time.monotonic()
        assert server.stop(1 + SOON + 1) == 0
        assert time.monotonic() - start < 1 + SOON
    finally:
        server.process.kill()
    for thread in hung:
        thread.join(10)
    assert set(statuses) == {503} and len(statuses) == 8
