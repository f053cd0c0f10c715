"""Requests that the server refuses, and the error that each gets: one table for all tests and clients."""

from tests.server.refusals.refusal import CHAT, EMBED, GOOD, HELLO, RESPOND, TEXT, Refusal, check_error, check_refusal
from tests.server.refusals.table import KEYLESS, REFUSALS

__all__ = [
    "CHAT",
    "EMBED",
    "GOOD",
    "HELLO",
    "KEYLESS",
    "REFUSALS",
    "RESPOND",
    "TEXT",
    "Refusal",
    "check_error",
    "check_refusal",
]
