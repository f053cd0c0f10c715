"""The packaged config.json files: well-known models against the parameter counts their publishers state."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jax
import pytest

from jaxserve.families.registry import param_specs, parse_config, weight_sources

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "models"

PARAMETERS = {
    "bge-m3": 566_705_152,  # without the pooler, which makes no embedding
    "command-r-plus": 103_810_674_688,
    "command-r-v01": 34_980_831_232,
    "command-r7b": 8_028_033_024,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,  # without its layer for multi-token prediction
    "embeddinggemma-300m": 302_863_104,  # and 4,718,592 behind its pooling
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "gemma-4-31b": 30_697_345_340,  # without its eye
    "gemma-4-26b-a4b": 25_233_141_790,  # without its eye
    "gemma-4-e2b": 4_628_569_379,  # without its eye and its ear, and keys and values that nothing reads
    "glm-4.5-air": 106_852_251_264,  # and 3,616,573,568 of its layer for multi-token prediction
    "glm-4.7-flash": 29_943_393_920,  # without its layer for multi-token prediction
    "glm-4-32b-0414": 32_566_081_536,
    "glm-4-9b-0414": 9_400_279_040,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "granite-3.3-8b": 8_170_864_640,
    "granite-4.0-h-tiny": 6_939_037_248,
    "kimi-k2": 1_026_408_232_448,
    "lfm2-1.2b": 1_170_340_608,
    "lfm2-8b-a1b": 8_339_929_856 + 22 * 32,  # with the corrections of its routers, which are no parameters there
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mimo-7b": 7_833_409_536 - 210_790_400,  # without its layer for multi-token prediction
    "minimax-m2": 228_703_644_928 - 13_880_064,  # without the scales of its files
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-small-4": 118_972_826_624,  # without its eye
    "mixtral-8x7b": 46_702_792_704,
    "modernbert-base": 149_014_272,  # without its head
    "nemotron-3-nano-30b-a3b": 31_577_937_344 + 23 * 128,  # with the corrections of its routers
    "nemotron-nano-9b-v2": 8_888_227_328,
    "olmo-1b": 1_176_764_416,
    "olmo-2-1b": 1_484_916_736,
    "olmo-3-7b": 7_298_011_136,
    "olmoe-1b-7b": 6_919_161_856,
    "phi-3-mini-128k": 3_821_079_552,
    "phi-3-mini-4k": 3_821_079_552,
    "pythia-160m": 162_322_944,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "qwen3.5-0.8b": 752_393_024,  # without its eye and its layer for multi-token prediction
    "qwen3.6-27b": 26_895_998_464,  # likewise
    "qwen3.6-35b-a3b": 34_660_610_688,  # likewise
    "smollm3-3b": 3_075_098_624,
    "starcoder2-15b": 15_957_889_024,
    "starcoder2-3b": 3_030_371_328,
    "llama-30m": 33_563_136,  # published by nobody: for benchmarks on CPUs
}


def read_config(name: str):
    return parse_config(json.loads((FOLDER / f"{name}.json").read_text()))


def test_every_file_is_listed_here():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count_is_the_published_one(name: str):
    config = dataclasses.replace(read_config(name), quantization=None)  # scales of packed weights are not counted
    assert sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(config))) == PARAMETERS[name]
    shapes = {
        tensor: shape
        for source in weight_sources(config).values()
        for tensor, shape in zip(source.names, source.shapes, strict=True)
    }
    assert sum(map(math.prod, shapes.values())) == PARAMETERS[name]


def test_windows_make_kv_groups():
    gemma = read_config("gemma-3-1b")
    assert [(len(group.layers), group.window) for group in gemma.kv_groups] == [(4, None), (22, 512)]
    assert gemma.kv_groups[0].layers == (5, 11, 17, 23)
    assert gemma.layers[5].rope.theta == 1e6 and gemma.layers[0].rope.theta == 1e4
    mistral = read_config("mistral-7b-v0.1")
    assert [(len(group.layers), group.window) for group in mistral.kv_groups] == [(32, 4096)]
    starcoder2 = read_config("starcoder2-15b")
    assert [(len(group.layers), group.window) for group in starcoder2.kv_groups] == [(40, 4096)]


@pytest.mark.parametrize("name", ["olmo-3-7b", "command-r7b"])
def test_three_windowed_layers_to_one_that_sees_all(name: str):
    config = read_config(name)
    assert [(len(group.layers), group.window) for group in config.kv_groups] == [(8, None), (24, 4096)]
    assert config.kv_groups[0].layers == tuple(range(3, 32, 4))


def test_a_window_that_no_sequence_exceeds_is_no_window():
    config = read_config("gemma-2-2b").with_max_model_len(4096)
    assert [(len(group.layers), group.window) for group in config.kv_groups] == [(26, None)]
    assert len(config.with_max_model_len(4097).kv_groups) == 2
