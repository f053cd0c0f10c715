"""Puts the placeholders of images into prompts.

A chat template writes one mark for an image. It becomes one placeholder token with the family's tokens around it
(`write`), and, once the prompt is tokenized, as many placeholders as the image has (`expand`). `locate_images` is what
steps read of all images of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from jaxserve.errors import ConfigError, InvalidRequestError, TokenizerError
from jaxserve.media.items import MediaItem, MediaSpan, PromptImages
from jaxserve.media.positions import find_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens:
    """The tokens by which a model's prompts show an image."""

    mark: str  # what its chat template writes for an image: the text of a special token
    placeholder: str  # the text of the token that stands for one vector of an image
    placeholder_id: int
    before: str = ""  # text around the placeholders that the template leaves to the processor
    after: str = ""
    row_end: str | None = None  # behind each row but the last; None: rows have no end
    end: str | None = None  # behind the last row
    row_end_id: int | None = None  # the ids of both, which `find_ids` finds
    end_id: int | None = None
    apart: bool = False  # between the placeholders of two images there must be another token
    merge_size: int = 1  # patches of a row, and rows, that are one placeholder; read only where rows have an end

    def find_ids(self, special_tokens: Mapping[str, int]) -> Self:
        """Returns the tokens with the ids of those at the ends of rows.

        Raises:
            ConfigError: the tokenizer has no such special token, or another id for the placeholder.
        """
        for text in (self.placeholder, self.row_end, self.end):
            if text is not None and text not in special_tokens:
                raise ConfigError(f"has no special token {text!r}, which prompts with images have", field="tokenizer")
        if (found := special_tokens[self.placeholder]) != self.placeholder_id:
            message = f"has {self.placeholder!r} as {found}, and config.json as {self.placeholder_id}"
            raise ConfigError(message, field="tokenizer", value=found)
        row_end_id, end_id = (None if text is None else special_tokens[text] for text in (self.row_end, self.end))
        return replace(self, row_end_id=row_end_id, end_id=end_id)

    def write(self, text: str, num_images: int) -> str:
        """Returns a rendered conversation with one placeholder for each image.

        The caller's own text must be protected already, so each mark is the template's.

        Raises:
            TokenizerError: the template did not write one mark for each image.
        """
        parts = text.split(self.mark)
        if len(parts) - 1 != num_images:
            message = f"wrote {len(parts) - 1} marks {self.mark!r} for {num_images} images"
            raise TokenizerError(message, field="chat_template")
        return (self.before + self.placeholder + self.after).join(parts)

    def expand(self, ids: Sequence[int], items: Sequence[MediaItem]) -> tuple[list[int], tuple[MediaSpan, ...]]:
        """Returns a prompt's ids with all placeholders of its images, and where these are.

        Args:
            ids: with one placeholder for each image.
            items: the images in the order of the prompt.

        Raises:
            InvalidRequestError: there are not as many placeholders as images, or no token is between two of them.
        """
        places = [at for at, token_id in enumerate(ids) if token_id == self.placeholder_id]
        if len(places) != len(items):
            message = f"has {len(places)} placeholders of images ({self.placeholder!r}) for {len(items)} images"
            raise InvalidRequestError(message, field="prompt")
        expanded: list[int] = []
        spans = []
        done = 0
        for at, item in zip(places, items, strict=True):
            if self.apart and expanded and at == done:
                message = "has two images without a token between them; this model tells them apart by it"
                raise InvalidRequestError(message, field="prompt", value=at)
            expanded += ids[done:at]
            written = self._list_ids(item)
            length = len(written) - (self.end_id is not None)  # up to the last placeholder
            spans.append(MediaSpan(len(expanded), length, item.digest, item.grid))
            expanded += written
            done = at + 1
        return [*expanded, *ids[done:]], tuple(spans)

    def count(self, item: MediaItem) -> int:
        """Returns the number of tokens in place of one placeholder, ends of rows included."""
        return len(self._list_ids(item))

    def _list_ids(self, item: MediaItem) -> list[int]:
        if self.row_end_id is None or self.end_id is None:
            return [self.placeholder_id] * item.num_tokens
        rows = item.grid[1] // self.merge_size
        row = [self.placeholder_id] * (item.num_tokens // rows) + [self.row_end_id]
        return [*(row * rows)[:-1], self.end_id]


def locate_images(
    ids: Sequence[int], items: Sequence[MediaItem], tokens: ImageTokens, merge_size: int | None = None
) -> tuple[list[int], PromptImages | None]:
    """Returns a prompt's ids with all placeholders, and its images in their places; None if there are none.

    Args:
        ids: with one placeholder for each image.
        items: the images in the order of the prompt.
        merge_size: patches of a token on each side, in models whose rotary positions have three parts; None: in others.

    Raises:
        InvalidRequestError: there are not as many placeholders as images.
    """
    import numpy as np

    if not items:
        return list(ids), None
    expanded, spans = tokens.expand(ids, items)
    end = spans[-1].end
    places = np.flatnonzero(np.array(expanded[:end]) == tokens.placeholder_id).astype(np.int32)
    if merge_size is None:
        return expanded, PromptImages(tuple(items), spans, places)
    positions, rope_delta = find_positions(end, spans, merge_size)  # those behind the last image follow from the delta
    shifts = positions - np.arange(end, dtype=np.int32) - np.int32(rope_delta)
    return expanded, PromptImages(tuple(items), spans, places, shifts, rope_delta)
