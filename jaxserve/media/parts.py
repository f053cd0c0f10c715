"""Reads the images among the content parts of messages, as OpenAI's and vLLM's clients write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.media.processors.processor import DETAILS, Detail

IMAGE = {"type": "image"}  # an image in a message whose images were taken out, which every family's template reads
IMAGE_KINDS = ("image_url", "image", "image_pil", "input_image")
_OTHER_KINDS = {  # parts that OpenAI's or vLLM's clients send, and what they hold
    **dict.fromkeys(("video_url", "video"), "video"),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "sound"),
    **dict.fromkeys(("file", "input_file", "document"), "a file"),
    **dict.fromkeys(("image_embeds", "audio_embeds", "prompt_embeds"), "vectors in place of what they stand for"),
}


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image as a message has it."""

    field: str  # its place in the messages
    url: str | None  # http, https, data or file; None: `image` has it
    image: Any = None  # Pillow's image, in Python only
    detail: Detail = "auto"

    @property
    def is_remote(self) -> bool:
        """Whether a host has it."""
        return self.url is not None and self.url[:6].lower().startswith(("http:", "https:"))


def take_images(messages: Sequence[Mapping[str, Any]], most: int) -> tuple[list[Mapping[str, Any]], list[ImagePart]]:
    """Returns the messages with `IMAGE` in place of each image, and the images in their order.

    Parts that are no images stay as they are: the messages are checked where they are rendered.

    Args:
        messages: in the form of chat completions; `content` is text or a list of parts.
        most: images that one request may have (`limit_mm_per_prompt`).

    Raises:
        InvalidRequestError: an image is malformed, or there are too many; names the part.
    """
    images: list[ImagePart] = []
    changed: list[Mapping[str, Any]] = []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list) or not any(map(_is_image, content)):
            changed.append(message)
            continue
        parts: list[Any] = []
        for at, part in enumerate(content):
            field = f"messages[{number}].content[{at}]"
            if not _is_image(part):
                parts.append(part)
                continue
            if len(images) == most:
                message_text = f"is image {most + 1}; a request may have {most} (limit_mm_per_prompt)"
                raise InvalidRequestError(message_text, field=field)
            images.append(_read_image(part, field))
            parts.append(IMAGE)
        changed.append({**message, "content": parts})
    return changed, images


def describe_kind(kind: object) -> str | None:
    """Returns what a part of a kind holds, as a refusal says it; None for text and unknown kinds."""
    if not isinstance(kind, str):
        return None
    return "an image" if kind in IMAGE_KINDS else _OTHER_KINDS.get(kind)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_KINDS


def _read_image(part: Mapping[str, Any], field: str) -> ImagePart:
    kind = part["type"]
    if kind in ("image", "image_pil"):
        _require_keys(part, ("type", kind), field)
        image = part.get(kind)
        if not (hasattr(image, "convert") and hasattr(image, "getbands")):  # Pillow's, which may not be installed
            message = f"must be an image of Pillow, got {shorten(image)}; over HTTP, send image_url"
            raise InvalidRequestError(message, field=f"{field}.{kind}")
        return ImagePart(field, None, image)
    given, place = part.get("image_url"), f"{field}.image_url"
    if kind == "input_image":  # of the Responses API: flat
        _require_keys(part, ("type", "image_url", "detail"), field)
        return ImagePart(field, _read_url(given, place), detail=_read_detail(part.get("detail"), field))
    _require_keys(part, ("type", "image_url"), field)
    if isinstance(given, str):
        return ImagePart(field, given)
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"must be an object with 'url', got {shorten(given)}", field=place)
    _require_keys(given, ("url", "detail"), place)
    return ImagePart(
        field, _read_url(given.get("url"), f"{place}.url"), detail=_read_detail(given.get("detail"), place)
    )


def _read_url(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"must be a URL, got {shorten(value)}", field=field)
    return value


def _read_detail(value: Any, field: str) -> Detail:
    for detail in DETAILS:
        if value in (detail, None):
            return detail
    message = f"must be {', '.join(DETAILS)}, got {shorten(value)}"
    raise InvalidRequestError(message, field=f"{field}.detail", value=value)


def _require_keys(part: Mapping[str, Any], known: Sequence[str], field: str) -> None:
    for key, value in part.items():
        if key not in known and value is not None:
            message = f"{shorten(key)} is not supported in an image; {', '.join(known)} are"
            raise InvalidRequestError(message, field=field, value=key)
