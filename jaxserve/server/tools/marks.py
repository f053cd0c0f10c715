"""Marks in text that comes in pieces."""

from __future__ import annotations

BLANKS = " \t\n\r"


def count_overlap(text: str, at: int, mark: str) -> int:
    """Returns how many characters at the end of `text[at:]` may be the begin of the mark."""
    for count in range(min(len(mark) - 1, len(text) - at), 0, -1):
        if text.endswith(mark[:count]):
            return count
    return 0
