"""A conversation in a terminal: what is kept, dropped, stopped and obeyed."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve import SamplingParams
from jaxserve.engine.generation_config import GenerationDefaults
from jaxserve.errors import DeviceStepError, EngineStoppedError, InvalidRequestError
from jaxserve.tools.cli.chat import Chat

LIMIT = 40  # characters, which are this model's tokens


class Echo:
    """A model that answers with the last message, in upper case."""

    def __init__(self, **_: object) -> None:
        self.conversations: list[list[str]] = []
        self.templates: list[str | None] = []
        self.failures: list[Exception] = []
        self.requests, self.max_model_len, self.defaults = self, LIMIT, GenerationDefaults(SamplingParams())

    def make_chat(self, messages: list[dict[str, str]], params: SamplingParams, *, chat_template: str | None) -> Any:
        self.templates.append(chat_template)
        texts = [message["content"] for message in messages]
        if messages[-1]["content"] == "bad":
            raise InvalidRequestError("cannot be rendered", field="messages")
        return SimpleNamespace(texts=texts, prompt_token_ids="".join(texts))

    async def stream(self, requests: list[Any]) -> AsyncIterator[Any]:
        texts = requests[0].texts
        self.conversations.append(texts)
        yield make_output(texts[-1].upper())
        if self.failures:
            yield make_output("", "error", self.failures.pop())
        else:
            yield make_output("", "length" if "long" in texts[-1] else "stop")


def make_output(text: str, reason: str | None = None, error: Exception | None = None) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(text=text, finish_reason=reason)], error=error)


def talk(monkeypatch: pytest.MonkeyPatch, llm: Echo, *lines: str, **options: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    Chat(llm, SamplingParams(max_tokens=10), **options).run()  # type: ignore[arg-type]


def test_a_conversation_is_remembered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = Echo()
    talk(monkeypatch, llm, "hi", "", "yo", system="be", chat_template="{{ messages }}")
    assert llm.conversations == [["be", "hi"], ["be", "hi", "HI", "yo"]]
    assert set(llm.templates) == {"{{ messages }}"}
    assert capsys.readouterr().out == "HI\nYO\n"


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = Echo()
    talk(
        monkeypatch,
        llm,
        "hi",
        "/clear",
        "yo",
        "/help",
        "/bye",
        " /bye",
        "/etc",
        "/etc/hosts",
        "/quit",
        "no",
        system="be",
    )
    assert [texts[-1] for texts in llm.conversations] == ["hi", "yo", "/bye", "/etc/hosts"]
    assert llm.conversations[1] == ["be", "yo"]
    said = capsys.readouterr().err
    for word in ("/clear", "/exit", "/quit", "/bye is not a command", "/etc is not a command"):
        assert word in said


def test_a_full_context_drops_the_oldest_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = Echo()
    talk(monkeypatch, llm, "aaaaaa", "bbbbbb", "cccccc", "d" * 18, "e" * 35, system="be")
    assert llm.conversations[2] == ["be", "bbbbbb", "BBBBBB", "cccccc"], "with 10 for the answer, more is too many"
    assert llm.conversations[3] == ["be", "d" * 18]
    assert llm.conversations[4] == ["be", "e" * 35], "what is left alone is for the engine to judge"
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "(the context of 40 tokens is full: the oldest turn was dropped)"
    assert "the oldest 2 turns were dropped" in said[1]


def test_what_cannot_be_answered_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = Echo()
    talk(monkeypatch, llm, "hi", "bad", "yo")
    assert llm.conversations == [["hi"], ["hi", "HI", "yo"]]
    llm.failures = [DeviceStepError("the device failed")]
    talk(monkeypatch, llm, "hi", "long")
    shown = capsys.readouterr()
    assert "jaxserve: messages: cannot be rendered" in shown.err and "jaxserve: the device failed" in shown.err
    assert "(cut off: " in shown.err
    llm.failures = [EngineStoppedError("no more")]
    with pytest.raises(EngineStoppedError):
        talk(monkeypatch, llm, "hi", "unread")


_CHAT = """
import asyncio
import signal
import sys
import jaxserve
from jaxserve.tools.cli import main
from tests.tools.cli.test_chat import Echo, make_output

class Slow(Echo):
    shutdown = lambda self: print("stopped")

    async def stream(self, requests):
        try:
            yield make_output(f"{'+'.join(requests[0].texts)}!")
            # Wakes up now and then, as further tokens would wake it: a signal that comes right before the loop waits
            # does not end the wait.
            for _ in range(0 if requests[0].texts[-1] == "hi" else 10_000):
                await asyncio.sleep(0.1)
        finally:
            print("left")

jaxserve.AsyncLLM = Slow
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in its background without one
sys.exit(main(["chat", "demo"]))
"""


def test_ctrl_c_stops_an_answer_and_at_the_prompt_the_chat() -> None:
    """The terminal is read where the interrupt arrives: a thread that waits for a line would outlive it."""
    terminal, other = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", _CHAT], stdin=other, stdout=other, stderr=other) as chat:
        os.close(other)
        try:
            _read_until(terminal, b"you> ")
            os.write(terminal, b"wait\n")
            _read_until(terminal, b"wait!")
            chat.send_signal(signal.SIGINT)
            shown = _read_until(terminal, b"you> ")
            assert b"left" in shown and b"(stopped)" in shown, "the request is left"
            os.write(terminal, b"hi\n")
            assert b"wait+wait!+hi!" in _read_until(terminal, b"you> "), "what was said is kept"
            _interrupt_prompt(chat.pid, terminal)
            _read_until(terminal, b"stopped")
            assert chat.wait() == 130
        finally:
            chat.kill()
            os.close(terminal)


def _interrupt_prompt(process: int, terminal: int) -> None:
    """Interrupts a process that reads the terminal, once in effect: it says something before it sleeps again.

    An interrupt that comes between the prompt and the wait for a line does not end that wait, so it is sent anew; a
    second one in effect would end the chat before it has said goodbye.
    """
    while not select.select([terminal], [], [], 0)[0]:
        _wait_until_asleep(process)
        os.kill(process, signal.SIGINT)
        _wait_until_asleep(process)


def _wait_until_asleep(process: int) -> None:
    """Waits until the process's first thread sleeps, or has ended, with no signal on its way."""
    while True:
        status = Path(f"/proc/{process}/status").read_text()
        pending = re.findall(r"^S(?:ig|hd)Pnd:\s+(\w+)$", status, flags=re.M)
        if re.search(r"^State:\s+[SZ]", status, flags=re.M) and not any(int(mask, 16) for mask in pending):
            return
        time.sleep(0.01)


def _read_until(terminal: int, end: bytes) -> bytes:
    shown = b""
    while end not in shown:
        shown += os.read(terminal, 1000)  # raises OSError once the process has ended
    return shown
