"""A recording of an engine that loads adapters, replayed with their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve import LoRARequest
from jaxserve.tools.cli import main
from tests.e2e.helpers import greedy, make_llm
from tests.features.lora.adapter_files import AdapterSpec, write_adapter
from tests.golden_cases import load_case

CASE = load_case("llama_gqa")


def test_a_recording_with_loads_replays_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folders = [write_adapter(CASE.path, tmp_path / str(seed), AdapterSpec(8, seed, 16.0, 0.2)) for seed in range(4)]
    recording = tmp_path / "steps.jsonl"
    llm = make_llm(CASE, enable_lora=True, max_loras=2, max_cpu_loras=4, record_steps=str(recording))
    wanted = [LoRARequest(f"a{number}", number, str(folder)) for number, folder in enumerate(folders[:3], 1)]
    prompts = [{"prompt_token_ids": [7, 9, 11, number]} for number in range(1, 5)]

    def run() -> list[list[int]]:
        outputs = llm.generate(prompts, greedy(12), lora_request=[None, *wanted], use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    before = run()
    llm.ready.engine.reset()  # all slots are empty, and are written again
    assert run() == before
    wanted[2] = LoRARequest("a3", 3, str(folders[3]))
    assert llm.ready.adapters is not None
    llm.ready.adapters.find(wanted[2], anew=True)
    after = run()
    assert after[:3] == before[:3] and after[3] != before[3]
    lines = [json.loads(line) for line in recording.read_text().splitlines()[1:]]
    assert [line["load"] for line in lines if line["call"] == "adapter"] == [1, 2, 3, 4]
    assert str(tmp_path) not in recording.read_text().partition("\n")[2], "its paths are not those of another machine"

    def replay(*adapters: Path) -> tuple[int, str]:
        flags = [part for folder in adapters for part in ("--adapter", str(folder))]
        status = main(["replay", str(recording), *flags])
        shown = capsys.readouterr()
        return status, " ".join((shown.out + shown.err).split())

    status, text = replay(*reversed(folders))
    assert status == 0 and "Equal: every token id" in text and "loads of adapters │ 4 │" in text, text
    status, text = replay(*folders[:3])
    assert status == 2 and "Equal so far" in text and "adapter: load 4 is of an adapter with the digest" in text, text
