"""Numbers that every part of speculation agrees on."""

from __future__ import annotations

NO_DRAFT = -4  # stands where a row has no draft; no token and no sentinel is this number


def count_reach(max_drafts: int) -> int:
    """Returns the tokens that a row may compute beyond its committed ones: a step's, and the drafts behind those."""
    return 2 * max_drafts + 1
