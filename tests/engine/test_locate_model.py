"""What is not supported is refused by its name, with a way out, before weights are fetched or JAX is started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from jaxserve import LLM
from jaxserve.config import EngineConfig
from jaxserve.engine.model_files import locate_model
from jaxserve.errors import ConfigError
from jaxserve.model_options import ModelOptions
from jaxserve.presets import load_preset
from jaxserve.tools.cli import main

LLAMA = load_preset("llama-30m") or {}
UNQUANTIZED = "are not read; known are fp8"
CONFIG = "quantization_config"


def quantized(**settings: object) -> dict[str, object]:
    return {"config.json": LLAMA | {"quantization_config": settings}, "model.safetensors": b""}


def other(model_type: str, architecture: str, **keys: object) -> dict[str, object]:
    config = {"model_type": model_type, "architectures": [architecture], **keys}
    return {"config.json": config, "model.safetensors": b""}


# Files of a folder, as JSON or bytes -> field, and words of the message in their order.
CASES: dict[str, tuple[Mapping[str, object], str, tuple[str, ...]]] = {
    "awq": (quantized(quant_method="awq", bits=4, version="gemv"), f"{CONFIG}.version", ("'gemv' is not read", "gemm")),
    "gptq": (quantized(quant_method="gptq", bits=3), f"{CONFIG}.bits", ("3 is not read", "4 and 8")),
    "fp8": (quantized(quant_method="fp8", fmt="e5m2"), f"{CONFIG}.fmt", ("'e5m2' is not read", "e4m3")),
    "bitsandbytes": (
        quantized(quant_method="bitsandbytes", load_in_4bit=True),
        "quantization_config",
        ("(bitsandbytes)", UNQUANTIZED),
    ),
    "compressed-tensors": (
        quantized(quant_method="compressed-tensors", format="pack-quantized"),
        f"{CONFIG}.config_groups",
        ("None is not read", "at least one group"),
    ),
    "mxfp4": (quantized(quant_method="mxfp4"), "quantization_config", ("(mxfp4)", UNQUANTIZED)),
    "unheard-of": (quantized(quant_method="q17"), "quantization_config", ("(q17)", UNQUANTIZED)),
    "only bits": (quantized(bits=4, group_size=64), "quantization_config", ("(4 bits)", UNQUANTIZED)),
    "no method": (quantized(quant_method=None, x=1), "quantization_config", ("(no method named)", UNQUANTIZED)),
    "mlx": ({"config.json": LLAMA | {"quantization": {"bits": 4}}}, "quantization", ("(4 bits)", UNQUANTIZED)),
    "old gptq": (
        {"config.json": LLAMA, "quantize_config.json": {"bits": 4}, "model.safetensors": b""},
        "quantize_config.json",
        ("(gptq)", "config.json has no quantization_config"),
    ),
    "modelopt": (
        {"config.json": LLAMA, "hf_quant_config.json": {}, "model.safetensors": b""},
        "hf_quant_config.json",
        ("has no object `quantization`",),
    ),
    "gguf": (
        {"llama-Q4_K_M.gguf": b"", "llama-Q8_0.gguf": b""},
        "model",
        ("a GGUF model is one file", "owner/name:file.gguf"),
    ),
    "gguf and config": ({"config.json": LLAMA, "llama.gguf": b""}, "model", ("a GGUF model is one file",)),
    "lora": (
        {
            "adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.1-8B"},
            "adapter_model.safetensors": b"",
        },
        "model",
        ("LoRA adapter of 'meta-llama/Llama-3.1-8B' is no model", "give its base model", "enable_lora"),
    ),
    "lora without a base": ({"adapter_config.json": b"{"}, "model", ("a LoRA adapter is no model", "--lora")),
    "mistral's own": (
        {"params.json": {"dim": 4096}, "consolidated.safetensors": b"", "tekken.json": {}},
        "model",
        ("consolidated", "config.json and model*.safetensors"),
    ),
    "meta's own": ({"consolidated.00.pth": b"", "params.json": {}}, "model", ("consolidated", "config.json")),
    "pickles": (
        {"config.json": LLAMA, "pytorch_model-00001-of-00002.bin": b"", "training_args.bin": b""},
        "model",
        ("pytorch_model-00001-of-00002.bin is a pickle", "convert it to safetensors"),
    ),
    "pickles alone": ({"model.pth": b""}, "model", ("model.pth is a pickle", "convert it to safetensors")),
    "nothing": ({}, "config.json", ("there is no config.json",)),
    "llava": (
        other("llava_next", "LlavaNextForConditionalGeneration", vision_config={"x": 1}, text_config={}),
        "model_type",
        ("'llava_next'", "reads images or sound; give a text-only checkpoint", "known are llama, mistral"),
    ),
    "qwen2.5-vl": (
        other("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", text_config={"hidden_size": 64}),
        "model_type",
        ("text-only checkpoint", "qwen3_vl is the nearest"),
    ),
    "electra": (
        other("electra", "ElectraForMaskedLM"),
        "model_type",
        ("'electra'", "does not generate text", "known are llama"),
    ),
    "t5": (
        other("t5", "T5ForConditionalGeneration", is_encoder_decoder=True),
        "model_type",
        ("'t5'", "encoder-decoder", "known are llama"),
    ),
    "sparse attention": (
        other("deepseek_v32", "DeepseekV32ForCausalLM", n_routed_experts=256, index_topk=2048),
        "model_type",
        ("'deepseek_v32'", "attends sparsely, by an indexer"),
    ),
    "dbrx": (
        other("dbrx", "DbrxForCausalLM", num_local_experts=16),
        "model_type",
        ("'dbrx'", "mixture of experts that is not served yet"),
    ),
    "kimi linear": (
        other("kimi_linear", "KimiLinearForCausalLM", num_experts=256),
        "model_type",
        ("'kimi_linear'", "Kimi Delta Attention, whose recurrent state is not served yet"),
    ),
    "gpt-2": (other("gpt2", "GPT2LMHeadModel"), "model_type", ("'gpt2' is not supported; known are",)),
    "classifier": (
        other("mistral", "MistralForSequenceClassification"),
        "architectures",
        ("a classifier or reranker of an architecture", "known are MistralForCausalLM, MistralModel"),
    ),
    "no model_type": (
        {"config.json": {"architectures": ["Qwen4ForCausalLM"]}},
        "architectures",
        ("Qwen4ForCausalLM", "known are llama", "is the nearest"),
    ),
}


def write(folder: Path, files: Mapping[str, object]) -> str:
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(folder)


def check(message: str, words: tuple[str, ...]) -> None:
    start = 0
    for part in words:
        assert part in message[start:], f"{part!r} is not in {message!r}, or out of order"
        start = message.index(part, start)
    assert "\n" not in message and len(message) < 800


@pytest.mark.parametrize("name", CASES)
def test_refused_by_name(name: str, tmp_path: Path) -> None:
    files, field, words = CASES[name]
    folder = write(tmp_path, files)
    with pytest.raises(ConfigError) as caught:
        locate_model(ModelOptions(model=folder))
    assert caught.value.field.removeprefix(f"{tmp_path}/") == field
    check(str(caught.value), words)


@pytest.mark.parametrize("name", ["awq", "gguf", "lora", "mistral's own", "llava"])
def test_the_same_from_the_plan_and_the_engine(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, _, words = CASES[name]
    folder = write(tmp_path, files)
    assert main(["plan", "--model", folder]) != 0
    check(" ".join(capsys.readouterr().err.split()), words)
    with pytest.raises(ConfigError) as caught:
        LLM(folder, show_progress=False)
    check(str(caught.value), words)


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": LLAMA},
        {"config.json": LLAMA, "model.safetensors": b"", "consolidated.safetensors": b"", "params.json": {}},
        {"config.json": LLAMA, "model.safetensors": b"", "pytorch_model.bin": b"", "adapter_config.json": {}},
        {"config.json": LLAMA | {"quantization_config": None}, "model.safetensors": b"", "x.gguf": b""},
        {"config.json": LLAMA, "training_args.bin": b""},
        {"config.json": {"model_type": "gemma3", "text_config": {}, "vision_config": {"x": 1}}},
    ],
)
def test_a_checkpoint_may_have_others_beside_it(files: Mapping[str, object], tmp_path: Path) -> None:
    files_found = locate_model(ModelOptions(model=write(tmp_path, files)))
    assert files_found.path == tmp_path and files_found.find_weights() == tmp_path


def test_overrides_change_what_was_read(tmp_path: Path) -> None:
    folder = write(tmp_path, {"config.json": LLAMA | {"my_label": "v3"}, "model.safetensors": b""})
    options = EngineConfig.from_options(model=folder, hf_overrides={"my_label": None, "rope_theta": 5e5}).model
    assert locate_model(options).hf_config == LLAMA | {"rope_theta": 5e5}
    preset = EngineConfig.from_options(model="llama-30m", load_format="dummy", hf_overrides={"rope_theta": 5e5}).model
    assert locate_model(preset).hf_config == LLAMA | {"rope_theta": 5e5}


@pytest.mark.parametrize("overrides", [lambda config: config, ["my_label"], "my_label", {3: None}])
def test_overrides_are_a_table_of_keys(overrides: object) -> None:
    with pytest.raises(ConfigError, match=r"^hf_overrides: must be a table of keys of config.json"):
        EngineConfig.from_options(hf_overrides=overrides)


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model: .*path.*model id"):
        locate_model(ModelOptions(model="a" * 300))


def test_dummy_weights_need_a_config_only(tmp_path: Path) -> None:
    folder = write(tmp_path, {"config.json": LLAMA, "pytorch_model.bin": b""})
    assert locate_model(ModelOptions(model=folder, load_format="dummy")).path == tmp_path


def test_a_repository_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a plan needs none."""
    fetched: list[list[str]] = []

    def download(model: str, *, allow_patterns: list[str], **_: Any) -> str:
        fetched.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    write(tmp_path, {"config.json": CASES["awq"][0]["config.json"]})
    with pytest.raises(ConfigError, match="gemv"):
        locate_model(ModelOptions(model="owner/llama-awq"))
    write(tmp_path, {"config.json": LLAMA})
    found = locate_model(ModelOptions(model="owner/llama"))
    assert not any("safetensors" in pattern for patterns in fetched for pattern in patterns)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert found.find_weights() == tmp_path
    assert "model-*.safetensors" in fetched[-1]
