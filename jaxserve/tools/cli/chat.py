"""`jaxserve chat`: a conversation in a terminal, or with the lines of standard input."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING

from jaxserve.errors import EngineStoppedError, JaxServeError

if TYPE_CHECKING:
    from jaxserve import AsyncLLM, SamplingParams
    from jaxserve.request import Request

_COMMANDS = {
    "/help": "list the commands",
    "/clear": "forget the conversation, but not the system message",
    "/exit": "end the conversation, like /quit, Ctrl-D, and Ctrl-C at the prompt",
}
_COMMAND = re.compile(r"/[A-Za-z]*")  # the whole first word; a path does not match


class Chat:
    """One conversation with a model."""

    def __init__(
        self, llm: AsyncLLM, params: SamplingParams, *, system: str | None = None, chat_template: str | None = None
    ) -> None:
        self._llm, self._params, self._chat_template = llm, params, chat_template
        self._system = [{"role": "system", "content": system}] if system else []
        self._turns: list[dict[str, str]] = []  # messages of user and model, alternating

    def run(self) -> None:
        """Runs the conversation until the input ends; Ctrl-C at the prompt raises KeyboardInterrupt.

        Raises:
            EngineStoppedError: the engine has failed.
        """
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # gives input() editing and history
            _say("/help lists the commands. Ctrl-C stops an answer, Ctrl-D ends.")
        with asyncio.Runner() as runner:
            while (text := _ask()) is not None:  # outside the event loop, where Ctrl-C ends the wait
                word = text.split(maxsplit=1)[0]
                if not _COMMAND.fullmatch(word) or text[0].isspace():
                    self._take_turn(runner, text.strip())
                elif word in ("/exit", "/quit"):
                    return
                else:
                    self._obey(word)

    def _obey(self, command: str) -> None:
        if command == "/help":
            for name, text in _COMMANDS.items():
                _say(f"{name:<8}{text}")
        elif command == "/clear":
            self._turns.clear()
            _say("The conversation is forgotten.")
        else:
            _say(f"{command} is not a command; known are {', '.join(_COMMANDS)}. A message may begin with a blank.")

    def _take_turn(self, runner: asyncio.Runner, text: str) -> None:
        """Answers a message. A message without any answer, failed or stopped, is forgotten."""
        self._turns.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            runner.run(self._answer(answer))
        except EngineStoppedError:
            raise
        except JaxServeError as error:
            print(f"jaxserve: {error}", file=sys.stderr)
        if answer:
            self._turns.append({"role": "assistant", "content": "".join(answer)})
        else:
            self._turns.pop()

    async def _answer(self, pieces: list[str]) -> None:
        """Prints the answer to the last message as it is generated, and appends it to `pieces`; Ctrl-C ends it."""
        note = ""
        try:
            async with aclosing(self._llm.stream([self._make_request()])) as outputs:
                async for output in outputs:
                    if output.error is not None:
                        raise output.error
                    if piece := output.outputs[0].text:
                        pieces.append(piece)
                        print(piece, end="", flush=True)
                    if output.outputs[0].finish_reason == "length":
                        note = "(cut off: the answer is as long as --max-tokens or the context allows)"
        except asyncio.CancelledError:  # Ctrl-C; leaving the stream has aborted the request
            note = "(stopped)"
        finally:
            if pieces and not pieces[-1].endswith("\n"):
                print(flush=True)
        if note:
            _say(note)

    def _make_request(self) -> Request:
        """Returns the request for the next answer; drops the oldest turns until an answer fits."""
        limit = self._llm.max_model_len
        room = min(self._params.max_tokens or limit, limit // 2)
        num_dropped = 0
        while True:
            messages = [*self._system, *self._turns]
            request = self._llm.requests.make_chat(messages, self._params, chat_template=self._chat_template)
            if len(request.prompt_token_ids) + room <= limit or len(self._turns) == 1:
                break
            del self._turns[:2]  # a message and its answer
            num_dropped += 1
        if num_dropped:
            turns = "turn was" if num_dropped == 1 else f"{num_dropped} turns were"
            _say(f"(the context of {limit:,} tokens is full: the oldest {turns} dropped)")
        return request


def _ask() -> str | None:
    """Returns the user's next message, None at the end of input."""
    shows_prompt = sys.stdin.isatty()
    try:
        while not (text := input("you> " if shows_prompt else "")).strip():
            pass
    except EOFError:
        if shows_prompt:
            print()
        return None
    except KeyboardInterrupt:
        print()
        raise
    return text


def _say(text: str) -> None:
    """Prints a notice, dimmed in a terminal, to standard error."""
    is_terminal = sys.stderr.isatty()
    print(f"\x1b[2m{text}\x1b[0m" if is_terminal else text, file=sys.stderr, flush=True)
