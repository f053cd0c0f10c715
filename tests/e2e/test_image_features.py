"""Images beside what else an engine does: parameters of sampling, loops, drafts, adapters, host tier, recordings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, LoRARequest, SamplingParams
from jaxserve.errors import ConfigError, JaxServeError
from jaxserve.features.host_tier import start as tier_start
from jaxserve.tools.cli import main
from tests.e2e.engines import Engines
from tests.e2e.helpers import CACHE, ROOT, greedy, list_flags
from tests.e2e.image_prompts import SIZES, TOWERS, WHOLE, answer, make_mixed_prompts, make_seeing, picture, run, show
from tests.features.lora.adapter_files import AdapterSpec, write_adapter, write_merged
from tests.programs import QUICK_ENV

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}
THOROUGH = pytest.mark.thorough
PROMPTS = [
    *make_mixed_prompts(6, seed=3),
    show(4, picture(48, 48, 1), 5, picture(8, 8), 3),
    show(9, picture(16, 40, 2), 1),
]
PARAMS = [
    greedy(40),
    SamplingParams(seed=1, max_tokens=30, repetition_penalty=1.4, frequency_penalty=0.5, ignore_eos=True),
    greedy(30, presence_penalty=0.7, logprobs=2),
    SamplingParams(seed=2, max_tokens=20, n=2, top_p=0.9, ignore_eos=True),
    greedy(20, logit_bias={7: 3.0}, suppress_tokens=[9], min_tokens=5),
    SamplingParams(seed=3, max_tokens=20, allowed_token_ids=list(range(20, 40)), ignore_eos=True),
    greedy(40, prompt_logprobs=1, n=2),
    SamplingParams(seed=4, max_tokens=40, temperature=0.5, min_p=0.05, ignore_eos=True),
]


def answer_all(llm: LLM, params: Any = PARAMS, **options: Any) -> list[list[list[int]]]:
    """The ids of all completions, of prompts beside each other."""
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, **options)
    return [[each.token_ids for each in output.outputs] for output in outputs]


def answer_alone(engines: Engines, params: Any) -> list[list[list[int]]]:
    """Of every request by itself, with nothing cached."""
    llm, found = engines.get(make_seeing), []
    for prompt, each in zip(PROMPTS, params, strict=True):
        llm.reset_prefix_cache()
        found += [[one.token_ids for one in output.outputs] for output in run(llm, [prompt], each)]
    return found


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[list[list[int]]]:
    return answer_alone(engines, [greedy(40)] * len(PROMPTS))


@pytest.fixture(scope="module")
def alone(engines: Engines) -> list[list[list[int]]]:
    return answer_alone(engines, PARAMS)


def test_parameters_of_sampling_give_the_tokens_of_prompts_alone(
    alone: list[list[list[int]]], engines: Engines
) -> None:
    assert answer_all(engines.get(make_seeing)) == alone


@pytest.mark.parametrize("options", [{"max_decode_steps": 5}, {"speculative_config": DRAFTS}])
def test_loops_and_drafts_give_the_tokens_of_plain_steps(
    options: dict[str, Any], plain: list[list[list[int]]], engines: Engines
) -> None:
    llm = engines.get(make_seeing, **options)
    assert answer_all(llm, greedy(40)) == plain
    loops, counts = llm.ready.runner.device.programs.of_kind("loop"), llm.ready.engine.scheduler.counts
    assert loops or counts.num_accepted_tokens > 10


@THOROUGH
@pytest.mark.parametrize("options", [{"max_decode_steps": 5}, {"speculative_config": DRAFTS}])
def test_loops_and_drafts_sample_as_plain_steps(
    options: dict[str, Any], alone: list[list[list[int]]], engines: Engines
) -> None:
    assert answer_all(engines.get(make_seeing, **options)) == alone


@THOROUGH
def test_an_adapter_changes_the_text_and_never_the_tower(
    alone: list[list[list[int]]], engines: Engines, tmp_path: Path
) -> None:
    """Its rows share the vectors of images with rows that have none."""
    source, spec = TOWERS / "qwen3_vl", AdapterSpec(4, seed=3)
    adapter = LoRARequest("own", 1, str(write_adapter(source, tmp_path / "adapter", spec)))
    llm = make_seeing(enable_lora=True, max_loras=2, max_lora_rank=8)
    chosen = [None, adapter] * (len(PROMPTS) // 2)
    found = answer_all(llm, lora_request=chosen)
    wanted = answer_all(make_seeing(str(write_merged(source, tmp_path / "merged", spec))))
    assert found == [two if own else one for one, two, own in zip(alone, wanted, chosen, strict=True)]
    assert any(one != two for one, two in zip(alone, wanted, strict=True))
    before = llm.ready.runner.counts.tower_images
    answer(llm, [show(3, picture(16, 40, 2), 3)], greedy(2))
    llm.generate([show(3, picture(16, 40, 2), 3)], greedy(2), use_tqdm=False, lora_request=[adapter])
    assert llm.ready.runner.counts.tower_images - before <= 1


def test_matrices_of_an_adapter_for_the_tower_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_adapter(TOWERS / "qwen3_vl", tmp_path / "adapter", AdapterSpec(4, seed=3))
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    module = "base_model.model.model.{}.lora_{}.weight"
    for side in "AB":
        of_text = tensors[module.format("language_model.layers.0.self_attn.o_proj", side)]
        tensors[module.format("visual.blocks.0.attn.proj", side)] = of_text
    save_file(tensors, path)
    llm = make_seeing(enable_lora=True, max_loras=1, max_lora_rank=8)
    with pytest.raises(JaxServeError, match=r"visual\.blocks\.0"):
        llm.generate([PROMPTS[0]], greedy(2), use_tqdm=False, lora_request=LoRARequest("own", 1, str(folder)))


@THOROUGH
def test_pages_of_images_come_back_from_the_host(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_start, "refuse_slow_tier", lambda *_: None)
    prompts = [show(20, picture(48, 48, seed), 40, seed=1) for seed in range(6)]
    whole = engines.get(make_seeing, enable_prefix_caching=False, **WHOLE)
    wanted = [answer(whole, [prompt], greedy(10))[0] for prompt in prompts]
    llm = make_seeing(num_kv_pages_override=8, kv_offloading_size=0.002)
    for _ in range(2):
        assert [answer(llm, [prompt], greedy(10))[0] for prompt in prompts] == wanted
    assert llm.ready.engine.scheduler.counts.host_hits >= 6 * 64


def test_a_recording_holds_each_image_and_is_replayed_equal(
    plain: list[list[list[int]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"
    llm = make_seeing(record_steps=str(path))
    assert answer_all(llm, greedy(40)) == plain
    calls = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    written = [write for call in calls for write in call.get("plan", {}).get("image_writes", [])]
    assert len(written) == llm.ready.runner.counts.tower_images
    capsys.readouterr()
    assert main(["replay", str(path), *list_flags({"compilation_cache_dir": CACHE["compilation_cache_dir"]})]) == 0
    assert "Equal" in capsys.readouterr().out


@THOROUGH
def test_a_bundle_has_the_programs_of_the_tower(plain: list[list[list[int]]], tmp_path: Path) -> None:
    folder, source = tmp_path / "bundle", TOWERS / "qwen3_vl"
    command = [sys.executable, "-m", "jaxserve", "build", str(source), "-o", str(folder), "--skip-tokenizer-init"]
    command += list_flags(SIZES | {"dtype": "float32"})
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | QUICK_ENV, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    llm = make_seeing(bundle=str(folder))
    assert sorted(llm.ready.runner.device.programs.of_kind("tower")) == [64, 128, 256]
    assert answer_all(llm, greedy(40)) == plain and llm.ready.runner.num_compiles == 0
    with pytest.raises(ConfigError, match="max_num_batched_patches"):
        make_seeing(bundle=str(folder), max_num_batched_patches=128)
