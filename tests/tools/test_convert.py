"""Checkpoints that are quantized and written again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.sharding import make_mesh
from jaxserve.core.weights import read_hf_config
from jaxserve.core.weights.reader import open_checkpoint
from jaxserve.core.weights.write import write_checkpoint
from jaxserve.engine.model_files import load_params, locate_model, resolve_model
from jaxserve.errors import ConfigError, WeightsError
from jaxserve.families.registry import parse_config
from jaxserve.features.choose import make_shapes
from jaxserve.model_options import DEMO_MODEL, ModelOptions
from jaxserve.quantization_config import SCHEMES
from jaxserve.tools.cli import main
from jaxserve.tools.convert import convert_checkpoint
from tests.core.weights.checkpoints import flatten_arrays
from tests.e2e.helpers import generate_ids, greedy, make_llm
from tests.gguf_files import make_tensors, write_gguf
from tests.golden_cases import load_case


def read_params(model: str, **options: Any) -> dict[str, np.ndarray]:
    """The parameters that an engine has, by dotted path; a CPU's are not packed."""
    config = EngineConfig.from_options(model=model, **options)
    files = locate_model(config.model)
    shapes = make_shapes(config, resolve_model(config, files), "cpu", "cpu")
    shapes = dataclasses.replace(shapes, model=dataclasses.replace(shapes.model, packed=False))
    return flatten_arrays(load_params(config, files, shapes, make_mesh(1)))


def convert(model: str, folder: Path, **options: Any) -> Path:
    chosen = EngineConfig.from_options(model=model, **options).model
    convert_checkpoint(chosen, locate_model(chosen), folder)
    return folder


def as_numbers(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Quantized matrices expanded; a file may be expanded already where the engine's own quantizer keeps parts."""
    whole = {name: value.astype(np.float32) for name, value in params.items() if ".weight." not in name}
    for name, values in params.items():
        if name.endswith(".values"):
            matrix, scales = name.removesuffix(".values"), params[name.replace(".values", ".scales")]
            spread = np.repeat(scales.astype(np.float32), values.shape[-2] // scales.shape[-2], axis=-2)
            whole[matrix] = values.astype(np.float32) * spread
    return whole


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme not in ("fp8_per_tensor", "fp8_per_block")])
def test_files_have_what_an_engine_would_make(scheme: str, tmp_path: Path) -> None:
    folder = convert(DEMO_MODEL, tmp_path / "out", quantization=scheme)
    expected = as_numbers(read_params(DEMO_MODEL, quantization=scheme))
    found = as_numbers(read_params(str(folder)))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_a_matrix_that_is_no_numbers_is_not_quantized(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(locate_model(ModelOptions()).find_weights())
    tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.names}
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][1, 2] = np.inf
    write_checkpoint(tmp_path / "bad", tensors.items(), read_hf_config(checkpoint.path))
    with pytest.raises(WeightsError, match=r"infinite values in .*\.safetensors") as caught:
        convert(str(tmp_path / "bad"), tmp_path / "out", quantization="fp8_per_channel")
    assert caught.value.field == name


@pytest.mark.parametrize(("scheme", "shape"), [("fp8_per_tensor", (1,)), ("fp8_per_block", (1, 2))])
def test_scales_of_several_rows_are_each_modules_own(scheme: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """An engine has q, k and v in one matrix, whose blocks may have rows of several."""
    folder = convert(DEMO_MODEL, tmp_path / "out", quantization=scheme)
    name = "model.layers.0.self_attn.k_proj.weight"
    matrix = open_checkpoint(locate_model(ModelOptions()).find_weights()).read(name).astype(np.float32)
    scales = open_checkpoint(folder).read(f"{name}_scale")
    assert scales.shape == shape and matrix.shape == (128, 256)
    largest = np.abs(matrix.reshape(128, shape[-1], -1)).max(axis=(0, 2))
    np.testing.assert_allclose(scales.reshape(-1), largest / 448, rtol=1e-6)
    values = open_checkpoint(folder).read(name).astype(np.float32)
    spread = np.repeat(scales.reshape(-1), 256 // shape[-1])
    assert np.abs(values * spread - matrix).max() <= largest.max() / 28


def test_experts_and_projections_apart(tmp_path: Path) -> None:
    table = {
        "linear": {"weight": "int8_per_channel_weight_only", "activation": "int8_per_token"},
        "moe": "fp8_per_channel",
        "ignore": ["o_proj"],
    }
    case = load_case("qwen3_moe")
    folder = convert(str(case.path), tmp_path / "out", quantization_config=table)
    config = parse_config(read_hf_config(folder))
    assert config.quantization is not None and config.quantization.wanted_row_dtypes == {"int8"}
    found = {name: str(value.dtype) for name, value in read_params(str(folder)).items()}
    assert found["layers.0.qkv.weight.values"] == "int8" and found["layers.0.o.weight"] == config.dtype
    assert found["layers.1.experts.down.weight.values"] == "bfloat16"  # of a CPU, for 8-bit floats
    assert found["layers.1.router.weight"] == config.dtype
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.mlp.gate" in settings["ignore"] and "model.embed_tokens" not in settings["ignore"]
    assert settings["format"] == "mixed-precision"


def test_files_of_some_size_each(tmp_path: Path) -> None:
    tensors = {f"{index}": np.full((8, 8), index, np.float32) for index in range(5)}
    total = write_checkpoint(tmp_path / "out", tensors.items(), {}, max_file_bytes=600)
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert total == 5 * 256 and names[:2] == ["config.json", "model-00001-of-00003.safetensors"]
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.names == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor)
    with pytest.raises(WeightsError, match="already exists"):
        write_checkpoint(tmp_path / "out", tensors.items(), {})


@pytest.mark.parametrize(
    ("case", "options", "words"),
    [
        ("llama_gqa", {}, "names no scheme"),
        ("llama_gqa", {"quantization": "mxfp4"}, "mlp.down_proj .*40 columns.* 32"),
        ("llama_gqa", {"quantization": "awq"}, "awq"),
        ("gpt_oss", {"quantization": "fp8_per_channel"}, "experts.gate_up_proj"),
        ("gpt_oss_mxfp4", {"quantization": "mxfp4"}, "mxfp4"),
    ],
)
def test_what_cannot_be_converted(case: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        convert(str(load_case(case).path), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "out")
    arguments = ["convert", "demo", "-o", target, "--quantization", "int4_per_group_weight_only"]
    assert main(arguments) == 0
    assert f"{target}: 28 matrices quantized; weights of" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "already exists; choose another directory" in capsys.readouterr().err
    assert main(["convert", "demo", "-o", str(tmp_path / "other")]) == 2
    assert "quantization: names no scheme" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*arguments, "--max-num-seqs", "4"])
    assert "there is no flag --max-num-seqs" in capsys.readouterr().err


def test_answers_are_those_of_the_engine_that_quantizes(tmp_path: Path) -> None:
    case = load_case("llama_gqa")
    folder = convert(str(case.path), tmp_path / "out", quantization="fp8_per_channel")
    answers = [
        generate_ids(make_llm(dataclasses.replace(case, path=path), **options), case.prompts[:2], greedy(8))
        for path, options in ((folder, {}), (case.path, {"quantization": "fp8_per_channel"}))
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf_becomes_a_checkpoint_of_the_same_model(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((load_case("llama_gqa").path / "config.json").read_text())
    config |= {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 8}
    number = gguf.GGMLQuantizationType[kind]
    path = write_gguf(
        tmp_path / "model.gguf", "llama", config, make_tensors(config), choose_type=lambda name, tensor: number
    )
    folder = tmp_path / "out"
    assert main(["convert", str(path), "-o", str(folder)]) in (0, None)
    assert "weights of" in capsys.readouterr().out
    one, other = read_params(str(path)), read_params(str(folder))
    assert one.keys() == other.keys()
    assert any(name.endswith(".values") for name in one) == (kind == "Q8_0")
    for name, value in one.items():
        assert value.dtype == other[name].dtype
        np.testing.assert_array_equal(value, other[name])
    prompts = [[3, 4, 5, 6, 7, 8], [9, 10]]
    engines = [make_llm(dataclasses.replace(load_case("llama_gqa"), path=each)) for each in (path, folder)]
    answers = [generate_ids(engine, prompts, greedy(8)) for engine in engines]
    assert answers[0] == answers[1]


def test_the_engine_answers_from_gguf_as_from_safetensors(tmp_path: Path) -> None:
    case = load_case("llama_gqa")
    checkpoint = open_checkpoint(case.path)
    tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.names}
    path = write_gguf(tmp_path / "model.gguf", "llama", case.config, tensors)
    found = generate_ids(make_llm(dataclasses.replace(case, path=path)), case.prompts, greedy(16))
    assert found == [ids[:16] for ids in case.greedy]
