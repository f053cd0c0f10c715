"""Packages of npm that tests run, in the versions that a package.json pins."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest


def install_packages(folder: Path) -> str:
    """Installs a folder's packages once and returns the program `node`; skips the test where that cannot be had."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip(f"{'node' if node is None else 'npm'} is not installed")
    if not all(_is_installed(folder, *pinned) for pinned in _read_pinned(folder).items()):
        command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=280)
        if done.returncode:
            reason = done.stderr.strip().splitlines()
            pytest.skip(f"packages of {folder}/package.json cannot be had: {reason[-1] if reason else done.returncode}")
    return node


def _read_pinned(folder: Path) -> dict[str, str]:
    pinned: dict[str, str] = json.loads((folder / "package.json").read_text())["dependencies"]
    return pinned


def _is_installed(folder: Path, name: str, version: str) -> bool:
    package = folder / "node_modules" / name / "package.json"
    return package.exists() and json.loads(package.read_text())["version"] == version
