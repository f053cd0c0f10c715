"""Image processors equal transformers' to the bit, and read their settings from files of both kinds."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.media.processors import FAMILIES, ImageProcessor, load_processor, read_processor
from jaxserve.media.processors.processor import DETAILS
from jaxserve.media.processors.settings import ImageSettings, read_settings
from tests.media.pictures import CHECKPOINTS, SIZES, draw

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "images.json").read_text())


def make(name: str, **changes: Any) -> ImageProcessor:
    family, settings, around = CHECKPOINTS[name]
    return read_processor(family, ImageSettings({**settings, **changes}, around))


def picture(height: int, width: int) -> Image.Image:
    return Image.fromarray(draw(height, width))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_patches_have_the_bits_of_transformers(size: tuple[int, int]) -> None:
    image = picture(*size)
    found = {}
    for name in CHECKPOINTS:
        processor = make(name)
        item = processor.make_item(processor.resize(image, "image"))
        patches = processor.make_floats(item)
        assert patches.dtype == np.float32 and len(patches) == item.grid[1] * item.grid[2]
        if processor.family == "qwen3_vl":  # transformers repeats each patch as its frames
            patches = np.repeat(patches.reshape(len(patches), 3, 1, -1), 2, axis=2)
        digest = hashlib.sha256(np.ascontiguousarray(patches, "<f4").tobytes()).hexdigest()[:32]
        found[name] = [list(item.grid), item.num_tokens, digest]
    assert found == GOLDENS["images"][f"{size[0]}x{size[1]}"]


def test_all_families_have_goldens() -> None:
    assert {family for family, *_ in CHECKPOINTS.values()} == set(FAMILIES)
    assert len(SIZES) == len(set(SIZES)) == 40


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_described_processor_is_equal(name: str) -> None:
    processor = make(name)
    assert load_processor(json.loads(json.dumps(processor.describe()))) == processor


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_settings_are_read_from_both_files(name: str, tmp_path: Path) -> None:
    family, settings, around = CHECKPOINTS[name]
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir(), new.mkdir()
    (old / "preprocessor_config.json").write_text(json.dumps(settings))
    (old / "processor_config.json").write_text(json.dumps(around))
    (new / "processor_config.json").write_text(json.dumps({**around, "image_processor": settings}))
    assert read_processor(family, read_settings(old)) == read_processor(family, read_settings(new)) == make(name)


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("qwen3_vl", {"sizes": 3}, "sizes"),
        ("qwen3_vl", {"do_resize": False}, "do_resize"),
        ("qwen3_vl", {"do_center_crop": True}, "do_center_crop"),
        ("qwen3_vl", {"resample": 0}, "resample"),
        ("qwen3_vl", {"patch_size": 0}, "patch_size"),
        ("qwen3_vl", {"image_mean": [0.5, 0.5]}, "image_mean"),
        ("qwen3_vl", {"max_pixels": 1000}, "size.longest_edge"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ("gemma3", {"size": {"height": 896, "width": 448}}, "size"),
        ("gemma3", {"size": {"height": 900, "width": 900}}, "size.height"),
        ("gemma4", {"max_soft_tokens": 100}, "max_soft_tokens"),
        ("gemma4", {"do_normalize": True}, "do_normalize"),
        ("pixtral", {"size": {"height": 100}}, "size.longest_edge"),
        ("mistral3", {"patch_size": {"height": 14, "width": 16}}, "patch_size"),
    ],
)
def test_settings_that_mean_something_else_are_refused(name: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        make(name, **changes)
    assert error.value.field == f"preprocessor_config.json: {field}"


def test_a_folder_may_have_no_settings(tmp_path: Path) -> None:
    assert read_settings(tmp_path) is None


@pytest.mark.parametrize("text", ["{", "[]"])
def test_settings_that_are_no_object_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ConfigError, match="preprocessor_config"):
        read_settings(tmp_path)


def test_qwen_refuses_what_is_too_narrow() -> None:
    processor = make("qwen3_vl")
    processor.resize(picture(1, 200), "part")
    for size in ((1, 201), (201, 1)):
        with pytest.raises(InvalidRequestError, match="200") as error:
            processor.resize(picture(*size), "part")
        assert error.value.field == "part"


def test_no_image_has_more_pixels_than_the_limit() -> None:
    """However narrow: an edge of less than a block gets a whole one."""
    for most in (1024, 2048, 65536, 204_800):
        processor = make("qwen3_vl").with_options({"max_pixels": most})
        for height in (1, 5, 20, 31, 100, 999):
            for aspect in (1, 2, 37, 150, 200):
                try:
                    rows, columns = processor.shape.choose_size(height, height * aspect, "image")
                except InvalidRequestError as error:
                    assert "max_pixels" in str(error)
                else:
                    assert rows * columns <= most and rows % 32 == columns % 32 == 0


@pytest.mark.parametrize(
    ("name", "options", "tokens"),
    [
        ("qwen3_vl", {"max_pixels": 262_144}, 234),
        ("qwen3_vl", {"min_pixels": 65_536}, 300),
        ("gemma4", {"max_soft_tokens": 70}, 63),
        ("pixtral", {"longest_edge": 320}, 300),
        ("gemma3", {}, 256),
    ],
)
def test_options_of_a_request_make_images_smaller(name: str, options: dict[str, int], tokens: int) -> None:
    processor = make(name).with_options(options)
    image = picture(480, 640)
    assert processor.make_item(processor.resize(image, "image")).num_tokens == tokens


def test_a_server_may_choose_the_largest_images_of_a_family() -> None:
    """Gemma 4's tower reads five sizes, of which a checkpoint's processor names one."""
    image = picture(480, 640)
    large = make("gemma4").enlarge().with_options({"max_soft_tokens": 1120})
    assert large.make_item(large.resize(image, "image")).num_tokens == 28 * 38
    assert make("qwen3_vl").enlarge() == make("qwen3_vl")
    with pytest.raises(InvalidRequestError, match="must be one of 70, 140, 280, got 100"):
        make("gemma4").with_options({"max_soft_tokens": 100})


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("qwen3_vl", {"max_pixels": 2_000_000}, "max_pixels"),
        ("qwen3_vl", {"max_pixels": 1023}, "max_pixels"),
        ("qwen3_vl", {"max_pixels": True}, "max_pixels"),
        ("qwen3_vl", {"max_pixels": 4096, "min_pixels": 8192}, "min_pixels"),
        ("qwen3_vl", {"fps": 2}, "fps"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ("gemma4", {"max_soft_tokens": 100}, "max_soft_tokens"),
        ("gemma4", {"max_soft_tokens": 560}, "max_soft_tokens"),
        ("pixtral", {"longest_edge": 0}, "longest_edge"),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        make(name).with_options(options)
    assert error.value.field == f"mm_processor_kwargs.{field}"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_no_image_has_more_patches_than_its_processor_says(name: str) -> None:
    """Nor more than it was limited to, down to the least that it takes."""
    whole = make(name).shape
    for most in (whole.most_patches, whole.most_patches // 2, whole.most_patches // 5, whole.least_patches):
        if most < whole.least_patches:
            continue
        shape = whole.limit_patches(most)
        assert shape.most_patches <= most and shape.least_patches <= shape.most_patches
        found = [0]
        for height, width in ((1, 1), (4, 4), (100, 110), (300, 280), (900, 5000), (4000, 3000), (6000, 6000)):
            grid = shape.find_grid(*shape.choose_size(height, width, "image"))
            found.append(math.prod(grid))
            assert math.prod(grid) <= shape.most_patches and shape.count_tokens(grid) <= shape.most_tokens
        assert 0.9 * shape.most_patches <= max(found), "it says no more than there is"
    assert whole.limit_patches(2 * whole.most_patches) == whole


def test_detail_is_a_limit_of_pixels() -> None:
    image = picture(720, 1280)
    tokens = {}
    for name in CHECKPOINTS:
        for detail in DETAILS:
            processor = make(name).with_detail(detail)
            tokens[name, detail] = processor.make_item(processor.resize(image, "image")).num_tokens
        assert tokens[name, "auto"] == tokens[name, "high"] == tokens[name, "original"] >= tokens[name, "low"]
    assert tokens["qwen3_vl", "low"] <= 256 < tokens["qwen3_vl", "high"] and tokens["gemma3", "low"] == 256
    assert tokens["gemma4", "low"] <= 70 and tokens["pixtral", "low"] == 32 * 18


def test_a_digest_is_of_all_that_the_tower_sees() -> None:
    """Two images of one size, one image in two sizes or with other settings: never the same digest."""
    wide, high = picture(30, 150), picture(150, 30)
    other = Image.fromarray(draw(30, 150)[::-1].copy())
    digests = []
    for name in CHECKPOINTS:
        processor = make(name)
        for each in (wide, high, other):
            digests.append(processor.make_item(processor.resize(each, "image")).digest)
    same = make("qwen3_vl")
    again = same.make_item(same.resize(wide, "image"))
    assert len(set(digests)) == len(digests) and all(len(digest) == 32 for digest in digests)
    assert again.digest == digests[0]
    changed = make("qwen3_vl", image_mean=[0.4, 0.5, 0.5])
    assert changed.make_item(changed.resize(wide, "image")).digest not in digests
    pixels = same.resize(wide, "image")
    turned = pixels.swapaxes(0, 1).reshape(pixels.shape)  # other pixels with the same bytes counted
    assert same.make_item(turned).digest != again.digest
