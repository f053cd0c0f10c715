"""What the tests of agents share: where npm's packages are, how an agent's process is started, what caches must do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from tests.scripted.running import PAGE_SIZE

NODE = Path(__file__).parent / "node"
NOWHERE = "http://127.0.0.1:9"  # nothing listens there


def make_environment(home: Path) -> dict[str, str]:
    """Returns the variables of an agent's process, which has a home of its own and reaches no other machine."""
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), NOWHERE)
    return {"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "127.0.0.1", **proxies}


def require_cached(usages: Sequence[tuple[int, int]]) -> None:
    """Each prompt reads all whole pages of the prompt before it from the cache.

    Args:
        usages: the tokens of each request's prompt, and those of them that were cached.
    """
    for (before, _), (length, cached) in pairwise(usages):
        assert before // PAGE_SIZE * PAGE_SIZE <= cached < length
