"""The soak runs to its end in seconds too, finds nothing, and would say so if it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.thorough
def test_twenty_seconds_of_everything(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "soak_server.py", "--minutes", "0.34", "--interval", "5", "--json", file],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-3000:]
    found = json.loads(file.read_text())
    assert found["ok"] and all(line["ok"] for line in found["verdict"])
    assert {"stream", "structured", "embeddings", "leave", "sleep", "bad body"} <= set(found["kinds"])
    assert len(found["idle"]) == 3 and len(found["samples"]) > 5
    assert all(sample["memory_mb"] > 50 and sample["threads"] > 5 for sample in found["samples"])


JUDGE = """
import sys
sys.path.insert(0, "scripts")
from types import SimpleNamespace
import soak_server
from soak_load import Tally

def judge(*, growth=0.0, fds=0, threads=0, compiles=0, gauge=0.0, failure=None, tracebacks=0, status=0):
    idle = [soak_server.Sample(t, 300.0 + g, 20 + f, 30 + n, c, {"num_requests_running": r})
            for t, g, f, n, c, r in ((1, 0.0, 0, 0, 0, 0.0), (2, 0.0, 0, 0, 0, 0.0),
                                     (3, growth, fds, threads, compiles, gauge))]
    tally = Tally([0.1], 0, [failure] if failure else [])
    load, server = SimpleNamespace(tallies={"whole": tally}), SimpleNamespace(num_tracebacks=tracebacks)
    return sum(not right for *_, right in soak_server.judge(SimpleNamespace(idle=idle), load, server, status))

assert judge() == judge(growth=90.0, fds=-5, threads=4) == 0
for wrong in ({"growth": 101.0}, {"fds": 6}, {"threads": 5}, {"compiles": 1}, {"gauge": 1.0}, {"failure": "x"},
              {"tracebacks": 1}, {"status": 2}):
    assert judge(**wrong) == 1, wrong
"""


def test_each_fault_is_one() -> None:
    subprocess.run([sys.executable, "-c", JUDGE], check=True, cwd=ROOT)
