"""Commands that neither serve nor put load on servers run where no package of the server is installed.

A borrowed machine with an accelerator has JAX and often little more, and nothing can be installed there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import PROGRAMS

ROOT = Path(__file__).parents[3]
MISSING = ("fastapi", "httptools", "llguidance", "pydantic", "uvicorn")
# Python imports it before anything else. Only the finder of installed files answers for these names, so imports fail
# and `find_spec` finds nothing, as where they are not installed.
HIDE = f"""
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {MISSING} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
# Rooms that may need them.
SERVING = ("jaxserve.server.", "jaxserve.tools.cluster.", "jaxserve.tools.bench.load.", "jaxserve.tools.bench.serve")
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, error, sep=": ")
"""
CACHE = ("--compilation-cache-dir", str(PROGRAMS))


def run_without(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in an empty folder without these packages."""
    hiding, work = tmp_path / "hiding", tmp_path / "work"
    hiding.mkdir()
    work.mkdir()
    (hiding / "sitecustomize.py").write_text(HIDE)
    paths = [str(hiding), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)


def list_modules() -> list[str]:
    paths = [path for path in sorted((ROOT / "jaxserve").rglob("*.py")) if path.stem != "__main__"]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]


def test_the_packages_are_hidden(tmp_path: Path) -> None:
    done = run_without(tmp_path, "-c", IMPORT_ALL, *MISSING, "json", "httpx")
    assert done.stdout.splitlines() == [f"{name}: No module named {name!r}" for name in MISSING], done.stderr


def test_only_what_serves_or_loads_servers_imports_them(tmp_path: Path) -> None:
    """For the commands that the next test leaves out."""
    done = run_without(tmp_path, "-c", IMPORT_ALL, *list_modules())
    assert done.returncode == 0, done.stderr
    failed = [line for line in done.stdout.splitlines() if not line.startswith(SERVING)]
    assert failed == [] and "jaxserve.server.launch: " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["generate", "Once upon a time", "--max-tokens", "3", "--temperature", "0"], ""),
        (["doctor"], "Nothing is broken"),
        (["bench", "sweep", "--dry-run"], "Batch sizes: demo"),
    ],
    ids=["generate", "doctor", "bench sweep"],
)
def test_commands_run_without_them(tmp_path: Path, arguments: list[str], shown: str) -> None:
    """Four to six seconds of CPU time each, most of it imports, and more until others have compiled the programs. They
    are whole processes because a process of the tests has long imported everything.
    """
    done = run_without(tmp_path, "-m", "jaxserve", *arguments, *CACHE)
    assert done.returncode == 0 and done.stdout.strip() and shown in done.stdout, done.stdout + done.stderr


def test_a_device_day_runs_without_them(tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "device_day.py")
    done = run_without(tmp_path, script, "--dry-run", "--stage", "probe", "--out", "out")
    assert done.returncode == 0 and "probe: done" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["serve", "demo"], ["fastapi>=", "httptools>=", "pydantic>=", "uvicorn>="]),
        (["run-batch", "demo", "-i", "in.jsonl", "-o", "out.jsonl"], ["fastapi>=", "httptools>="]),
        (["bench", "serve"], ["httptools>="]),
    ],
    ids=["serve", "run-batch", "bench serve"],
)
def test_commands_that_need_them_say_what_to_install(tmp_path: Path, arguments: list[str], needed: list[str]) -> None:
    done = run_without(tmp_path, "-m", "jaxserve", *arguments)
    assert done.returncode == 2 and done.stderr.startswith("jaxserve: ") and done.stderr.count("\n") == 1
    advice = done.stderr.partition("pip install ")[2]
    assert all(f"'{name}" in advice for name in needed), done.stderr
