"""Vercel's `ai` for Node, with its providers for OpenAI, servers like it, and Anthropic."""

from __future__ import annotations

import re
import subprocess

from tests.agents.running import NODE
from tests.node_packages import install_packages
from tests.scripted import scenario
from tests.server.running import RunningServer


def test_ai_runs_its_suite(scripted: RunningServer, demo: RunningServer) -> None:
    node, before = install_packages(NODE), scenario.count_aborts(scripted)
    done = subprocess.run(
        [node, "ai.mjs", scripted.url, demo.url, scenario.describe()],
        cwd=NODE,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ok ", done.stdout, re.MULTILINE)) == 24
    assert scenario.count_aborts(scripted) == before + 4
