"""What the tests of agents share: where npm's packages are, how an agent's process is started, what caches must do."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.node_packages import install_packages
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


def run_agent(program: str, arguments: Sequence[str], work: Path, home: Path, **variables: str) -> list[Any]:
    """Runs a program of npm in a folder, without a keyboard, and returns the JSON lines that it prints.

    Args:
        program: below `node_modules`.
        home: its home; `variables` are further ones of its process.
    """
    done = subprocess.run(
        [install_packages(NODE), str(NODE / "node_modules" / program), *arguments],
        cwd=work,
        env=make_environment(home) | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
