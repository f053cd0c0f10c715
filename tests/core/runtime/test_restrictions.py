"""Options of models that keep recurrent states: distances of snapshots that no text can reach."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.runtime.restrictions import find_snapshot_grid, restrict_options
from jaxserve.errors import ConfigError
from jaxserve.families.registry import parse_config
from tests.e2e.helpers import load_case


def make_model(longest: int, case: str = "qwen3_next") -> DecoderConfig:
    return parse_config(load_case(case).config).with_max_model_len(longest)


def is_on(longest: int, **options: Any) -> bool | None:
    """Whether prefixes are cached."""
    model = make_model(longest)
    return restrict_options(EngineConfig.from_options(**options), model, "cpu").cache.enable_prefix_caching


@pytest.mark.parametrize(
    ("case", "page_size", "grid"), [("qwen3_next", 8, 64), ("granite_hybrid", 8, 64), ("lfm2", 8, 32), ("lfm2", 64, 64)]
)
def test_snapshots_lie_where_a_cut_leaves_the_bits(case: str, page_size: int, grid: int) -> None:
    """A rule has tiles of 64 tokens; a convolution has the same bits wherever chunks end."""
    model = make_model(160, case)
    config = restrict_options(EngineConfig.from_options(page_size=page_size), model, "cpu")
    assert find_snapshot_grid(config, model) == grid


@pytest.mark.parametrize(("options", "apart"), [({}, 64), ({"page_size": 32}, 64), ({"mamba_block_size": 128}, 128)])
def test_a_text_must_be_longer_than_the_distance_of_snapshots(options: dict[str, Any], apart: int) -> None:
    """A hit leaves a token to compute."""
    assert is_on(apart + 1, **options)
    with pytest.raises(ConfigError, match=f"{apart} tokens apart, not closer than max_model_len={apart}"):
        is_on(apart, enable_prefix_caching=True, **options)


@pytest.mark.parametrize(
    ("longest", "options", "field", "words"),
    [
        (128, {"page_size": 128}, "page_size", "by page_size=128; sizes of pages that fit: 8, 16, 32, 64"),
        (128, {"page_size": 128, "mamba_block_size": 256}, "page_size", "sizes of pages that fit: 8, 16, 32, 64"),
        (128, {"mamba_block_size": 128}, "mamba_block_size", "a mamba_block_size of at most 64 fits"),
        (250, {"mamba_block_size": 256}, "mamba_block_size", "a mamba_block_size of at most 192 fits"),
        (64, {"mamba_block_size": 64}, "mamba_block_size", "64 tokens apart, not closer than max_model_len=64"),
        (50, {"mamba_block_size": 128}, "mamba_block_size", "128 tokens apart, not closer than max_model_len=50"),
        (50, {"enable_prefix_caching": True}, "enable_prefix_caching", "not closer than max_model_len=50"),
    ],
)
def test_what_asks_for_snapshots_that_no_text_reaches_is_named(
    longest: int, options: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words) + "$") as raised:
        is_on(longest, **options)
    assert (raised.value.field, raised.value.value) == (field, options[field])


@pytest.mark.parametrize("options", [{}, {"page_size": 32}])
def test_without_such_an_option_prefixes_are_not_cached(options: dict[str, Any]) -> None:
    assert not is_on(64, **options)
