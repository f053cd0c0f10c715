"""Reads prompts of any form as token ids, with the images that they bring in their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from jaxserve.engine.images import ImageInput, list_images
from jaxserve.engine.prompt_forms import Message, Prompt, as_mapping
from jaxserve.errors import InvalidRequestError, TokenizerError, shorten
from jaxserve.media.items import MediaItem, PromptImages
from jaxserve.media.parts import take_images

if TYPE_CHECKING:
    from jaxserve.tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt as the engine takes it."""

    text: str | None  # with one placeholder for an image; None where the user gave ids
    token_ids: tuple[int, ...]  # with all placeholders
    images: PromptImages | None = None


@final
class PromptReader:
    """Reads prompts. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, images: ImageInput | None = None) -> None:
        """Takes the model's own values; `images` is None if it is served for text."""
        self._tokenizer, self._vocab_size, self._images = tokenizer, vocab_size, images

    def read(self, prompt: Prompt) -> ReadPrompt:
        """Returns a prompt to continue; ids given with a text are not checked against it.

        A text with images is like a rendered template: special tokens that it spells are tokens.

        Raises:
            InvalidRequestError: names what is wrong with the prompt or its images.
        """
        given = as_mapping(prompt, reads_images=self._images is not None)
        images, data, options = self._images, given.get("multi_modal_data"), given.get("mm_processor_kwargs")
        if images is None or data is None:
            if options:
                raise InvalidRequestError("needs multi_modal_data", field="mm_processor_kwargs")
            return ReadPrompt(*self._read_text(given))
        items = images.load(list_images(data, images.options.num_images), options)
        if isinstance(given.get("prompt"), str) and "prompt_token_ids" not in given:
            given = {**given, "prompt": images.write(given["prompt"], len(items))}
        text, token_ids = self._read_text(given, allow_special=bool(items))
        return self._locate(text, token_ids, items)

    def read_text(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        """Returns a prompt's text, or None, and its token ids; images are refused."""
        return self._read_text(as_mapping(prompt))

    def read_chat(
        self,
        messages: Sequence[Message],
        template: Mapping[str, Any],
        items: Sequence[MediaItem] | None,
        options: Mapping[str, Any] | None,
    ) -> ReadPrompt:
        """Returns a conversation as a prompt.

        Args:
            template: arguments of `encode_chat`.
            items: the images of messages from which they were taken; None: they are taken and loaded here.
            options: of the image processor, for images that are loaded here.

        Raises:
            InvalidRequestError: names what is wrong with the messages, the template's variables or the images.
            TokenizerError: there is no tokenizer, or it has no chat template.
        """
        from jaxserve.tokenizers.chat import encode_chat

        if self._tokenizer is None:
            raise TokenizerError("there is none, so messages cannot be rendered", field="tokenizer")
        images = self._images
        if images is None:
            if options:
                raise InvalidRequestError("is not read here: the model is served for text", field="mm_processor_kwargs")
            text, ids = encode_chat(self._tokenizer, messages, **template)
            return ReadPrompt(text, self._check_token_ids(ids))
        if items is None:
            messages, parts = take_images(messages, images.options.num_images)
            items = images.load(parts, options)
        text, ids = encode_chat(self._tokenizer, messages, **{**template, "image_tokens": images.options.tokens})
        return self._locate(text, self._check_token_ids(ids), items)

    def _locate(self, text: str | None, token_ids: tuple[int, ...], items: Sequence[MediaItem]) -> ReadPrompt:
        assert self._images is not None
        expanded, placed = self._images.locate(token_ids, items)
        return ReadPrompt(text, tuple(expanded), placed)

    def _read_text(
        self, given: Mapping[str, Any], *, allow_special: bool = False
    ) -> tuple[str | None, tuple[int, ...]]:
        text = given.get("prompt")
        if "prompt_token_ids" in given:
            if text is not None and not isinstance(text, str):
                raise InvalidRequestError(f"must be text, got {shorten(text)}", field="prompt", value=text)
            return text, self._check_token_ids(given["prompt_token_ids"])
        if not isinstance(text, str):
            message = f"must be text, token ids, or a mapping with 'prompt' or 'prompt_token_ids'; got {shorten(text)}"
            raise InvalidRequestError(message, field="prompt", value=text)
        if self._tokenizer is None:
            message = "is text, and there is no tokenizer; give {'prompt_token_ids': [...]}"
            raise InvalidRequestError(message, field="prompt", value=text)
        special = {"allow_special": True} if allow_special else {}
        token_ids = self._tokenizer.encode(text, **special)
        if not token_ids:
            message = "is empty, and this model's tokenizer begins texts with no token; give at least one character"
            raise InvalidRequestError(message, field="prompt", value=text)
        return text, self._check_token_ids(token_ids)

    def _check_token_ids(self, token_ids: object) -> tuple[int, ...]:
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
            message = f"must be a list of integers, got {shorten(token_ids)}"
            raise InvalidRequestError(message, field="prompt_token_ids", value=token_ids)
        for token_id in token_ids:
            check_token_id("prompt_token_ids", token_id, self._vocab_size)
        return tuple(token_ids)


def check_token_id(field: str, token_id: object, vocab_size: int) -> None:
    """Raises InvalidRequestError for anything but an id of a vocabulary."""
    is_integer = isinstance(token_id, int) and not isinstance(token_id, bool)
    if not is_integer or not 0 <= token_id < vocab_size:  # type: ignore[operator]
        message = f"must be token ids in [0, {vocab_size}), got {shorten(token_id)}"
        raise InvalidRequestError(message, field=field, value=token_id)
