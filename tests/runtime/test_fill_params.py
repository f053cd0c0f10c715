"""Stacks that are filled while a checkpoint streams in: the same numbers, and no leaf of all layers twice."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jaxserve.layers.stack import StackMode, stack_params, stack_specs
from jaxserve.models.base import DecoderConfig, ParamSpec
from jaxserve.models.quantization.schemes import choose_schemes
from jaxserve.models.registry import describe_files, ignored_weights, param_specs, parse_config, weight_sources
from jaxserve.runtime.params import fill_params
from jaxserve.runtime.quantizer import WeightQuantizer
from jaxserve.sharding import DEFAULT_RULES
from jaxserve.weights import load_safetensors, read_hf_config, stream_safetensors
from tests.golden_cases import GOLDENS
from tests.weights.checkpoints import one_device


@pytest.mark.parametrize("mode", ["stacked", "unrolled"])
@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral_packed", "llama_tied"])
def test_equals_stacking_afterwards(name: str, mode: StackMode) -> None:
    config = parse_config(read_hf_config(GOLDENS / name))
    specs, mesh = param_specs(config), one_device()
    arguments = GOLDENS / name, specs, weight_sources(config), ignored_weights(config)
    options = {"mesh": mesh, "rules": DEFAULT_RULES}
    expected = stack_params(load_safetensors(*arguments, **options), mode)
    filled = fill_params(
        stack_specs(specs, mode), stream_safetensors(*arguments, **options), make_quantizer(config), **options
    )
    assert jax.tree.structure(filled) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, filled, expected)


@pytest.mark.parametrize("scheme", [None, "int8_per_channel_weight_only"])
def test_devices_hold_the_model_and_one_parameter_at_most(scheme: str | None) -> None:
    config = choose_schemes(parse_config(read_hf_config(GOLDENS / "mixtral")), scheme, None)
    specs, stored, mesh = param_specs(config), describe_files(config), one_device()
    options = {"mesh": mesh, "rules": DEFAULT_RULES}
    arguments = GOLDENS / "mixtral", param_specs(stored), weight_sources(stored), ignored_weights(stored)
    stream = stream_safetensors(*arguments, **options)
    before = count_live()
    peak, largest = 0, 0

    def watch() -> Iterator[tuple[str, jax.Array]]:
        nonlocal peak, largest
        for name, array in stream:
            largest = max(largest, array.nbytes)
            peak = max(peak, count_live() - before)
            yield name, array
            del array

    params = fill_params(stack_specs(specs, "stacked"), watch(), make_quantizer(config), **options)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert peak <= total + largest + 4096  # and some indices
    if scheme is not None:
        assert total < 0.5 * sum(spec.num_bytes for spec in jax.tree.leaves(param_specs(stored), is_leaf=is_spec))


def is_spec(leaf: object) -> bool:
    return isinstance(leaf, ParamSpec)


def make_quantizer(config: DecoderConfig) -> WeightQuantizer:
    return WeightQuantizer(config, one_device(), DEFAULT_RULES)


def count_live() -> int:
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())
