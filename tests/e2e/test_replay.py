"""Recordings of real engines on CPU, replayed through the command line."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, LogitsProcessor, SamplingParams, StructuredOutputsParams
from jaxserve.config import EngineConfig
from jaxserve.core.runtime.identity import digest_params, find_difference
from jaxserve.core.scheduler.sequence import MASK_LATE
from jaxserve.engine.async_engine import AsyncLLM
from jaxserve.errors import ConfigError
from jaxserve.presets import demo_model_dir
from jaxserve.tools.cli import main
from tests.e2e.helpers import PROGRAMS, make_demo, make_llm, read_weights
from tests.golden_cases import load_case
from tests.quantized_files import METHODS, write_quantized

CACHE = ("--compilation-cache-dir", str(PROGRAMS))
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "num_speculative_tokens_per_batch_size": [[1, 4, 3]],
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def make_recording(path: Path) -> LLM:
    """An engine that writes its steps there, with few pages."""
    return make_demo(record_steps=str(path), num_kv_pages_override=7)


def make_params() -> list[SamplingParams]:
    """Every way in which a step can sample."""
    schema = StructuredOutputsParams(json=SCHEMA)
    choice = StructuredOutputsParams(choice=["yes", "no", "maybe"])
    return [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        SamplingParams(seed=1, max_tokens=60, logprobs=2, top_p=0.9, ignore_eos=True),
        SamplingParams(seed=2, max_tokens=60, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=10),
        SamplingParams(seed=3, max_tokens=50, logit_bias={7: 5.0}, bad_words=["the"], suppress_tokens=[9]),
        SamplingParams(seed=4, max_tokens=60, structured_outputs=schema, n=2),
        SamplingParams(seed=5, max_tokens=60, structured_outputs=choice),
        SamplingParams(seed=6, max_tokens=20, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=60, structured_outputs=schema),
    ]


def read_calls(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of all at once, with too few pages and masks that are late."""
    path = tmp_path_factory.mktemp("recording") / "steps.jsonl"
    llm = make_recording(path)
    llm.ready.engine._grammars._mask_timeout = 0.0
    prompts = [f"{index}: Once upon a time there was a king. " * (2 + 2 * (index % 3)) for index in range(8)]
    llm.generate(prompts, make_params(), use_tqdm=False)
    llm.embed(prompts[:2], use_tqdm=False)
    assert llm.ready.engine.scheduler.counts.num_preemptions > 0
    return path


def replay(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(["replay", str(path), *CACHE, *flags])
    shown = capsys.readouterr()
    return status, " ".join(shown.out.split()), shown.err


def test_everything_a_step_can_do_is_replayed_equal(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = read_calls(recording)
    masks = [call["mask"] for call in calls if "mask" in call]
    assert masks and MASK_LATE in {token_id for call in calls for token_id in call.get("ids", [])}
    assert sum(len(mask["lines"]) for mask in masks) < sum(len(mask["slots"]) for mask in masks), "lines repeat"
    assert any(new["history"] for call in calls for new in call.get("plan", {}).get("new_rows", []) if "history" in new)
    status, shown, _ = replay(recording, capsys)
    assert status == 0 and "Equal" in shown
    ids = sum(len(call["ids"]) for call in calls if call["call"] == "result")
    assert f"token ids compared │ {ids:,} │" in shown and ids > 300


def test_a_different_id_ends_with_status_1(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "changed.jsonl"
    lines = recording.read_text().splitlines()
    where = next(index for index, line in enumerate(lines) if '"call":"result","step":9,' in line)
    call = json.loads(lines[where])
    old = call["ids"][0]
    call["ids"][0] = old + 1
    lines[where] = json.dumps(call)
    path.write_text("\n".join(lines) + '\n{"call":"sta')
    status, shown, _ = replay(path, capsys)
    assert status == 1
    assert re.search(rf"Different: step 9, row \d+, ticket \d+, id 0 .*: {old + 1} in the recording, {old} here", shown)


def test_a_cut_last_line_is_said(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(b"".join(recording.read_bytes().splitlines(keepends=True)[:40])[:-5])
    status, shown, _ = replay(path, capsys)
    assert status == 0 and "The last line of the recording is cut; it was left out." in shown and "Equal" in shown
    path.write_bytes(recording.read_bytes().splitlines(keepends=True)[0])
    status, _, told = replay(path, capsys)
    assert status == 2 and "nothing was compared" in told


def write_header(source: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    header, _, rest = source.read_text().partition("\n")
    read = json.loads(header)
    change(read)
    target.write_text(f"{json.dumps(read)}\n{rest}")
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.update(recording=2), "recording: the recording is of 2, and here it is 1"),
        (lambda header: header.update(jaxserve="0.0.1"), "jaxserve: the recording is of '0.0.1'"),
        (lambda header: header.update(jax="0.4.0"), "jax: the recording is of '0.4.0'"),
        (lambda header: header["plans"]["NewRow"].pop(), "plans.NewRow: the recording is of ['row: int'"),
        (lambda header: header.update(device="NVIDIA H200"), "device: the recording is of 'NVIDIA H200', and here it"),
        (lambda header: header["mesh"].update(tensor=8), "mesh.tensor: the recording is of 8, and here it is 1"),
        (lambda header: header["model"].update(hidden_size=8), "model.hidden_size: the recording is of 8"),
        (lambda header: header.update(parameters="0"), "parameters: the recording is of '0'"),
        (lambda header: header.pop("options"), "the header lacks options"),
        (lambda header: header["options"].update(tensor_parallel_size=99), "tensor_parallel_size: 99 is not possible"),
        (lambda header: header["options"].update(model="/nowhere"), "/nowhere"),
    ],
)
def test_another_version_device_mesh_or_model_is_refused_by_name(
    recording: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], Any],
    message: str,
) -> None:
    path = write_header(recording, tmp_path / "other.jsonl", change)
    status, shown, told = replay(path, capsys)
    assert status == 2 and message in told and told.startswith("jaxserve: ") and not shown


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with one value changed so that its answers are others."""
    folder = tmp_path_factory.mktemp("weights") / "demo"
    shutil.copytree(demo_model_dir(), folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "norm" in name)
    tensors[name] = tensors[name] * np.asarray(0.7, tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_other_weights_are_refused_by_name(
    recording: Path, other_weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, told = replay(recording, capsys, "--model", str(other_weights))
    assert status == 2 and "jaxserve: weights: the recording is of" in told
    other_model = shutil.copytree(demo_model_dir(), tmp_path / "model")
    config = json.loads((other_model / "config.json").read_text())
    (other_model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.01}))
    status, _, told = replay(recording, capsys, "--model", str(other_model))
    assert status == 2 and "jaxserve: model." in told


def test_new_weights_are_given_to_a_replay(
    other_weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "updated.jsonl"
    llm = make_recording(path)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (before,) = llm.generate("Once upon a time", params, use_tqdm=False)
    updated = make_demo(str(other_weights))
    num_compiles = llm.ready.runner.num_compiles
    llm.update_weights(read_weights(updated))
    assert llm.ready.runner.num_compiles == num_compiles
    (after,) = llm.generate("Once upon a time", params, use_tqdm=False)
    assert before.outputs[0].token_ids != after.outputs[0].token_ids
    status, shown, told = replay(path, capsys)
    assert status == 2 and "give their checkpoint with --weights DIR" in told
    assert "steps compared │ 20 │" in shown and "Equal so far" in shown
    status, shown, told = replay(path, capsys, "--weights", str(demo_model_dir()))
    assert status == 2 and "weights: update 1 wrote other weights" in told
    status, shown, told = replay(path, capsys, "--weights", str(other_weights))
    assert status == 0 and "steps compared │ 40 │" in shown and "new weights │ 1 │" in shown


def test_a_fault_and_an_interrupt_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "faults.jsonl"
    llm = make_recording(path)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    sample, runner = llm.ready.runner.sample, llm.ready.runner
    for error in (RuntimeError("the device is lost"), KeyboardInterrupt()):
        count = 0

        def fail(*arguments: Any, error: BaseException = error) -> Any:
            nonlocal count
            count += 1
            if count == 5:
                raise error
            return sample(*arguments)

        runner.sample = fail  # type: ignore[method-assign]
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["One", "Two"], params, use_tqdm=False)
        else:
            outputs = llm.generate(["One", "Two"], params, use_tqdm=False)
            assert all("the device is lost" in str(output.error) for output in outputs)
        runner.sample = sample  # type: ignore[method-assign]
        llm.generate(["Three", "Four"], params, use_tqdm=False)
    assert [call["error"] for call in read_calls(path) if call["call"] == "failed"] == [
        "RuntimeError: the device is lost",
        "KeyboardInterrupt: ",
    ]
    status, shown, _ = replay(path, capsys)
    assert status == 0 and "steps that failed when recorded │ 2 │" in shown and "resets │ 2 │" in shown


@pytest.mark.thorough
def test_pools_of_several_groups_and_loops_of_steps_are_those_of_the_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is not planned again."""
    path = tmp_path / "windows.jsonl"
    llm = make_llm("gemma3_text", record_steps=str(path), compile="used", max_decode_steps=4)
    prompt = [3 + index % 70 for index in range(90)]
    llm.generate({"prompt_token_ids": prompt}, SamplingParams(seed=1, max_tokens=20), use_tqdm=False)
    assert len(llm.ready.plan.num_pages) > 1
    assert any(call["plan"].get("width", 1) > 1 for call in read_calls(path) if call["call"] == "start")
    monkeypatch.setattr("jaxserve.core.runtime.startup._find_budget", lambda *_: 0)  # with which nothing fits
    status, shown, _ = replay(path, capsys)
    assert status == 0 and "Equal" in shown


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [None, pytest.param(DRAFTS, marks=pytest.mark.thorough)])
def test_rows_that_go_on_from_snapshots_are_replayed(
    drafts: dict[str, Any] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"
    llm = make_llm("qwen3_next", record_steps=str(path), compile="used", speculative_config=drafts)
    assert llm.ready.shapes.impl == "xla", "its heads are too small for the CPU's kernel"
    for tail in (1, 2, 3):
        llm.generate({"prompt_token_ids": [*range(3, 80), *[5] * tail]}, SamplingParams(max_tokens=60, temperature=0))
    plans = [call["plan"] for call in read_calls(path) if "plan" in call]
    assert any(plan.get("state_loads") for plan in plans) and any(plan.get("state_saves") for plan in plans)
    status, shown, _ = replay(path, capsys)
    assert status == 0 and "Equal" in shown


def test_a_quantized_model_is_recorded_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "quantized.jsonl"
    golden = load_case("llama_gqa")
    folder, _ = write_quantized(golden.path, tmp_path / "files", METHODS["awq"])
    llm = make_llm(dataclasses.replace(golden, path=folder), record_steps=str(path), compile="used")
    llm.generate({"prompt_token_ids": [3, 4, 5]}, SamplingParams(seed=1, max_tokens=8), use_tqdm=False)
    status, shown, told = replay(path, capsys)
    assert status == 0 and "Equal" in shown, told


def test_a_model_quantized_while_loading_is_replayed_with_its_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schemes.jsonl"
    table = {"linear": {"weight": "int8_per_channel_weight_only"}, "ignore": ["k_proj", "down_proj"]}
    llm = make_llm("llama_gqa", record_steps=str(path), compile="used", quantization_config=table)
    llm.generate({"prompt_token_ids": [3, 4, 5]}, SamplingParams(seed=1, max_tokens=8), use_tqdm=False)
    status, shown, told = replay(path, capsys)
    assert status == 0 and "Equal" in shown, told
    path = write_header(path, tmp_path / "other.jsonl", _leave_nothing_out)
    status, _, told = replay(path, capsys)
    assert status == 2 and "jaxserve: model.quantization.rules" in told


def _leave_nothing_out(header: dict[str, Any]) -> None:
    del header["options"]["quantization_config"]["ignore"]


def test_what_cannot_be_recorded_is_refused_before_anything_is_loaded(recording: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with pytest.raises(ConfigError, match=r"record_steps: .* exists, and no recording is overwritten"):
        LLM("/no/such/model", record_steps=str(recording))
    with pytest.raises(ConfigError, match="record_steps: a logits_processor is a function"):
        LLM("/no/such/model", record_steps=str(path), logits_processor=LogitsProcessor(lambda logits, _: logits))
    with pytest.raises(ConfigError, match="record_steps: with serve_while_warming"):
        AsyncLLM.from_config(EngineConfig.from_options(model="/nowhere", record_steps=str(path)), only_largest=True)
    assert not path.exists()


def test_one_changed_value_changes_the_digest() -> None:
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(5, 7)).astype(np.float32), "b": [rng.normal(size=33).astype(jax.numpy.bfloat16)]}
    params = jax.tree.map(jax.numpy.asarray, tree)
    first = digest_params(params)
    assert first == digest_params(jax.tree.map(jax.numpy.copy, params))
    assert first != digest_params({**params, "a": params["a"].at[4, 6].add(1e-6)})
    assert first != digest_params({**params, "a": params["a"][::-1]}), "places count"
    assert first != digest_params({**params, "b": [-params["b"][0]]})


def test_differences_are_found_by_name() -> None:
    recorded = {"a": 1, "b": {"c": [1], "d": {"e": 2}}, "more": 0}
    assert find_difference(recorded, {"a": 1, "b": {"d": {"e": 2}}}) is None
    assert find_difference(recorded, {"b": {"d": {"e": 3}}}) == ("b.d.e", 2, 3)
    assert find_difference(recorded, {"f": 3}) == ("f", None, 3)
