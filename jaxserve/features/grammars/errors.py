"""Errors of grammars that are not the request's fault, or arise after the request was accepted."""

from __future__ import annotations

import re

from jaxserve.errors import JaxServeError

_MAX_MESSAGE = 300


class MatcherError(JaxServeError, RuntimeError):
    """A grammar refused a token, hit a limit or failed; only its sequence ends."""


class CheckerError(JaxServeError, RuntimeError):
    """The process that checks grammars could not be started, which is the host's fault."""


def shorten_message(message: str) -> str:
    """Returns llguidance's message as one line of at most 300 characters, without its state, traces and excerpts."""
    if "NoExtensionBias" in message:
        return "no text can match it"
    if "coerce_one_of" in message:  # llguidance's advice is an option that no caller can set
        return "oneOf is only supported where no value can match two of its schemas; use anyOf"
    for mark in ("<state>", "<backtrace>", "<grammar>", "<non-verbose/>"):
        message = message.split(mark, 1)[0]
    message, *_ = re.split(r"\n +\d+ \| ", message, maxsplit=1)  # the quoted grammar may not be the caller's
    reason = re.search(r"^error: (.*)$", message, re.MULTILINE)  # the regex parser's error follows the whole regex
    text = " ".join((f"invalid regex: {reason[1]}" if reason else message).split())
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 3] + "..."
