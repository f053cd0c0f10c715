"""OpenAI's own JavaScript client, unchanged, against a real server with the demo model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.running import RunningServer

FOLDER = Path(__file__).parent / "node"
PACKAGE = FOLDER / "node_modules" / "openai" / "package.json"


@pytest.fixture(scope="module")
def node() -> str:
    """The program, with the client's pinned version beside the suite; installed once, where that can be had."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip(f"{'node' if node is None else 'npm'} is not installed")
    pinned = json.loads((FOLDER / "package.json").read_text())["dependencies"]["openai"]
    if not PACKAGE.exists() or json.loads(PACKAGE.read_text())["version"] != pinned:
        command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            reason = done.stderr.strip().splitlines()
            pytest.skip(f"the npm package openai {pinned} cannot be had: {reason[-1] if reason else done.returncode}")
    return node


def test_the_node_client_runs_its_suite(node: str, server: RunningServer) -> None:
    done = subprocess.run(
        [node, "suite.mjs", server.url], cwd=FOLDER, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    count = len(re.findall(r'^  async "', (FOLDER / "suite.mjs").read_text(), re.MULTILINE))
    assert len(re.findall(r"^ok ", done.stdout, re.MULTILINE)) == count >= 14
