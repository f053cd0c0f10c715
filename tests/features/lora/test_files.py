"""What an adapter's files may hold, and what is refused, by key or tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.core.models.base import DecoderConfig
from jaxserve.errors import ConfigError, TokenizerError, WeightsError
from jaxserve.families.registry import parse_config
from jaxserve.features.lora.files import AdapterFiles
from jaxserve.features.lora.matrices import list_matrices
from jaxserve.features.lora.peft_config import read_peft_config
from jaxserve.features.lora.tokenizer import check_tokenizer
from jaxserve.tokenizers.load import load_tokenizer
from tests.features.lora.adapter_files import AdapterSpec, list_linear, write_adapter
from tests.golden_cases import GOLDENS, load_case
from tests.quantized_files import write_file

CASE = load_case("llama_gqa")
TOKENIZER = GOLDENS / "classifiers" / "qwen2"
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def config() -> DecoderConfig:
    return replace(parse_config(CASE.config), dtype="float32")


def read(folder: Path, config: DecoderConfig, rank: int = 16, targets: tuple[str, ...] = ()) -> list[Any]:
    matrices = list_matrices(config, targets)
    return list(AdapterFiles(folder, config, matrices, rank).read(np.dtype(np.float32)))


def list_tensors(spec: AdapterSpec) -> Tensors:
    tensors = {}
    for module, (a, b) in spec.make(list_linear(CASE.path)).items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    return tensors


HARMLESS: dict[str, Any] = {
    "lora_dropout": 0.1,
    "inference_mode": False,
    "task_type": "CAUSAL_LM",
    "revision": "main",
    "peft_version": "0.18.0",
    "auto_mapping": {"base_model_class": "X"},
    "loftq_config": {},
    "use_dora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "init_lora_weights": "gaussian",
    "fan_in_fan_out": False,
    "alora_invocation_tokens": None,
    "target_parameters": [],
    "megatron_core": "megatron.core",
    "exclude_modules": ["lm_head"],
    "target_modules": "all-linear",
    "next_years_key": None,
}
REFUSED: dict[str, Any] = {
    "use_dora": True,
    "bias": "lora_only",
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "fan_in_fan_out": True,
    "layer_replication": [[0, 2]],
    "alora_invocation_tokens": [5],
    "arrow_config": {"top_k": 2},
    "use_qalora": True,
    "loftq_config": {"loftq_bits": 4},
    "init_lora_weights": "pissa_niter_4",
    "peft_type": "LOHA",
    "r": 0,
    "lora_alpha": "much",
    "use_rslora": "yes",
    "rank_pattern": {"q_proj": -1},
    "alpha_pattern": ["q_proj"],
    "target_modules": [1],
    "layers_to_transform": ["first"],
    "layers_pattern": "(",
    "exclude_modules": "([a-z_.0-9]+)+X",  # takes for ever
    "next_years_key": 3,
}


@pytest.mark.parametrize("key", HARMLESS)
def test_keys_that_change_nothing_are_taken(key: str, config: DecoderConfig, tmp_path: Path):
    write_adapter(CASE.path, tmp_path, AdapterSpec(4, 1), **{key: HARMLESS[key]})
    assert len(read(tmp_path, config)) == 4 * config.num_layers


@pytest.mark.parametrize("key", REFUSED)
def test_keys_that_mean_something_else_are_refused_by_name(key: str, config: DecoderConfig, tmp_path: Path):
    write_adapter(CASE.path, tmp_path, AdapterSpec(4, 1), **{key: REFUSED[key]})
    with pytest.raises(ConfigError, match=rf"adapter_config\.json: {key}: "):
        read(tmp_path, config)


def _drop(tensors: Tensors) -> None:
    del tensors[Q]


def _drop_module(tensors: Tensors) -> None:
    for side in "AB":
        del tensors[Q.replace("_A.", f"_{side}.")]


def _cut(tensors: Tensors) -> None:
    tensors[Q] = tensors[Q][:, :-1]


def _spoil(tensors: Tensors) -> None:
    tensors[Q][0, 0] = np.inf


def _double(tensors: Tensors) -> None:
    for side in "AB":
        name = Q.replace("_A.", f"_{side}.")
        tensors[name.replace("model.layers", "language_model.layers")] = tensors[name]


def _count(tensors: Tensors) -> None:
    tensors[Q] = tensors[Q].astype(np.int32)


def _add(name: str) -> Callable[[Tensors], None]:
    def add(tensors: Tensors) -> None:
        tensors[name] = np.zeros((4, 4), np.float32)

    return add


BROKEN: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "missing": (_drop, r"q_proj\.lora_A\.weight' is missing$"),
    "missing module": (_drop_module, r"q_proj\.lora_A\.weight' is missing, by target_modules"),
    "shape": (_cut, r"q_proj\.lora_A\.weight' must have shape \[4, 32\], got \[4, 31\]"),
    "infinite": (_spoil, r"q_proj\.lora_A\.weight' has values that are not finite"),
    "doubled": (_double, "stands beside .* which is the same module"),
    "integers": (_count, r"q_proj\.lora_A\.weight' must be one of BF16, F16, F32, got I32"),
    "head": (_add("base_model.model.lm_head.lora_A.weight"), "lm_head.* adapters of heads are not served"),
    "embedding": (_add("base_model.model.model.embed_tokens.lora_embedding_A"), "adapters of embeddings"),
    "vision": (_add("base_model.model.model.vision.layers.0.self_attn.q_proj.lora_A.weight"), "is no module of this"),
    "expert": (_add("base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight"), "routed experts"),
    "router": (_add("base_model.model.model.layers.0.mlp.gate.lora_A.weight"), "adapters of routers"),
    "absorbed": (_add("base_model.model.model.layers.0.self_attn.kv_b_proj.lora_B.weight"), "is absorbed"),
    "dora": (_add("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"), "DoRA"),
    "layer": (_add("base_model.model.model.layers.77.self_attn.q_proj.lora_A.weight"), "layers.77.*is no module"),
    "no root": (_add("model.layers.0.self_attn.q_proj.lora_A.weight"), "is no module of this"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_tensors_that_do_not_fit_the_model_are_refused_by_name(name: str, config: DecoderConfig, tmp_path: Path):
    change, message = BROKEN[name]
    write_adapter(CASE.path, tmp_path, AdapterSpec(4, 1))
    tensors = list_tensors(AdapterSpec(4, 1))
    change(tensors)
    write_file(tmp_path / "adapter_model.safetensors", tensors)
    with pytest.raises(WeightsError, match=message):
        read(tmp_path, config)


def test_a_rank_that_is_too_large_is_refused_with_one_that_fits(config: DecoderConfig, tmp_path: Path):
    write_adapter(CASE.path, tmp_path, AdapterSpec(9, 1))
    with pytest.raises(WeightsError, match="has rank 9, above max_lora_rank=8; max_lora_rank=16 would fit"):
        read(tmp_path, config, 8)
    assert read_peft_config(tmp_path).largest_rank == 9


def test_modules_that_the_option_leaves_out_are_refused(config: DecoderConfig, tmp_path: Path):
    write_adapter(CASE.path, tmp_path, AdapterSpec(4, 1, choose=lambda module: module.endswith(("q_proj", "o_proj"))))
    found = read(tmp_path, config, targets=("q_proj", "o_proj"))
    assert {matrix.path for matrix, _ in found} == {("qkv",), ("o",)} and found[0][1]["a"].shape == (32, 16)
    with pytest.raises(WeightsError, match=r"o_proj.* is no module of this model that an adapter can change"):
        read(tmp_path, config, targets=("q_proj",))
    with pytest.raises(ConfigError, match=r"lora_target_modules: 'query' is no module .* some are down_proj"):
        list_matrices(config, ("query",))


def test_files_that_are_no_adapter_are_refused(config: DecoderConfig, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"there is no adapter_config\.json"):
        read(tmp_path, config)
    write_adapter(CASE.path, tmp_path, AdapterSpec(4, 1))
    file = tmp_path / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(WeightsError, match="truncated"):
        read(tmp_path, config)
    file.unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(WeightsError, match="is a pickle, which is never opened"):
        read(tmp_path, config)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="an object is expected"):
        read(tmp_path, config)
    (tmp_path / "adapter_config.json").unlink()
    write_adapter(CASE.path, tmp_path, AdapterSpec(4, 1, choose=lambda module: False))
    with pytest.raises(WeightsError, match="has no matrices for any module"):
        read(tmp_path, config)


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "language_model.model.", "language_model."])
def test_names_of_the_model_alone_and_inside_others_are_known(prefix: str, config: DecoderConfig, tmp_path: Path):
    write_adapter(CASE.path, tmp_path, AdapterSpec(4, 1))
    expected = read(tmp_path, config)
    found = list_tensors(AdapterSpec(4, 1)).items()
    tensors = {name.replace("model.layers", f"{prefix}layers"): each for name, each in found}
    write_file(tmp_path / "adapter_model.safetensors", tensors)
    for (_, slot), (_, other) in zip(expected, read(tmp_path, config), strict=True):
        assert all(np.array_equal(slot[side], other[side]) for side in "ab")


def test_layers_and_patterns_say_which_modules_must_be_there(tmp_path: Path):
    def targets(module: str, **changes: Any) -> bool:
        base = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}
        (tmp_path / "adapter_config.json").write_text(json.dumps(base | changes))
        return read_peft_config(tmp_path).targets_module(module)

    q = "model.layers.3.self_attn.q_proj"
    assert targets(q) and not targets("model.layers.3.self_attn.k_proj")
    assert targets(q, layers_to_transform=[3]) and not targets(q, layers_to_transform=2)
    assert targets(q, layers_to_transform=[3], layers_pattern="layers")
    assert not targets(q, layers_to_transform=[3], layers_pattern=["blocks"])
    assert targets(q, target_modules=r".*\.layers\.\d\..*q_proj") and not targets(q, target_modules="q_proj|x")
    assert not targets(q, exclude_modules=["q_proj"]) and not targets(q, target_modules=None)


UNSLOTH = (  # as its adapters of models inside multimodal ones have it
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|q_proj|v_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:k_proj|q_proj)))"
)


def test_patterns_that_may_take_for_ever_are_refused_and_those_of_others_are_read(tmp_path: Path):
    def read(pattern: str) -> Any:
        config = {"peft_type": "LORA", "r": 8, "target_modules": pattern}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        return read_peft_config(tmp_path)

    found = read(UNSLOTH)
    assert found.targets_module("model.layers.3.self_attn.q_proj")
    assert found.targets_module("model.language_model.layers.3.self_attn.v_proj")
    assert not found.targets_module("model.layers.3.mlp.up_proj")
    for pattern in (r"(a+)+q_proj", r"(?:.*)*", r"(.|a){9}", ".*a" * 6, "x" * 1001):
        with pytest.raises(ConfigError, match=r"target_modules: a pattern (repeats no group|has at most 1000)"):
            read(pattern)


def test_a_tokenizer_beside_the_adapter_must_have_the_same_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tokenizer = load_tokenizer(TOKENIZER)
    check_tokenizer(tokenizer, tmp_path)
    for file in TOKENIZER.glob("tokenizer*.json"):
        shutil.copy(file, tmp_path)
    check_tokenizer(tokenizer, tmp_path)
    check_tokenizer(None, tmp_path)
    assert not caplog.records
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    check_tokenizer(tokenizer, tmp_path)
    assert "its chat template is not the base model's" in caplog.text
    text = (tmp_path / "tokenizer.json").read_text()
    found = json.loads(text)
    token = {"id": len(tokenizer.list_token_bytes()), "content": "<|new|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    found["added_tokens"].append(token | flags)
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    with pytest.raises(TokenizerError, match="another vocabulary than the base model: token"):
        check_tokenizer(tokenizer, tmp_path)
    found = json.loads(text)
    vocabulary = found["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    with pytest.raises(TokenizerError, match="another vocabulary than the base model"):
        check_tokenizer(tokenizer, tmp_path)
