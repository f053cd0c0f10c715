"""Images among the content parts of messages."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from jaxserve.errors import InvalidRequestError
from jaxserve.media.parts import IMAGE, ImagePart, describe_kind, take_images

URL = "data:image/png;base64,QUJD"
PILLOW = Image.new("RGB", (2, 2))


def ask(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image_url", "image_url": {"url": URL}}, ImagePart("messages[0].content[0]", URL)),
        ({"type": "image_url", "image_url": URL}, ImagePart("messages[0].content[0]", URL)),
        (
            {"type": "image_url", "image_url": {"url": URL, "detail": "low"}, "uuid": None},
            ImagePart("messages[0].content[0]", URL, detail="low"),
        ),
        (
            {"type": "input_image", "image_url": URL, "detail": "original", "file_id": None},
            ImagePart("messages[0].content[0]", URL, detail="original"),
        ),
        ({"type": "image", "image": PILLOW}, ImagePart("messages[0].content[0]", None, PILLOW)),
        ({"type": "image_pil", "image_pil": PILLOW}, ImagePart("messages[0].content[0]", None, PILLOW)),
    ],
)
def test_images_are_read(part: dict[str, Any], expected: ImagePart) -> None:
    messages, images = take_images(ask(part), 1)
    assert messages == ask(IMAGE) and images == [expected]


def test_images_keep_their_places() -> None:
    part, text = {"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "a"}
    given = [
        {"role": "system", "content": "s"},
        *ask(part, text, part),
        {"role": "assistant", "content": None},
        *ask(text),
    ]
    messages, images = take_images(given, 2)
    assert messages[1]["content"] == [IMAGE, text, IMAGE]
    assert [messages[0], *messages[2:]] == [given[0], *given[2:]]
    assert [image.field for image in images] == ["messages[1].content[0]", "messages[1].content[2]"]
    assert given[1]["content"] == [part, text, part], "the caller's messages stay as they are"


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": {"detail": "low"}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": 3}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "max"}}, "image_url.detail"),
        ({"type": "image_url", "image_url": {"url": URL, "format": "png"}}, "image_url"),
        ({"type": "image_url", "image_url": {"url": URL}, "uuid": "a"}, ""),
        ({"type": "input_image", "file_id": "f"}, ""),
        ({"type": "input_image"}, "image_url"),
        ({"type": "input_image", "image_url": URL, "detail": 3}, "detail"),
        ({"type": "image"}, "image"),
        ({"type": "image", "image": URL}, "image"),
        ({"type": "image_pil", "image_pil": b"abc"}, "image_pil"),
    ],
)
def test_malformed_images_are_refused(part: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        take_images(ask({"type": "text", "text": "a"}, part), 9)
    assert error.value.field == f"messages[0].content[1]{'.' * bool(field)}{field}"


def test_too_many_images_are_refused_by_the_first_that_is() -> None:
    part = {"type": "image_url", "image_url": {"url": URL}}
    with pytest.raises(InvalidRequestError, match="limit_mm_per_prompt") as error:
        take_images([*ask(part, part), *ask(part)], 2)
    assert error.value.field == "messages[1].content[0]"


def test_of_ten_thousand_tiny_parts_few_are_read() -> None:
    parts = [{"type": "image_url", "image_url": {"url": URL}} for _ in range(10_000)]
    with pytest.raises(InvalidRequestError, match="is image 17") as error:
        take_images(ask(*parts), 16)
    assert error.value.field == "messages[0].content[16]"


@pytest.mark.parametrize("messages", [[3], [{}], [{"content": 3}], [{"content": [3, None, "a", {"type": 3}]}]])
def test_what_is_no_image_is_left_to_others(messages: list[Any]) -> None:
    assert take_images(messages, 0) == (messages, [])


def test_kinds_have_names() -> None:
    assert describe_kind("image_url") == describe_kind("input_image") == "an image"
    assert describe_kind("video_url") == "video" and describe_kind("input_audio") == "sound"
    assert describe_kind("text") is describe_kind(3) is None
