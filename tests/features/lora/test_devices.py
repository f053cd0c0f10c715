"""Adapters over four devices give what they give on one, and quantized bases what their numbers in float32 give."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LoRARequest
from tests.e2e.helpers import generate_ids, greedy, make_llm, run_on_devices
from tests.families.naive import make_tensors
from tests.families.run_tensor_parallel import CASES
from tests.features.lora.adapter_files import AdapterSpec, write_adapter, write_merged
from tests.golden_cases import load_case
from tests.quantized_files import METHODS, write_file, write_quantized

# Columns split by KV head, a KV head that is repeated, and shared experts inside the mixture's own context.
SPLITS = ("llama", "one_kv_head_odd_vocabulary", "slices_of_experts")


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    from jaxserve.families.registry import parse_config

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_file(folder / "model.safetensors", make_tensors(parse_config(config), seed=1))
    return folder


@pytest.mark.slow
def test_four_devices_give_what_one_gives(tmp_path: Path):
    for name in SPLITS:
        model = write_model(tmp_path / name / "model", CASES[name][0])
        write_adapter(model, tmp_path / name / "adapter", AdapterSpec(8, 2, alpha=32.0, size=0.2))
    script = "import runpy, sys; runpy.run_module('tests.features.lora.run_on_devices', run_name='__main__')"
    found = run_on_devices(4, script, *(str(tmp_path / name) for name in SPLITS))
    for name in SPLITS:
        one, four = found[name]
        assert one == four and one[0] != one[1], name


@pytest.mark.parametrize("method", ["compressed int8 channels", pytest.param("gptq", marks=pytest.mark.slow)])
def test_a_quantized_base_gives_what_its_numbers_in_float32_give(method: str, tmp_path: Path):
    golden, spec = load_case("llama_gqa"), AdapterSpec(4, 3, alpha=16.0)
    quantized, expanded = write_quantized(golden.path, tmp_path, METHODS[method])
    adapter = LoRARequest("a", 1, str(write_adapter(golden.path, tmp_path / "adapter", spec)))
    llm = make_llm(replace(golden, path=quantized), enable_lora=True)
    prompts = golden.prompts[:2]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], greedy(24), lora_request=adapter, use_tqdm=False
    )
    merged = make_llm(replace(golden, path=write_merged(expanded, tmp_path / "merged", spec)))
    assert [output.outputs[0].token_ids for output in outputs] == generate_ids(merged, prompts, greedy(24))
