"""Small steps of the smoke test under CUDA's compute-sanitizer, if it is here: accesses out of bounds, races."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from device_stages.child import SCRIPTS
from device_stages.items import Context, Item, NotHereError
from device_stages.results import Line, read_lines, results_of

TOOLS = ("memcheck", "racecheck", "synccheck")
PROGRAM = "compute-sanitizer"
_FAULTY = 86  # the tool's exit status if it found something
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+)|RACECHECK SUMMARY: (\d+)")
# Each array is an allocation of its own, so that an access past its end is out of bounds.
_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}


def list_items(context: Context) -> Iterator[Item]:
    for tool in TOOLS:
        yield Item(tool, partial(check, context, tool))


def check(context: Context, tool: str) -> Line:
    """Runs the smoke test's small step under a tool; returns what the tool found and whether the step was right."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise NotHereError(f"no {PROGRAM}")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.jsonl")
        command = [program, "--tool", tool, "--error-exitcode", str(_FAULTY), sys.executable]
        command += [str(SCRIPTS / "device_stage.py"), "smoke", "--module", "device_stages.smoke", "--tiny"]
        command += ["--results", str(results), *(["--impl", context.impl] if context.impl else [])]
        done = subprocess.run(
            command, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | _ENVIRONMENT,
        )  # fmt: skip
        steps = results_of(read_lines(results), "smoke")
    sys.stdout.write(done.stdout)
    return {**describe_output(done.returncode, done.stdout), "steps": {line["item"]: line.get("ok") for line in steps}}


def describe_output(status: int, text: str) -> Line:
    """Returns the tool's count of errors and its first message."""
    counts = [int(first or second) for first, second in _SUMMARY.findall(text)]
    said = [line.removeprefix("=========").strip() for line in text.splitlines() if line.startswith("=========")]
    line = {"ok": status == 0, "errors": sum(counts) if counts else None}
    return line if status == 0 else {**line, "error": "; ".join(said[1:4])}
