"""Parameters that are filled in while a checkpoint is read: the same numbers, and no leaf of all layers twice."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.core.layers.stack import StackMode, stack_params, stack_specs
from jaxserve.core.models.base import DecoderConfig, ParamSpec
from jaxserve.core.runtime.converter import WeightConverter
from jaxserve.core.runtime.params import fill_params
from jaxserve.core.sharding import DEFAULT_RULES
from jaxserve.core.weights import (
    Piece,
    load_safetensors,
    pieces,
    read_hf_config,
    save_params,
    stream_params,
    stream_pieces,
)
from jaxserve.families.registry import describe_files, ignored_weights, param_specs, parse_config, weight_sources
from jaxserve.features.quantization.schemes import choose_schemes
from tests.core.weights.checkpoints import one_device, write_single
from tests.golden_cases import GOLDENS

OPTIONS: dict[str, Any] = {"mesh": one_device(), "rules": DEFAULT_RULES}
ONE_EXPERT = 1  # bytes, so no two share a piece


@pytest.mark.parametrize("most_bytes", [ONE_EXPERT, pytest.param(pieces.MAX_PIECE_BYTES, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("mode", ["stacked", "unrolled"])
@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral_packed", "gpt_oss_mxfp4", "llama_tied"])
def test_equals_stacking_afterwards(
    name: str, mode: StackMode, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", most_bytes)
    config = parse_config(read_hf_config(GOLDENS / name))
    expected = stack_params(load_safetensors(*list_arguments(GOLDENS / name, config), **OPTIONS), mode)
    found = list(stream_pieces(*list_arguments(GOLDENS / name, config), **OPTIONS))
    experts = [piece for piece in found if ".experts." in piece.name]
    assert {piece.count > 1 for piece in experts} <= {most_bytes == ONE_EXPERT}
    filled = fill_params(stack_specs(param_specs(config), mode), found, WeightConverter(config, **OPTIONS), **OPTIONS)
    assert jax.tree.structure(filled) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, filled, expected)


@pytest.mark.parametrize("mode", ["stacked", "unrolled"])
def test_orbax(mode: StackMode, tmp_path: Path) -> None:
    folder = GOLDENS / "mixtral"
    config = parse_config(read_hf_config(folder))
    specs, params = param_specs(config), load_safetensors(*list_arguments(folder, config), **OPTIONS)
    save_params(tmp_path, params, read_hf_config(folder))
    layers = param_specs(config)["layers"]
    largest = max(sum(spec.num_bytes for spec in jax.tree.leaves(layer, is_leaf=is_spec)) for layer in layers)
    before = count_live()
    peaks = [0]
    restored = watch_live(stream_params(tmp_path, specs, **OPTIONS), peaks)
    filled = fill_params(
        stack_specs(specs, mode), itertools.starmap(Piece, restored), WeightConverter(config, **OPTIONS), **OPTIONS
    )
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(filled))
    assert max(peaks) - before <= total + largest + 4096
    jax.tree.map(np.testing.assert_array_equal, filled, stack_params(params, mode))


@pytest.mark.parametrize("mode", ["stacked", "unrolled"])
@pytest.mark.parametrize(
    "scheme", [None, "int8_per_channel_weight_only", pytest.param("fp8_per_block", marks=pytest.mark.thorough)]
)
def test_devices_hold_the_model_and_one_expert(
    scheme: str | None, mode: StackMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", ONE_EXPERT)
    folder = GOLDENS / "qwen2_moe"
    config = choose_schemes(parse_config(read_hf_config(folder)), scheme, None)
    stored = describe_files(config)
    found = stream_pieces(*list_arguments(folder, stored), **OPTIONS)
    before = count_live()
    peaks = [0]
    specs = stack_specs(param_specs(config), mode)
    params = fill_params(specs, watch_live(found, peaks), WeightConverter(config, **OPTIONS), **OPTIONS)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    largest = max(  # of what comes whole
        spec.num_bytes // (1 if spec.piece_axis is None else spec.shape[spec.piece_axis])
        for spec in jax.tree.leaves(param_specs(stored), is_leaf=is_spec)
    )
    layer = param_specs(stored)["layers"][0]["experts"]["gate_up"]["weight"]
    assert max(peaks) - before <= total + largest + 1024  # and some indices
    assert largest + 1024 < layer.num_bytes
    if scheme is None:
        expected = stack_params(load_safetensors(*list_arguments(folder, config), **OPTIONS), mode)
        jax.tree.map(np.testing.assert_array_equal, params, expected)
    else:
        assert total < 0.6 * sum(spec.num_bytes for spec in jax.tree.leaves(param_specs(stored), is_leaf=is_spec))


@pytest.mark.parametrize("form", ["experts", "packed", "gptq", "awq"])
def test_the_host_holds_two_experts(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", ONE_EXPERT)
    config = parse_config(EXPERTS | ({} if form in ("experts", "packed") else {"quantization_config": METHODS[form]}))
    write_single(tmp_path, dict(make_zeros(config, packed=form == "packed")))
    one = 2 * EXPERTS["hidden_size"] * EXPERTS["intermediate_size"] * (4 if form in ("experts", "packed") else 1)
    stream = stream_pieces(*list_arguments(tmp_path, config), **OPTIONS)
    next(stream)  # files are mapped, names are checked
    tracemalloc.start()
    for piece in stream:
        del piece
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    copies = 4 if config.quantization else 2  # unpacking has halves of bytes beside whole ones
    assert one / 2 < peak <= copies * one + 2**19


EXPERTS: dict[str, Any] = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}
METHODS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}


def make_zeros(config: DecoderConfig, *, packed: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors of a form that the model's files may have; scales are 1, and what they are does not matter else."""
    for source in weight_sources(config).values():
        chosen = source.otherwise if packed and source.otherwise is not None else source
        dtypes = chosen.dtypes or (("F32",),) * len(chosen.names)
        for name, shape, dtype in zip(chosen.names, chosen.shapes, dtypes, strict=True):
            yield name, np.ones(shape, np.int32 if "I32" in dtype else np.float32)


def list_arguments(folder: Path, config: DecoderConfig) -> tuple[Path, Any, Any, tuple[str, ...]]:
    return folder, param_specs(config), weight_sources(config), ignored_weights(config)


def watch_live[T](items: Iterator[T], peaks: list[int]) -> Iterator[T]:
    for item in items:
        peaks.append(count_live())
        yield item
        del item


def is_spec(leaf: object) -> bool:
    return isinstance(leaf, ParamSpec)


def count_live() -> int:
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())
