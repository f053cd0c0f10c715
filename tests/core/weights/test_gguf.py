"""GGUF files: models written by llama.cpp's rules, each type of numbers, and matrices that keep their bits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.weights import read_hf_config
from jaxserve.core.weights.fingerprint import fingerprint_weights
from jaxserve.core.weights.finite import require_finite
from jaxserve.core.weights.load import check_tensors
from jaxserve.core.weights.reader import Checkpoint, open_checkpoint
from jaxserve.errors import ConfigError, WeightsError
from jaxserve.families.registry import ignored_weights, list_params, parse_config
from jaxserve.gguf_file import TYPES
from tests.gguf_files import finish, make_tensors, write_gguf
from tests.golden_cases import GOLDENS

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {  # architecture, golden whose config it is, and what is changed
    "llama": ("llama", "llama_gqa", {}),
    "biases": ("llama", "llama_bias", {}),
    "tied": ("llama", "llama_tied", {}),
    "linear": ("llama", "llama_rope_linear", {}),
    "llama3": ("llama", "llama_rope_llama3", {}),
    "yarn": ("llama", "llama_rope_yarn", {}),
    "mixtral": ("llama", "mixtral", {}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", {"decoder_sparse_step": 1}),
    "gemma2": ("gemma2", "gemma2", {"query_pre_attn_scalar": 24}),
    "gemma3": ("gemma3", "gemma3_text", {"query_pre_attn_scalar": 16}),
    "phi3": ("phi3", "phi3", {}),
    "longrope": ("phi3", "phi3_longrope_long", {}),
    "olmo2": ("olmo2", "olmo2", {}),
    "granite": ("granite", "granite", {}),
    "glm4": ("glm4", "glm4", {}),
    "deepseek_v2": ("deepseek2", "deepseek_v2", {}),
    "deepseek_v2_greedy": ("deepseek2", "deepseek_v2_greedy", {"attention_bias": False}),
    "deepseek_v3": ("deepseek2", "deepseek_v3", {"attention_bias": False}),
    "gpt-oss": ("gpt-oss", "gpt_oss", {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}),
}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
KEPT = {"Q8_0": Type.Q8_0, "Q4_0": Type.Q4_0, "MXFP4": Type.MXFP4}


def read_case(name: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    architecture, golden, own = CASES[name]
    config = json.loads((GOLDENS / golden / "config.json").read_text()) | own | changes
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        rope["attention_factor"] = 1.25
    return architecture, config | {
        "sliding_window": config.get("sliding_window") if "gemma" in name or name == "gpt-oss" else None
    }


def build_all(config: DecoderConfig, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """The parameters of a checkpoint whose tensors fit the model."""
    table = list_params(config)
    specs, sources = ({name: getattr(each, part) for name, each in table.items()} for part in ("spec", "source"))
    check_tensors(checkpoint, specs, sources, ignored_weights(config))
    chosen = {name: source.choose(checkpoint.names) for name, source in sources.items()}
    return {name: np.asarray(source.build(*map(checkpoint.read, source.names))) for name, source in chosen.items()}


@pytest.mark.parametrize("name", CASES)
def test_each_architecture_is_the_model_that_was_converted(name: str, tmp_path: Path) -> None:
    architecture, config = read_case(name)
    tensors = make_tensors(config)
    path = write_gguf(tmp_path / "model.gguf", architecture, config, tensors)
    wanted, found = parse_config(config), parse_config(read_hf_config(path))
    for one, other in zip(wanted.layers, found.layers, strict=True):
        for rope in (one.rope, other.rope):
            assert rope is not None
        lengths = (8, wanted.max_position_embeddings)
        for length in lengths:
            np.testing.assert_allclose(
                other.rope.inverse_frequencies(length), one.rope.inverse_frequencies(length), rtol=1e-6
            )
        assert other.rope.attention_factor == pytest.approx(one.rope.attention_factor)
        assert dataclasses.replace(other, rope=one.rope) == one
    same = dataclasses.replace(found, layers=wanted.layers, eos_token_ids=wanted.eos_token_ids)
    assert same == dataclasses.replace(wanted, dtype="float32")
    read = build_all(found, open_checkpoint(path))
    for parameter, each in list_params(wanted).items():
        original = np.asarray(each.source.build(*(tensors[name] for name in each.source.names)))
        np.testing.assert_allclose(read[parameter], original, atol=1e-6, err_msg=parameter)


def test_older_files_of_latent_attention_have_heads_in_one_tensor(tmp_path: Path) -> None:
    architecture, config = read_case("deepseek_v2")
    tensors = make_tensors(config)
    models = [
        write_gguf(tmp_path / f"{old}.gguf", architecture, config, tensors, old_latent=old) for old in (False, True)
    ]
    one, other = (parse_config(read_hf_config(path)) for path in models)
    assert one == other
    new, old = (build_all(one, open_checkpoint(path)) for path in models)
    assert all(np.array_equal(new[name], old[name]) for name in new)


def test_latent_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    architecture, config = read_case("deepseek_v2")
    tensors, rank = make_tensors(config), config["kv_lora_rank"]
    written = write_gguf(tmp_path / "model.gguf", architecture, config, tensors, drop=("blk.1.attn_v_b.weight",))
    with pytest.raises(WeightsError, match=rf"blk.1.attn_k_b.weight of shape \(4, {rank}, 6\).* same heads and rank"):
        open_checkpoint(written)


def test_experts_that_are_chosen_in_another_way_are_refused(tmp_path: Path) -> None:
    architecture, config = read_case("deepseek_v2")

    def add(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(f"{architecture}.expert_gating_func")
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.kv_data[0][f"{architecture}.expert_gating_func"].value = 3

    path = write_gguf(tmp_path / "model.gguf", architecture, config, make_tensors(config), extra=add)
    with pytest.raises(ConfigError, match=r"expert_gating_func: must be 1 \(softmax\) or 2 \(sigmoid\), not 3"):
        read_hf_config(path)


def test_parts_are_one_model(tmp_path: Path) -> None:
    architecture, config = read_case("llama")
    tensors = make_tensors(config)
    whole = write_gguf(tmp_path / "whole.gguf", architecture, config, tensors)
    first = write_gguf(tmp_path / "cut.gguf", architecture, config, tensors, split=5)
    assert first.name.startswith("cut-00001-of-")
    model = parse_config(read_hf_config(first))
    assert model == parse_config(read_hf_config(whole))
    one, other = build_all(model, open_checkpoint(whole)), build_all(model, open_checkpoint(first))
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert fingerprint_weights(first) != fingerprint_weights(whole)
    second = first.with_name(first.name.replace("-00001-", "-00002-"))
    with pytest.raises(WeightsError, match="part 2 of"):
        open_checkpoint(second)
    second.unlink()
    with pytest.raises(WeightsError, match=r"-00002-of-.*No such file"):
        open_checkpoint(first)


def quantize(kind: Type, shape: tuple[int, int]) -> np.ndarray:
    """The bytes of random numbers or, for a type that the package cannot quantize to, random bytes."""
    rng = np.random.default_rng(int(kind))
    try:
        return gguf.quantize(rng.standard_normal(shape).astype(np.float32), kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        return rng.integers(0, 256, (shape[0], shape[1] // block * size), np.uint8)


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_each_type_is_what_the_package_expands(kind: str, tmp_path: Path) -> None:
    """The embedding, which keeps no bits: whole, and in pieces that cut blocks."""
    architecture, config = read_case("llama", hidden_size=512, head_dim=8, vocab_size=11)
    number, tensors = Type[kind], make_tensors(config)
    stored = quantize(number, (11, 512))
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture, config, tensors, choose_type=lambda name, tensor: Type.F32)
    data = gguf.GGUFWriter(path, "llama")
    for key, field in gguf.GGUFReader(path).fields.items():
        if key.startswith("llama."):
            data.add_key_value(key, field.contents(), field.types[0])
    data.add_tensor("token_embd.weight", stored, raw_dtype=number)
    finish(data)
    read: Any = open_checkpoint(path).read("model.embed_tokens.weight")
    whole = gguf.dequantize(stored.view(np.uint8), number).reshape(11, 512)
    assert read.shape == (11, 512) and read.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(read), whole)
    for rows, columns in (
        (slice(2, 5), slice(0, 512)),
        (slice(0, 11), slice(250, 263)),
        (np.array([7, 0, 7]), slice(511, 512)),
        (slice(3, 3), slice(5, 5)),
    ):
        np.testing.assert_array_equal(read[rows, columns], whole[rows, columns])
    np.testing.assert_array_equal(read[4:6][1:, 30:40], whole[5:6, 30:40])


def expand(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    whole = {name: value for name, value in params.items() if not name.endswith((".values", ".scales"))}
    for name, values in params.items():
        if name.endswith(".values"):
            matrix = name.removesuffix(".values")
            scales = params[f"{matrix}.scales"].astype(np.float32)
            whole[matrix] = values.astype(np.float32) * np.repeat(scales, values.shape[-2] // scales.shape[-2], axis=-2)
    return whole


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gpt-oss"])
def test_matrices_keep_their_bits(name: str, kind: str, tmp_path: Path) -> None:
    sizes = SIZES | ({"moe_intermediate_size": 32} if name == "qwen3moe" else {})
    architecture, config = read_case(name, **sizes)
    tensors, number = make_tensors(config), KEPT[kind]
    for tensor in tensors.values():  # blocks of zeros have a scale of 0
        tensor.reshape(-1)[:32] = 0

    def choose(name: str, tensor: np.ndarray) -> Type:
        return number if tensor.ndim > 1 and "_inp" not in name and not name.endswith(".bias") else Type.F32

    path = write_gguf(tmp_path / "model.gguf", architecture, config, tensors, choose_type=choose)
    model = parse_config(read_hf_config(path))
    params = build_all(model, open_checkpoint(path))
    dtype = {"Q8_0": "int8", "Q4_0": "int8", "MXFP4": "float4_e2m1fn"}[kind]
    kept = {leaf.split(".", 2)[2]: value.dtype.name for leaf, value in params.items() if leaf.endswith(".values")}
    if name != "gpt-oss":
        assert kept and set(kept.values()) == {dtype} and "lm_head" not in str(kept)
    else:
        assert set(kept) == (
            {"experts.gate_up.weight.values", "experts.down.weight.values"} if kind == "MXFP4" else set()
        )
    spread = {each: value for each, value in params.items() if "embed" in each or "lm_head" in each}
    assert all(value.dtype == np.float32 for value in spread.values())
    plain = write_gguf(tmp_path / "plain.gguf", architecture, config, tensors)
    rounded = tmp_path / "rounded.gguf"
    _round(plain, rounded, choose, number)
    whole = parse_config(read_hf_config(rounded))
    expected = build_all(whole, open_checkpoint(rounded))
    found = expand(params)
    assert found.keys() == expected.keys()
    for each, value in expected.items():
        np.testing.assert_allclose(found[each].astype(np.float32), value, rtol=1e-6, atol=1e-6, err_msg=each)


def _round(source: Path, target: Path, choose: Any, number: Type) -> None:
    """Writes a file with the numbers in float32 that quantized ones stand for."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for key, field in reader.fields.items():
        if key.startswith(f"{writer.arch}."):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        kind = choose(tensor.name, tensor.data)
        array = np.array(tensor.data)
        rounded = array if kind == Type.F32 else gguf.dequantize(gguf.quantize(array, number), number)
        writer.add_tensor(tensor.name, rounded.astype(np.float32))
    finish(writer)


def test_a_number_that_is_none_is_found(tmp_path: Path) -> None:
    architecture, config = read_case("llama")
    tensors = make_tensors(config)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    path = write_gguf(tmp_path / "model.gguf", architecture, config, tensors, choose_type=lambda name, tensor: Type.F16)
    checkpoint = open_checkpoint(path)
    require_finite(checkpoint, ["model.layers.0.mlp.up_proj.weight"])
    with pytest.raises(WeightsError, match=f"holds NaN or infinite values in {path}") as caught:
        require_finite(checkpoint, sorted(checkpoint.names))
    assert caught.value.field == "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("extra", "field", "words"),
    [
        (lambda writer: writer.add_uint32("llama.attention.sliding_window", 5), "llama.attention.sliding_window", "5"),
        (lambda writer: writer.add_bool("llama.attention.causal", False), "llama.attention.causal", "true"),
        (lambda writer: writer.add_uint32("llama.attention.value_length", 5), "llama.attention.value_length", "keys"),
        (lambda writer: writer.add_string("llama.rope.scaling.type", "warped"), "rope.scaling.type", "warped"),
    ],
)
def test_what_changes_the_model_and_is_not_read_is_refused(
    extra: Any, field: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, config = read_case("llama")
    monkeypatch.setattr(gguf.GGUFWriter, "add_value_length", lambda self, value: None)
    path = write_gguf(tmp_path / "model.gguf", architecture, config, make_tensors(config), extra=extra)
    with pytest.raises(ConfigError, match=words) as caught:
        read_hf_config(path)
    assert caught.value.field == field


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    _, config = read_case("llama")
    path = write_gguf(tmp_path / "model.gguf", "mamba", config, {})
    with pytest.raises(ConfigError, match=r"'mamba' is not read.*known are llama.*safetensors") as caught:
        read_hf_config(path)
    assert caught.value.field == "general.architecture"
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(4)
    writer.add_embedding_length(32)
    writer.add_tensor("blk.0.attn_qkv.weight", np.ones((2, 2), np.float32))
    finish(writer)
    with pytest.raises(WeightsError, match=r"'blk.0.attn_qkv.weight' is none that the architecture llama has"):
        read_hf_config(path)
