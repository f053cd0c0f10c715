"""Options of images: vLLM's forms, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.media_options import MOST_IMAGES, MediaOptions


def make(**options: Any) -> MediaOptions:
    return EngineConfig.from_options(**options).media


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, MOST_IMAGES),
        ({"limit_mm_per_prompt": {}}, MOST_IMAGES),
        ({"limit_mm_per_prompt": {"image": 3}}, 3),
        ({"limit_mm_per_prompt": {"image": 3, "video": 0}}, 3),
        ({"limit_mm_per_prompt": {"image": 0}}, 0),
        ({"language_model_only": True}, 0),
        ({"language_model_only": True, "limit_mm_per_prompt": {"image": 0}}, 0),
    ],
)
def test_the_limit_is_of_images(options: dict[str, Any], count: int) -> None:
    assert make(**options).num_images == count


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"limit_mm_per_prompt": {"video": 1}}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": {"image": -1}}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": {"image": True}}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": {"image": {"count": 1, "width": 512}}}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": 3}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": {"image": 1}, "language_model_only": True}, "limit_mm_per_prompt"),
        ({"mm_processor_kwargs": [1]}, "mm_processor_kwargs"),
        ({"max_num_batched_patches": 0}, "max_num_batched_patches"),
        ({"allowed_media_domains": "a.example"}, "allowed_media_domains"),
    ],
)
def test_other_values_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "options",
    [
        {"limit_mm_per_prompt": {"image": 2}},
        {"mm_processor_kwargs": {"max_pixels": 4096}},
        {"max_num_batched_patches": 64},
        {"allowed_media_domains": ("a.example",)},
        {"allowed_local_media_path": "/data"},
    ],
)
def test_a_model_without_images_takes_no_option_of_them(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="reads none; leave it out") as caught:
        make(**options).refuse("reads none")
    assert caught.value.field == next(iter(options))


def test_options_that_say_no_images_suit_every_model() -> None:
    for options in ({}, {"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0, "audio": 0}}):
        make(**options).refuse("reads none")
