"""Rank 0 as a Python program: new weights, drafts, recurrent states, images, and a recording for one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.e2e.image_prompts import END, IMAGE, START, TOWERS
from tests.golden_cases import load_case
from tests.nodes.nodes import ROOT, TOKEN, end, find_ports, launch
from tests.programs import PROGRAMS

DEMO = ROOT / "jaxserve" / "demo"
PROMPTS = ["What is a cache?", "one two three one two three one two"]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 1}
SIZES = {"dtype": "float32", "max_num_seqs": 1, "max_num_batched_tokens": 40, "max_model_len": 128}


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with other weights."""
    folder = tmp_path_factory.mktemp("changed")
    for path in DEMO.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(DEMO / "model.safetensors")
    smaller = {name: (tensor.astype(np.float32) * 0.9).astype(tensor.dtype) for name, tensor in tensors.items()}
    save_file(smaller, folder / "model.safetensors")
    return folder


def run_planner(devices: int, checkpoints: list[Path], prompts: Any = PROMPTS, **options: Any) -> dict[str, Any]:
    """Runs `planner.py` on some CPU devices; returns what it found."""
    options = {"model": str(DEMO), "tensor_parallel_size": 4, "compile": "all", **SIZES, **options}
    options["compilation_cache_dir"] = str(PROGRAMS)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    environment["JAXSERVE_CLUSTER_TOKEN"] = TOKEN
    command = [sys.executable, str(ROOT / "tests/nodes/planner.py"), json.dumps(options), json.dumps(prompts)]
    command += map(str, checkpoints)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))
    return found


def run_nodes(checkpoints: list[Path], devices: int = 2, **options: Any) -> dict[str, Any]:
    """The same with two nodes, the second of which needs only to know where the first is."""
    master, _ = find_ports(2)
    flags = ("--nnodes", "2", "--node-rank", "1", "--master-port", str(master))
    other = launch(str(options.get("model", DEMO)), *flags, port=master, devices=devices)
    try:
        found = run_planner(devices, checkpoints, nnodes=2, master_port=master, **options)
        assert other.process.wait(30) == 0, other.log
        return found
    finally:
        end([other])


def test_new_weights_drafts_and_a_recording(changed: Path, tmp_path: Path) -> None:
    recording, checkpoints = tmp_path / "steps.jsonl", [changed, DEMO]
    found = run_nodes(checkpoints, speculative_config=DRAFTS, record_steps=str(recording))
    plain = run_planner(4, checkpoints)
    assert found["ids"] == plain["ids"] and plain["compiles"] == 0, (
        "tokens depend neither on nodes nor on drafts, and nothing compiles"
    )
    first, after, again = found["ids"]
    assert first == again != after and found["compiles"] == 0
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    command = [sys.executable, "-m", "jaxserve", "replay", str(recording), "--compilation-cache-dir", str(PROGRAMS)]
    command += [part for checkpoint in checkpoints for part in ("--weights", str(checkpoint))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Equal: every token id" in done.stdout


# With drafts it compiles verify steps, and what settles states behind them, for one process and for two nodes.
@pytest.mark.parametrize("drafts", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_recurrent_states_and_their_snapshots_are_those_of_one_process(drafts: bool) -> None:
    """Prompts that share a beginning go on from its snapshot; few pages preempt a row, which goes on from its last.

    With drafts states follow each verify step by a program of its own.
    """
    prompts = [{"prompt_token_ids": [*range(3, 75), *[7 + index] * 5]} for index in range(4)]
    options = {"model": str(load_case("qwen3_next").path), "skip_tokenizer_init": True, "prompts": prompts}
    options |= {"tensor_parallel_size": 2, "max_num_seqs": 3, "max_num_batched_tokens": 96, "max_model_len": 160}
    options |= {"num_kv_pages_override": 11, "page_size": 32}
    options |= {"precompile_bs_paddings": [3], "precompile_token_paddings": [96]}  # few programs
    lookups = DRAFTS | {"prompt_lookup_max": 1, "num_speculative_tokens_per_batch_size": [[1, 3, 1]]}
    options |= {"speculative_config": lookups} if drafts else {}
    found = run_nodes([], devices=1, **options)
    assert found == run_planner(2, [], **options)
    assert found["hits"] >= 64 and found["preemptions"] and (found["accepted"] > 0) == drafts


def test_images_are_computed_on_all_nodes() -> None:
    """Each node runs the tower on its share of the heads; few pages preempt rows, whose images come again."""
    ids = [[*range(3, 20), START, IMAGE, END, *range(30, 36), START, IMAGE, END, 7, 8 + index] for index in range(3)]
    pictures = [[[48, 48, index], [30, 50, 1]] for index in range(3)]
    prompts = [{"prompt_token_ids": own, "pictures": shown} for own, shown in zip(ids, pictures, strict=True)]
    options = {"model": str(TOWERS / "qwen3_vl"), "skip_tokenizer_init": True, "prompts": prompts}
    options |= {"tensor_parallel_size": 2, "max_num_seqs": 3, "max_num_batched_tokens": 40, "max_model_len": 192}
    options |= {"num_kv_pages_override": 11, "page_size": 32}
    options |= {"precompile_bs_paddings": [3], "precompile_token_paddings": [40]}  # few programs
    found = run_nodes([], devices=1, **options)
    assert found == run_planner(2, [], **options)
    assert found["images"] >= 4 and found["preemptions"] and found["compiles"] == 0
