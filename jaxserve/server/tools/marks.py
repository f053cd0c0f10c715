"""Marks in text that comes in pieces."""

from __future__ import annotations

BLANKS = " \t\n\r"


def count_overlap(text: str, at: int, mark: str) -> int:
    """Returns how many characters at the end of `text[at:]` may be the beginning of the mark.

    The mark's first character must occur in it once.
    """
    begin = text.rfind(mark[0], max(at, len(text) - len(mark) + 1))
    return len(text) - begin if begin >= 0 and mark.startswith(text[begin:]) else 0
