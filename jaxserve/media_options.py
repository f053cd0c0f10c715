"""The options of images, by vLLM's names where it has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxserve.errors import ConfigError, shorten
from jaxserve.options import check_at_least, option

MOST_IMAGES = 64  # of one request, unless an option says how many
_LIMIT = "limit_mm_per_prompt"
_IMAGE = "image"


def read_limits(value: Any) -> dict[str, int] | None:
    """Returns the items that a request may have by kind, None if nothing is said; ConfigError if it is no such table.

    Images are the only kind. Others of vLLM's may be 0.
    """
    if not isinstance(value, Mapping):
        message = f'must be a table like {{"image": 4}}, got {shorten(value)}'
        raise ConfigError(message, field=_LIMIT, value=value)
    for kind, most in value.items():
        if not isinstance(most, int) or isinstance(most, bool) or most < 0:
            message = f"must have whole numbers of at least 0, got {shorten(most)} for {shorten(kind)}"
            raise ConfigError(message, field=_LIMIT, value=value)
        if kind != _IMAGE and most > 0:
            message = f"{shorten(kind)} is not read here; image is the only kind, and others may be 0"
            raise ConfigError(message, field=_LIMIT, value=value)
    return dict(value) or None


def read_processor_options(value: Any) -> dict[str, Any] | None:
    """Returns a processor's options by name, None if there are none; ConfigError if it is no table."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        message = f'must be a table like {{"max_pixels": 1000000}}, got {shorten(value)}'
        raise ConfigError(message, field="mm_processor_kwargs", value=value)
    return dict(value) or None


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Images of models that read them."""

    limit_mm_per_prompt: Mapping[str, int] | None = option(
        None,
        f'images of one request, as {{"image": 4}}; 0: the model is served for text; default: {MOST_IMAGES}',
        read=read_limits,
    )
    language_model_only: bool = option(False, "serve a model that reads images for text, without its tower")
    mm_processor_kwargs: Mapping[str, Any] | None = option(
        None,
        "limits of the image processor, such as max_pixels or max_soft_tokens; a request may lower them further",
        read=read_processor_options,
    )
    max_num_batched_patches: int | None = option(
        None, "patches of images in a step; default: those of the largest image, at most 16,384"
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "hosts that images are fetched from, each with its port if it is no usual one; default: none",
        takes_many=True,
    )
    allowed_local_media_path: str = option("", "folder below which images of file URLs are read; default: none")

    def __post_init__(self) -> None:
        check_at_least(self, max_num_batched_patches=1)
        if self.language_model_only and self.most_given:
            message = f"contradicts language_model_only, with which there are no images, got {self.most_given}"
            raise ConfigError(message, field=_LIMIT, value=self.limit_mm_per_prompt)

    @property
    def most_given(self) -> int | None:
        """The images of one request, if an option says how many."""
        return None if self.limit_mm_per_prompt is None else self.limit_mm_per_prompt.get(_IMAGE)

    @property
    def num_images(self) -> int:
        """The images that one request may have; 0: the model is served for text."""
        if self.language_model_only:
            return 0
        return MOST_IMAGES if self.most_given is None else self.most_given

    def refuse(self, reason: str) -> None:
        """Raises ConfigError with `reason` for the first option that would have an effect on images."""
        for each in fields(self):
            value = getattr(self, each.name)
            says_none = each.name == "language_model_only" or (each.name == _LIMIT and not self.most_given)
            if value != each.default and not says_none:
                raise ConfigError(f"{reason}; leave it out", field=each.name, value=value)
