"""Vercel's `ai` for Node, with its providers for OpenAI, servers like it, and Anthropic."""

from __future__ import annotations

import json
import re
import subprocess

from tests.agents import scenario
from tests.agents.running import NODE
from tests.node_packages import install_packages
from tests.server.running import RunningServer


def test_ai_runs_its_suite(scripted: RunningServer, demo: RunningServer) -> None:
    node, names = install_packages(NODE), ("ASK", "REASONING", "ANSWER", "RESULTS", "LIST", "STOP", "CUT", "COUNT")
    given = json.dumps({name.lower(): getattr(scenario, name) for name in names})
    before = scenario.count_aborts(scripted)
    done = subprocess.run(
        [node, "ai.mjs", scripted.url, demo.url, given],
        cwd=NODE,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ok ", done.stdout, re.MULTILINE)) == 24
    assert scenario.count_aborts(scripted) == before + 4
