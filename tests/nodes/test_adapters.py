"""Two processes load, replace and unload adapters while they serve; what is wrong on one of them harms nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.features.lora.adapter_files import AdapterSpec, write_adapter
from tests.nodes.nodes import ROOT, TOKEN, end, find_ports, launch
from tests.programs import PROGRAMS

DEMO = ROOT / "jaxserve" / "demo"
OPTIONS = {
    "model": str(DEMO),
    "tensor_parallel_size": 4,
    "compile": "all",
    "dtype": "float32",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 40,
    "precompile_bs_paddings": [2],
    "precompile_token_paddings": [40],
    "max_model_len": 128,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "compilation_cache_dir": str(PROGRAMS),
}


def run_python(*arguments: str, devices: int, folder: Path) -> str:
    """Runs Python on some CPU devices, and returns what it printed."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    environment |= {"JAXSERVE_CLUSTER_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_all_nodes_read_an_adapter_or_none_has_it(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for number, name in enumerate(("first", "second", "missing", "cut", "different"), 1):
        write_adapter(DEMO, here / name, AdapterSpec(8, seed=number, alpha=16.0, size=0.2))
    shutil.copytree(here, there)
    shutil.rmtree(there / "missing")
    file = there / "cut" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    write_adapter(DEMO, there / "different", AdapterSpec(8, seed=99, alpha=16.0, size=0.2))
    master, _ = find_ports(2)
    flags = (str(DEMO), "--nnodes", "2", "--node-rank", "1", "--master-port", str(master))
    other = launch(*flags, port=master, devices=2, folder=there)
    recording = tmp_path / "steps.jsonl"
    try:
        options = json.dumps({**OPTIONS, "nnodes": 2, "master_port": master, "record_steps": str(recording)})
        shown = run_python(str(ROOT / "tests/nodes/adapter_planner.py"), options, devices=2, folder=here)
        assert other.process.wait(30) == 0, other.log
    finally:
        end([other])
    found = json.loads(shown.partition("FOUND ")[2])
    reasons = {name: text.partition(": ") for name, text in found["refusals"].items()}
    assert {name: rank for name, (rank, _, _) in reasons.items()} == dict.fromkeys(reasons, "rank 1")
    assert "adapter_config.json" in reasons["missing"][2] and "truncated" in reasons["cut"][2]
    assert reasons["different"][2] == "has other files at different than rank 0"
    assert found["compiles"] == 0
    first, second, again = found["ids"]
    assert first == again != second
    command = ["-m", "jaxserve", "replay", str(recording), "--compilation-cache-dir", str(PROGRAMS)]
    command += [part for name in ("first", "second") for part in ("--adapter", str(here / name))]
    assert "Equal: every token id" in run_python(*command, devices=4, folder=here), "as on one node"
