"""Errors of grammars after their request was accepted, or that are not the request's fault."""

from __future__ import annotations

import re

from jaxserve.errors import JaxServeError

_MAX_MESSAGE = 300


class MatcherError(JaxServeError, RuntimeError):
    """A sequence's grammar refused a token, hit a limit or failed; only that sequence ends."""


class CheckerError(JaxServeError, RuntimeError):
    """The process that checks grammars could not be started: a fault of the host, never of the request."""


def shorten_message(message: str) -> str:
    """Returns llguidance's message as one line of at most 300 characters, without its state and traces."""
    if "NoExtensionBias" in message:
        return "no text can match it"
    for mark in ("<state>", "<backtrace>", "<grammar>", "<non-verbose/>"):
        message = message.split(mark, 1)[0]
    reason = re.search(r"^error: (.*)$", message, re.MULTILINE)  # the regex parser's, after the whole regex
    text = " ".join((f"invalid regex: {reason[1]}" if reason else message).split())
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 3] + "..."
