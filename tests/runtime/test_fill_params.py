"""Stacks that are filled while a checkpoint streams in: the same numbers, and no leaf of all layers twice."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jaxserve.layers.stack import StackMode, stack_params, stack_specs
from jaxserve.models.registry import ignored_weights, param_specs, parse_config, weight_sources
from jaxserve.runtime.params import fill_params
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
    filled = fill_params(stack_specs(specs, mode), stream_safetensors(*arguments, **options), **options)
    assert jax.tree.structure(filled) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, filled, expected)


def test_devices_hold_the_model_and_one_parameter_at_most() -> None:
    config = parse_config(read_hf_config(GOLDENS / "mixtral"))
    specs, mesh = param_specs(config), one_device()
    options = {"mesh": mesh, "rules": DEFAULT_RULES}
    stream = stream_safetensors(GOLDENS / "mixtral", specs, weight_sources(config), ignored_weights(config), **options)
    before = count_live()
    peak, largest = 0, 0

    def watch() -> Iterator[tuple[str, jax.Array]]:
        nonlocal peak, largest
        for name, array in stream:
            largest = max(largest, array.nbytes)
            peak = max(peak, count_live() - before)
            yield name, array
            del array

    params = fill_params(stack_specs(specs, "stacked"), watch(), **options)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert peak <= total + largest + 4096  # and some indices


def count_live() -> int:
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())
