"""Starts a server whose model answers from a script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.server.running import RunningServer, run_server

FOLDER = Path(__file__).parent
CONTEXT = 65_536  # tokens; Claude Code's first prompt has 40,000 of the demo's
PAGE_SIZE = 16  # tokens


def call(name: str, **arguments: object) -> str:
    """Returns a call as the scripted model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def run_script(folder: Path, script: Sequence[tuple[str, str]]) -> Iterator[RunningServer]:
    """Yields a server whose model answers from a script; the folder is for its files."""
    (folder / "script.json").write_text(json.dumps(script))
    flags = ("--script", str(folder / "script.json"), "--chat-template", str(FOLDER / "template.jinja"))
    flags += ("--reasoning-parser", "qwen3", "--max-num-seqs", "8", "--max-num-batched-tokens", "4096")
    overrides = json.dumps({"max_position_embeddings": CONTEXT})
    flags += ("--max-model-len", str(CONTEXT), "--hf-overrides", overrides, "--page-size", str(PAGE_SIZE))
    with run_server(*flags, program=FOLDER / "program.py") as server:
        yield server
