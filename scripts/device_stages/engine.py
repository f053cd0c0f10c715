"""Decode steps of the whole engine with random weights, by `jaxserve bench sweep`.

Few layers come first: they show the same faults sooner.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from device_stages.items import Context, Item, describe_fault
from device_stages.results import Line

PRESET = "llama-3.1-8b"
CONTEXT = 4096
BATCHES = {"engine_4": (32,), "engine_32": (32, 1, 128)}
_TINY = "--model llama-30m --layers 2 --contexts 64 --batch-sizes 1 --steps 2 --num-iters 1"


def list_items(context: Context) -> Iterator[Item]:
    layers = int(context.stage.removeprefix("engine_"))
    yield Item(f"steps of {layers} layers", partial(measure_steps, context, layers))


def measure_steps(context: Context, layers: int) -> Line:
    """Measures one engine at a few batch sizes; a failure keeps earlier figures."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        command = [sys.executable, "-m", "jaxserve", "bench", "sweep", "--output-json", str(found), "--compile", "used"]
        if context.tiny:
            command += _TINY.split()
        else:
            batches = map(str, BATCHES[context.stage])
            command += ["--model", PRESET, "--layers", str(layers)]
            command += ["--contexts", str(CONTEXT), "--batch-sizes", *batches]
            command += ["--attention-impl", context.impl] if context.impl else []
        done = subprocess.run(command, text=True, check=False, stderr=subprocess.PIPE)
        sys.stderr.write(done.stderr)
        figures = json.loads(found.read_text())["figures"] if found.exists() else {"points": [], "not_measured": []}
    points = {
        f"{point['batch_size']} x {point['context']}": {
            "ms": 1e3 * point["step_seconds"]["median"],
            "share_of_limit": point["limit_share"]["median"],
        }
        for point in figures["points"]
    }
    line = {"steps": points, "not_measured": figures["not_measured"]}
    return line if done.returncode == 0 else {**line, "ok": False, "error": describe_fault(done.stderr)}
