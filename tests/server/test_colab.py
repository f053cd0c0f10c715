"""The notebook: clean as it is stored, and runnable from top to bottom."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import PROGRAMS

ROOT = Path(__file__).parents[2]
NOTEBOOK: dict[str, Any] = json.loads((ROOT / "scripts" / "colab.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_is_a_notebook_without_outputs() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


def test_cells_are_plain_python() -> None:
    for source in CODE:
        compile(source, "cell", "exec")


def test_says_where_to_install_from(tmp_path: Path) -> None:
    """Without the package and without an address, the first cell ends with what to do."""
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", CODE[0]], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1 and "SOURCE" in done.stderr


@pytest.mark.slow
@pytest.mark.thorough
def test_runs_from_top_to_bottom(tmp_path: Path) -> None:
    program = tmp_path / "notebook.py"
    program.write_text("\n\n".join(CODE))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(PROGRAMS)}
    done = subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
    )
    try:
        shown, _ = done.communicate(timeout=280)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the server too, if a cell before its end has failed
            os.killpg(done.pid, signal.SIGKILL)
    assert done.returncode == 0, shown[-2000:]
    for text in ("ready: http", "so the sum = 168", '{"name": "Ada", "age": 36}', "running", "exit status 0"):
        assert text in shown
