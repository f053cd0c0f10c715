"""Placeholders of images in prompts, and Qwen's positions of tokens and of patches."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import ConfigError, InvalidRequestError, TokenizerError
from jaxserve.media.items import MediaItem, MediaSpan
from jaxserve.media.patch_positions import find_places, stretch_table
from jaxserve.media.positions import find_positions
from jaxserve.media.prompt import ImageTokens, locate_images

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "images.json").read_text())
QWEN = ImageTokens(mark="<|image_pad|>", placeholder="<|image_pad|>", placeholder_id=9)
GEMMA = ImageTokens(
    mark="<start_of_image>",
    placeholder="<image_soft_token>",
    placeholder_id=9,
    before="\n\n<start_of_image>",
    after="<end_of_image>\n\n",
    apart=True,
)
ENDS = {"[IMG]": 9, "[IMG_BREAK]": 7, "[IMG_END]": 8}
UNREAD = ImageTokens(
    mark="[IMG]", placeholder="[IMG]", placeholder_id=9, row_end="[IMG_BREAK]", end="[IMG_END]", merge_size=2
)
PIXTRAL = UNREAD.find_ids(ENDS)


def make_item(rows: int, columns: int, merge: int = 2, mark: int = 0) -> MediaItem:
    return MediaItem(bytes([mark]) * 32, b"", (1, rows, columns), rows * columns // merge**2)


def test_a_mark_becomes_the_familys_text() -> None:
    assert QWEN.write("a<|image_pad|>b", 1) == "a<|image_pad|>b"
    assert GEMMA.write("<start_of_image>a<start_of_image>", 2) == (
        "\n\n<start_of_image><image_soft_token><end_of_image>\n\na\n\n<start_of_image><image_soft_token><end_of_image>\n\n"
    )


@pytest.mark.parametrize(("text", "count"), [("a", 1), ("<|image_pad|>" * 2, 1), ("<|image_pad|>", 0)])
def test_a_template_that_writes_another_number_of_marks_is_refused(text: str, count: int) -> None:
    with pytest.raises(TokenizerError, match=f"{count} images") as error:
        QWEN.write(text, count)
    assert error.value.field == "chat_template"


def test_placeholders_become_as_many_as_the_image_has() -> None:
    items = [make_item(4, 2, mark=1), make_item(2, 2, mark=2)]
    ids, spans = QWEN.expand([1, 9, 2, 9], items)
    assert ids == [1, 9, 9, 2, 9]
    assert spans == (MediaSpan(1, 2, bytes([1]) * 32, (1, 4, 2)), MediaSpan(4, 1, bytes([2]) * 32, (1, 2, 2)))
    assert spans[0].end == 3
    assert QWEN.expand([9, 9], items)[0] == [9, 9, 9], "images without a token between them"
    assert QWEN.expand([1, 2], []) == ([1, 2], ())


def test_images_that_see_themselves_need_a_token_between_them() -> None:
    items = [make_item(4, 4)] * 2
    for ids in ([9, 9], [1, 9, 9, 2]):
        assert len(QWEN.expand(ids, items)[0]) == 6 + len(ids)
        with pytest.raises(InvalidRequestError, match="without a token between them"):
            GEMMA.expand(ids, items)
    assert len(GEMMA.expand([9, 1, 9], items)[0]) == 9


def test_rows_have_ends_where_the_family_has_them() -> None:
    item = make_item(4, 6)
    ids, (span,) = PIXTRAL.expand([1, 9, 2], [item])
    assert ids == [1, 9, 9, 9, 7, 9, 9, 9, 8, 2]
    assert (span.start, span.length) == (1, 7) and PIXTRAL.count(item) == 8
    assert QWEN.count(item) == 6


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_images_than_placeholders_is_refused(count: int) -> None:
    with pytest.raises(InvalidRequestError, match="1 placeholders"):
        QWEN.expand([1, 9], [make_item(2, 2)] * count)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ({"[IMG]": 9, "[IMG_BREAK]": 7}, r"no special token '\[IMG_END\]'"),
        ({"[IMG_BREAK]": 7, "[IMG_END]": 8}, r"no special token '\[IMG\]'"),
        (ENDS | {"[IMG]": 10}, "as 10, and config.json as 9"),
    ],
)
def test_a_tokenizer_without_the_ends_of_rows_is_refused(tokens: dict[str, int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        UNREAD.find_ids(tokens)
    assert caught.value.field == "tokenizer"


@pytest.mark.parametrize("golden", GOLDENS["positions"], ids=lambda golden: str(golden["prompt"]))
def test_positions_are_those_of_transformers(golden: dict[str, Any]) -> None:
    spans, at = [], 0
    for part in golden["prompt"]:
        if isinstance(part, int):
            at += part
            continue
        _, rows, columns = part
        spans.append(MediaSpan(at, rows * columns // 4, b"", (1, rows, columns)))
        at += rows * columns // 4
    positions, delta = find_positions(at, spans, merge_size=2)
    assert positions.dtype == np.int32
    np.testing.assert_array_equal(positions, golden["positions"])
    assert delta == golden["delta"]


def test_images_are_located_in_a_prompt() -> None:
    items = [make_item(4, 6, mark=1), make_item(8, 2, mark=2)]
    ids, images = locate_images([1, 9, 2, 3, 9, 4, 5], items, QWEN, 2)
    assert images is not None and images.items == tuple(items)
    assert ids == [1, *[9] * 6, 2, 3, *[9] * 4, 4, 5]
    assert images.places.dtype == np.int32 and images.places.tolist() == [*range(1, 7), *range(9, 13)]
    assert [(span.start, span.end, span.digest) for span in images.spans] == [
        (1, 7, items[0].digest),
        (9, 13, items[1].digest),
    ]
    positions, delta = find_positions(len(ids), images.spans, 2)
    assert images.rope_delta == delta == -3 and images.shifts is not None and images.shifts.dtype == np.int32
    assert images.shifts.shape == (3, 13)
    shifts = np.concatenate([images.shifts, np.zeros((3, len(ids) - 13), np.int32)], 1)  # 0 behind the last image
    np.testing.assert_array_equal(np.arange(len(ids)) + delta + shifts, positions)


def test_images_of_models_with_plain_positions_have_places_only() -> None:
    ids, images = locate_images([9, 9], [make_item(4, 6), make_item(2, 2)], PIXTRAL)
    assert images is not None and images.shifts is None and images.rope_delta == 0
    assert [ids[at] for at in images.places] == [9] * 7 and ids == [9, 9, 9, 7, 9, 9, 9, 8, 9, 8]
    assert locate_images([1, 2], [], PIXTRAL) == ([1, 2], None)


@pytest.mark.parametrize("golden", GOLDENS["patches"], ids=lambda golden: str(golden["grid"]))
def test_patches_lie_where_transformers_has_them(golden: dict[str, Any]) -> None:
    grid = tuple(golden["grid"])
    arrays = find_places(grid, 2), *stretch_table(grid, 2, 48)
    assert [array.dtype for array in arrays] == [np.int32, np.int32, np.float32]
    assert [hashlib.sha256(array.tobytes()).hexdigest()[:32] for array in arrays] == golden["found"]


def test_the_corners_of_a_table_are_those_of_the_image() -> None:
    indices, weights = stretch_table((1, 4, 2), 2, 48)
    nearest = indices[np.arange(8), weights.argmax(1)]
    assert nearest.tolist()[::7] == [0, 48 * 48 - 1] and (weights.sum(1) == 1).all()
