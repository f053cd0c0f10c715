"""The README's examples run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, flags=re.S)
    for line in block.splitlines()
    if "jaxserve " in line and not line.startswith("pip")
]


def run(command: list[str] | str, folder: Path, **options: object) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment, timeout=280, **options
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_there_are_examples() -> None:
    assert len(PYTHON_BLOCKS) >= 2 and len(COMMANDS) >= 5


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=range(len(PYTHON_BLOCKS)))
def test_python_example_prints_something(block: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block)
    assert run([sys.executable, str(script)], tmp_path).strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_command_prints_something(command: str, tmp_path: Path) -> None:
    program = f'"{sys.executable}" -m jaxserve.cli '
    shell = re.sub(r"\bjaxserve (?=[a-z])", lambda _: program, command)
    assert run(shell, tmp_path, shell=True).strip()


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
