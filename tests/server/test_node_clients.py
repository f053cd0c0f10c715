"""OpenAI's and Anthropic's own JavaScript clients, unchanged, against a real server with the demo model."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.node_packages import install_packages
from tests.server.running import RunningServer

FOLDER = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def node() -> str:
    return install_packages(FOLDER)


@pytest.mark.parametrize(("suite", "least"), [("openai.mjs", 15), ("anthropic.mjs", 8)])
def test_a_node_client_runs_its_suite(node: str, server: RunningServer, suite: str, least: int) -> None:
    done = subprocess.run(
        [node, suite, server.url], cwd=FOLDER, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    count = len(re.findall(r'^  async "', (FOLDER / suite).read_text(), re.MULTILINE))
    assert len(re.findall(r"^ok ", done.stdout, re.MULTILINE)) == count >= least
