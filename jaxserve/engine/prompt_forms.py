"""Forms in which users give prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.errors import InvalidRequestError, shorten

if TYPE_CHECKING:
    from jaxserve.core.weights.sentence_transformers import Prompts
    from jaxserve.tokenizers import Tokenizer

Message = Mapping[str, Any]  # {"role": ..., "content": text, or a list of parts}
Prompt = str | Mapping[str, Any] | Sequence[int]  # text, a mapping with _PROMPT_KEYS, or token ids
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_IMAGE_KEYS = ("multi_modal_data", "mm_processor_kwargs")  # of prompts that a model continues


def list_prompts(prompts: Any) -> list[Any]:
    """Returns a list of prompts. A text, a mapping or a list of token ids is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    many = list(prompts)
    return [many] if many and isinstance(many[0], int) else many


def add_prompt(prompt: Prompt, known: Prompts | None, name: str | None) -> Prompt:
    """Returns a text with one of the model's prompts in front of it, by name, or the default one, if there is any.

    Raises InvalidRequestError for a name that is not known, and for one with token ids.
    """
    by_name = {} if known is None else known.by_name
    if name is not None and name not in by_name:
        message = f"must be one of the model's prompts ({', '.join(by_name) or 'it has none'}), got {shorten(name)}"
        raise InvalidRequestError(message, field="prompt_name", value=name)
    chosen = name if known is None or name is not None else known.default
    given = as_mapping(prompt)
    if chosen is None or "prompt_token_ids" in given:
        if name is None:
            return prompt
        raise InvalidRequestError("is for texts, and these are token ids", field="prompt_name", value=name)
    if known is not None and not known.are_pooled and by_name[chosen]:
        message = "the model pools no tokens of prompts (include_prompt: false), which is not served"
        raise InvalidRequestError(message, field="prompt_name", value=name)
    return {**given, "prompt": f"{by_name[chosen]}{given['prompt']}"} if isinstance(given["prompt"], str) else prompt


def keep_start(tokenizer: Tokenizer | None, text: str | None, token_ids: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Returns the first tokens of a text, between those that the tokenizer puts around; of given ids the first ones."""
    if text is None or tokenizer is None or len(token_ids) <= most:
        return token_ids[:most]
    return tuple(tokenizer.encode_start(text, most))


def as_mapping(prompt: object, *, reads_images: bool = False) -> Mapping[str, Any]:
    """Returns a prompt of any form as a mapping.

    Raises:
        InvalidRequestError: a mapping has an unknown key or no prompt, or images without `reads_images`.
    """
    if not isinstance(prompt, Mapping):
        is_text = isinstance(prompt, str) or not isinstance(prompt, Sequence)
        return {"prompt" if is_text else "prompt_token_ids": prompt}
    for name in _IMAGE_KEYS:
        if prompt.get(name) and not reads_images:
            message = "is not read here: the model is served for text, or makes vectors"
            raise InvalidRequestError(message, field=name)
    unknown = [name for name in prompt if name not in (*_PROMPT_KEYS, *_IMAGE_KEYS)]
    if unknown or not prompt.keys() & {"prompt", "prompt_token_ids"}:
        known = ", ".join((*_PROMPT_KEYS[2:], *_IMAGE_KEYS))
        message = f"must have 'prompt' or 'prompt_token_ids', and beside it {known}; got {shorten(list(prompt))}"
        raise InvalidRequestError(message, field="prompt", value=prompt)
    return prompt
