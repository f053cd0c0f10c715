"""A bundle holds the programs of both forms; adapters are no part of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve import LoRARequest
from jaxserve.errors import ConfigError
from tests.e2e.helpers import SIZES, greedy, list_flags, make_llm
from tests.features.lora.adapter_files import AdapterSpec, write_adapter
from tests.golden_cases import load_case
from tests.programs import QUICK_ENV

CASE = load_case("llama_gqa")
OPTIONS = SIZES | {"max_model_len": 64, "num_kv_pages_override": 16, "max_loras": 2}


@pytest.mark.slow
@pytest.mark.thorough
def test_a_bundle_with_adapters_starts_without_compiling(tmp_path: Path):
    folder = tmp_path / "bundle"
    flags = ["--enable-lora", "--dtype", "float32", "--skip-tokenizer-init", *list_flags(OPTIONS)]
    command = [sys.executable, "-m", "jaxserve", "build", str(CASE.path), "-o", str(folder), "--device", "cpu", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | QUICK_ENV, check=False)
    assert done.returncode == 0, done.stderr
    adapter = LoRARequest("a", 1, str(write_adapter(CASE.path, tmp_path / "a", AdapterSpec(4, 1, size=0.2))))
    prompts = [{"prompt_token_ids": [5, 6, 7]}] * 2
    found = []
    for options in ({"bundle": str(folder), "compile": "all"}, {}):
        llm = make_llm(CASE, enable_lora=True, **(OPTIONS | options))
        outputs = llm.generate(prompts, greedy(12), lora_request=[adapter, None], use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
        assert llm.ready.runner.num_compiles == 0 or not options
    assert found[0] == found[1] and found[0][0] != found[0][1]
    with pytest.raises(ConfigError, match="was built with buckets"):
        make_llm(CASE, enable_lora=True, bundle=str(folder), **(OPTIONS | {"max_loras": 1}))
