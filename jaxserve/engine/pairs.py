"""Encodes pairs of texts as one prompt: as the tokenizer's file says, or through a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxserve.errors import InvalidRequestError, TokenizerError, shorten
from jaxserve.request import TOKEN_TYPE

if TYPE_CHECKING:
    from jaxserve.core.models.base import DecoderConfig
    from jaxserve.tokenizers import Tokenizer
    from jaxserve.tokenizers.pairs import PairTemplate


@dataclass(frozen=True)
class PairEncoder:
    """How a model reads pairs.

    `has_types`: it tells the second text from the first by types. `template` is that of its prompts, if it has one;
    without one `needs_template` is an error, since scores would be noise.
    """

    tokenizer: Tokenizer | None
    has_types: bool = False
    needs_template: bool = False
    template: PairTemplate | None = None

    def encode(
        self,
        first: str,
        second: str,
        *,
        most: int | None = None,
        most_of_second: int | None = None,
        template: PairTemplate | None = None,
    ) -> tuple[int, ...]:
        """Returns the ids of a pair, with TOKEN_TYPE where the model has types.

        Args:
            most: at most so many ids; the ends of the texts are cut.
            most_of_second: at most so many ids of the second text.
            template: in place of the model's own.

        Raises:
            InvalidRequestError: a text is empty, or cannot be encoded.
            TokenizerError: there is no tokenizer or template, or the tokenizer does not say how pairs are read.
        """
        for text in (first, second):
            if not isinstance(text, str) or not text:
                message = f"must be a text of at least one character, got {shorten(text)}"
                raise InvalidRequestError(message, field="prompt", value=text)
        if self.tokenizer is None:
            raise TokenizerError("there is none, so pairs of texts cannot be read", field="tokenizer")
        template = template or self.template
        if template is not None:
            return tuple(template.encode(self.tokenizer, first, second, most, most_of_second))
        if self.needs_template:
            message = (
                "this reranker was trained with a prompt, without which its scores are noise, and its files have no "
                "chat template that shows the roles query and document; give one"
            )
            raise TokenizerError(message, field="chat_template")
        ids, types = self.tokenizer.encode_pair(first, second, most, most_of_second)
        if not self.has_types:
            return tuple(ids)
        if max(types) > 1:
            raise TokenizerError(f"gives a token the type {max(types)}; at most 1 is read", field="tokenizer")
        return tuple(token_id | TOKEN_TYPE * kind for token_id, kind in zip(ids, types, strict=True))


def make_pair_encoder(tokenizer: Tokenizer | None, model: DecoderConfig, hf_config: Mapping[str, Any]) -> PairEncoder:
    """Returns the encoder of a model's pairs; TokenizerError for a chat template that is broken."""
    added, classes = model.embedding.added, model.pooler.classes
    has_types = added is not None and added.num_types > 1
    if classes is None or tokenizer is None or not model.causal:
        return PairEncoder(tokenizer, has_types)
    from jaxserve.tokenizers.pairs import QWEN3_RERANKER, read_pair_template

    own = None if tokenizer.chat_template is None else read_pair_template(tokenizer.chat_template, tokenizer)
    if own is None and hf_config.get("is_original_qwen3_reranker"):
        own = read_pair_template(QWEN3_RERANKER, tokenizer)
    by_tokens = model.pooler.denses[-1].rows is not None
    return PairEncoder(tokenizer, needs_template=by_tokens, template=own)
