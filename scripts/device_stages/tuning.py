"""Searches block sizes by `tune_kernels.py`, whose winners are one file."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial

from device_stages.child import SCRIPTS
from device_stages.items import Context, Item, NotHereError, describe_fault
from device_stages.results import Line

WINNERS = "tuning.json"
_RESERVE = 5.0  # seconds for the process to start and to write


def list_items(context: Context) -> Iterator[Item]:
    yield Item("search", partial(search, context))


def search(context: Context) -> Line:
    """Runs the search for the rest of the stage's time; this process does not use the device."""
    if context.impl == "xla":
        raise NotHereError("the XLA path has no block sizes")
    results = context.out / WINNERS
    with tempfile.TemporaryDirectory() as tables:
        command = [sys.executable, str(SCRIPTS / "tune_kernels.py"), "--output", tables, "--results", str(results)]
        command += ["--seconds", f"{max(1.0, context.seconds - _RESERVE):.0f}"]
        command += ["--impl", context.impl] if context.impl else []
        command += ["--dry-run", "--only", "decode"] if context.tiny else []
        done = subprocess.run(command, text=True, check=False, stderr=subprocess.PIPE)
    sys.stderr.write(done.stderr)
    if "nothing to tune" in done.stderr:
        raise NotHereError(done.stderr.strip())
    winners = json.loads(results.read_text()) if results.exists() else []
    line = {"winners": len(winners), "kernels": sorted({winner["kernel"] for winner in winners})}
    return line if done.returncode == 0 else {**line, "ok": False, "error": describe_fault(done.stderr)}
