"""Servers that agents talk to, and the programs of npm that are agents."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from tests.agents.scripted_server import Script
from tests.server.running import RunningServer, run_server

FOLDER = Path(__file__).parent
PROGRAM = FOLDER / "scripted_server.py"
NODE = FOLDER / "node"
CONTEXT = 65_536  # tokens; Claude Code's first prompt has 40,000 of the demo's
PAGE_SIZE = 16  # tokens
NOWHERE = "http://127.0.0.1:9"  # nothing listens there


def call(name: str, **arguments: object) -> str:
    """Returns a call as the scripted model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def run_script(folder: Path, script: Script) -> Iterator[RunningServer]:
    """Yields a server whose model answers from a script; the folder is for its files."""
    (folder / "script.json").write_text(json.dumps(script))
    flags = ("--script", str(folder / "script.json"), "--chat-template", str(FOLDER / "template.jinja"))
    flags += ("--reasoning-parser", "qwen3", "--max-num-seqs", "8", "--max-num-batched-tokens", "4096")
    overrides = json.dumps({"max_position_embeddings": CONTEXT})
    flags += ("--max-model-len", str(CONTEXT), "--hf-overrides", overrides, "--page-size", str(PAGE_SIZE))
    with run_server(*flags, program=PROGRAM) as server:
        yield server


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
