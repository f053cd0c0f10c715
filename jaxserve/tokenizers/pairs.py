"""Chat templates of rerankers: a query and a document as the messages of two roles, `query` and `document`.

A template puts both texts somewhere into its own, which is the same for every pair. So it is rendered once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.tokenizers.chat import choose_unused, protect
from jaxserve.tokenizers.checks import require_text
from jaxserve.tokenizers.renderer import render_apart

if TYPE_CHECKING:
    from jaxserve.tokenizers.tokenizer import Tokenizer

_MARKS = {"query": "Mark of the query.", "document": "Mark of the document."}
QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
    "search query, retrieve relevant passages that answer the query\n"
    + "".join(
        f"<{role.title()}>: {{{{ messages | selectattr('role', 'equalto', '{role}') | map(attribute='content') "
        "| first }}\n"
        for role in _MARKS
    )
).removesuffix("\n") + "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""The prompt that Qwen3-Reranker was trained with, as its model card has it; its own files lack it."""


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The texts before, between and behind the two of a pair, the query first."""

    before: str
    between: str
    behind: str

    def encode(
        self, tokenizer: Tokenizer, query: str, document: str, most: int | None, most_of_document: int | None
    ) -> list[int]:
        """Returns the ids of a pair. Text of users never becomes a special token.

        Args:
            most: at most so many ids. The end of the document is cut, then that of the query: the template stays.
            most_of_document: at most so many ids of the document, before that.

        Raises InvalidRequestError as `Tokenizer.encode` does; or `most` has no room for the template.
        """
        if most_of_document is not None:
            document = _cut(tokenizer, document, most_of_document)
        ids = self._encode(tokenizer, query, document)
        while most is not None and len(ids) > most:
            longest = document or query
            if not longest:
                message = f"{most} tokens have no room for the chat template of pairs"
                raise InvalidRequestError(message, field="truncate_prompt_tokens", value=most)
            count = len(tokenizer.encode(longest, add_special_tokens=False))
            shorter = _cut(tokenizer, longest, max(count - (len(ids) - most), 0))
            shorter = shorter if len(shorter) < len(longest) else longest[:-1]
            query, document = (query, shorter) if document else (shorter, "")
            ids = self._encode(tokenizer, query, document)
        return ids

    def _encode(self, tokenizer: Tokenizer, query: str, document: str) -> list[int]:
        texts = [require_text(query, "prompt"), require_text(document, "prompt")]
        escape, pattern = "", tokenizer.special_pattern
        if any(map(pattern.search, texts)):
            escape = choose_unused(self.before + self.between + self.behind, texts)
            texts = [protect(text, pattern, escape) for text in texts]
        whole = self.before + texts[0] + self.between + texts[1] + self.behind
        return tokenizer.encode(whole, add_special_tokens=False, allow_special=True, escape=escape)


def read_pair_template(
    template: str, tokenizer: Tokenizer, render: Callable[..., str] = render_apart
) -> PairTemplate | None:
    """Returns the form of a chat template for pairs; None if it does not show a query and, behind it, a document.

    Raises TokenizerError for a template that is broken.
    """
    variables = {**tokenizer.named_tokens, "add_generation_prompt": True}
    forms = [[{"role": role, "content": mark} for role, mark in _MARKS.items()]]
    forms.append([{"role": role, "content": [{"type": "text", "text": mark}]} for role, mark in _MARKS.items()])
    try:
        try:
            text = render(template, forms[0], variables)
        except TokenizerError:  # templates of models with images read a list of parts
            text = render(template, forms[1], variables)
    except InvalidRequestError:  # it refuses these roles
        return None
    parts = re.split("|".join(map(re.escape, _MARKS.values())), text)
    in_order = text.find(_MARKS["query"]) < text.find(_MARKS["document"])
    return PairTemplate(*parts) if len(parts) == len(_MARKS) + 1 and in_order else None


def require_pair_template(
    template: str, tokenizer: Tokenizer, render: Callable[..., str] = render_apart
) -> PairTemplate:
    """Returns the form of a chat template for pairs; TokenizerError if it shows no pairs."""
    found = read_pair_template(template, tokenizer, render)
    if found is None:
        message = "shows no message of the role query and, behind it, one of the role document; give one that does"
        raise TokenizerError(message, field="chat_template")
    return found


def _cut(tokenizer: Tokenizer, text: str, most: int) -> str:
    """Returns the start of a text, of about `most` tokens."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return text if len(ids) <= most else tokenizer.decode(ids[:most])
