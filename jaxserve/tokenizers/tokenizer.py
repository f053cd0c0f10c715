"""The interface of every tokenizer, for jaxserve and for scripts written for transformers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxserve.tokenizers.chat import encode_chat
from jaxserve.tokenizers.checks import refuse_all_arguments, refuse_arguments, require_text, require_token_ids
from jaxserve.tokenizers.stream import DetokenizerStream


class RenderedChat(str):
    """The text of a conversation with its token ids, so that its special tokens stay special.

    `encode` of the tokenizer that made the text returns these ids, so `LLM.generate` continues the conversation. A
    copy, slice or sum is plain text.
    """

    __slots__ = ("maker", "token_ids")
    maker: Tokenizer
    token_ids: list[int]

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


class BatchEncoding(dict[str, Any]):
    """The result of calling a tokenizer: `input_ids` and `attention_mask`, as keys and as attributes."""

    def __init__(self, input_ids: list[Any]) -> None:
        """Takes the ids of one text, or a list of ids for each of several."""
        is_batch = bool(input_ids) and isinstance(input_ids[0], list)
        mask = [[1] * len(ids) for ids in input_ids] if is_batch else [1] * len(input_ids)
        super().__init__(input_ids=input_ids, attention_mask=mask)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Tokenizer(ABC):
    """Text to token ids and back. Immutable after loading and safe to use from several threads at once.

    Names and defaults of methods are those of transformers' tokenizers. Other arguments of transformers are accepted at
    values that change nothing and refused otherwise.
    """

    vocab_size: int  # largest token id + 1; a model's embedding may have more rows
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # the tokenizer's own first, then those of generation_config.json
    special_tokens: Mapping[str, int]  # text to id; plain text never becomes one of them
    special_ids: frozenset[int]  # the ids of `special_tokens`: hidden by skip_special_tokens
    special_pattern: re.Pattern[str]  # matches the text of any special token, the longest first
    named_tokens: Mapping[str, str]  # bos_token, eos_token, ... to text: variables of a chat template
    chat_template: str | None
    _prefix: Sequence[int]  # ids that `add_special_tokens` puts before a text
    _suffix: Sequence[int]  # ids that it puts after a text

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        allow_special: bool = False,
        escape: str = "",
        **arguments: Any,
    ) -> list[int]:
        """Returns the ids of a text; for a `RenderedChat` of this tokenizer, the ids of the conversation.

        Args:
            text: any Unicode text, also empty.
            add_special_tokens: put BOS (and EOS) around it where the checkpoint's own tokenizer does.
            allow_special: turn the text of a special token into that token, as transformers does. Off for users' text,
                on for a rendered chat template.
            escape: with `allow_special`, a character inside the text of each special token that must stay plain text;
                it is removed everywhere before encoding.
            arguments: transformers' others, without effect.

        Raises:
            InvalidRequestError: `text` is not a string, holds lone surrogates, or spells a special token that this
                tokenizer cannot keep as plain text; the tokenizer's library fails on it; or an argument is refused.
        """
        refuse_all_arguments(arguments)
        if isinstance(text, RenderedChat) and text.maker is self:
            return list(text.token_ids)  # the template has written BOS if the model wants one
        ids = self._encode(require_text(text, "prompt"), allow_special, escape)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False, **arguments: Any) -> str:
        """Returns the text of one id or several: what a new stream gives for them.

        Ids beyond the vocabulary have no text, as in `tokenizers`.

        Raises:
            InvalidRequestError: an id is negative or not an integer, the tokenizer's library fails, or an argument is
                refused.
        """
        refuse_all_arguments(arguments)
        listed = [ids] if isinstance(ids, int) else ids
        require_token_ids(listed)
        return self._decode(listed, skip_special_tokens)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        stream = self.new_stream(skip_special_tokens)
        return stream.push_many(ids) + stream.flush()

    @abstractmethod
    def _encode(self, text: str, allow_special: bool, escape: str) -> list[int]:
        """Returns the ids of a valid text, without prefix and suffix."""

    @abstractmethod
    def new_stream(
        self,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        spaces_between_special_tokens: bool = True,
    ) -> DetokenizerStream:
        """Returns a detokenizer for output that continues a prompt.

        Args:
            skip_special_tokens: whether special tokens have no text.
            prompt_ids: the tokens of the prompt.
            spaces_between_special_tokens: where special tokens are shown, False hides the space that some decoders
                put between two adjacent added tokens.

        Raises:
            TokenizerError: this tokenizer's decoder needs the whole text.
        """

    @abstractmethod
    def list_token_bytes(self) -> list[bytes]:
        """Returns the bytes that each token id adds inside a text; special tokens as their text, b"" without a token.

        Raises:
            TokenizerError: this tokenizer's decoder needs the whole text.
        """

    @abstractmethod
    def get_vocab(self) -> dict[str, int]:
        """Returns the id of every token, by its spelling in the vocabulary ("▁the", "Ġthe")."""

    @abstractmethod
    def _find_id(self, token: str) -> int | None:
        """Returns the id of a token by its spelling in the vocabulary, None if there is none."""

    @abstractmethod
    def _find_token(self, token_id: int) -> str | None:
        """Returns a token's spelling in the vocabulary, None for an id beyond it."""

    # The rest is for scripts; jaxserve does not call it.

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **options: Any,
    ) -> Any:
        """Returns a conversation as token ids, or as a `RenderedChat` without `tokenize`; a list for several.

        Args:
            conversation: messages, or a list of conversations.
            return_dict: return a `BatchEncoding` instead of the ids.
            options: variables of the template (`jaxserve.tokenizers.chat.OPTIONS`), and arguments of transformers
                without effect. The other arguments are those of `encode_chat`.

        Raises:
            InvalidRequestError: messages, tools or options are malformed, or the template refuses the conversation.
            TokenizerError: there is no template, or it is broken.
        """
        given: dict[str, Any] = refuse_arguments(options)
        given |= {"tools": tools, "chat_template": chat_template, "continue_final_message": continue_final_message}
        one = not conversation or isinstance(conversation[0], Mapping)
        rendered: list[Any] = []
        for each in [conversation] if one else conversation:
            text, ids = encode_chat(self, each, add_generation_prompt=add_generation_prompt, **given)  # type: ignore[arg-type]
            rendered.append(ids if tokenize else self._render(text, ids))
        found = rendered[0] if one else rendered
        return BatchEncoding(found) if tokenize and return_dict else found

    def _render(self, text: str, ids: list[int]) -> RenderedChat:
        rendered = RenderedChat(text)
        rendered.maker, rendered.token_ids = self, ids
        return rendered

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True, **arguments: Any) -> BatchEncoding:
        """Returns `encode` of a text, or of each of several, as `input_ids`."""
        if isinstance(text, str):
            return BatchEncoding(self.encode(text, add_special_tokens, **arguments))
        return BatchEncoding([self.encode(each, add_special_tokens, **arguments) for each in text])

    def batch_decode(
        self, sequences: Iterable[Sequence[int]], skip_special_tokens: bool = False, **arguments: Any
    ) -> list[str]:
        """Returns `decode` of each sequence."""
        return [self.decode(ids, skip_special_tokens, **arguments) for ids in sequences]

    def tokenize(self, text: str) -> list[str]:
        """Returns the tokens of a text as the vocabulary spells them."""
        return [self._find_token(token_id) or "" for token_id in self.encode(text, add_special_tokens=False)]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Returns the id of a token by its spelling, or a list of ids; the unknown token's id for an unknown one."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self._find_id(tokens)
        return self.unk_token_id if found is None else found

    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> Any:
        """Returns a token's spelling in the vocabulary, or a list of spellings; None for an id beyond it."""
        require_token_ids([ids] if isinstance(ids, int) else ids)
        if isinstance(ids, int):
            return self._find_token(ids)
        hidden = self.special_ids if skip_special_tokens else ()
        return [self._find_token(token_id) for token_id in ids if token_id not in hidden]

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def all_special_tokens(self) -> list[str]:
        """The texts of `special_tokens`."""
        return list(self.special_tokens)

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of `special_tokens`, in the order of `all_special_tokens`."""
        return list(self.special_tokens.values())

    @property
    def bos_token(self) -> str | None:
        """The text of the token that begins a text."""
        return self.named_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The text of the token that ends a text."""
        return self.named_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token`. A model may end texts with others too: `eos_token_ids`."""
        return self._find_named("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The text of the padding token, which jaxserve does not use."""
        return self.named_tokens.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id of `pad_token`."""
        return self._find_named("pad_token")

    @property
    def unk_token(self) -> str | None:
        """The text of the token for unknown text."""
        return self.named_tokens.get("unk_token")

    @property
    def unk_token_id(self) -> int | None:
        """The id of `unk_token`."""
        return self._find_named("unk_token")

    def _find_named(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self._find_id(text)


def compile_special_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the texts, the longest first; without texts it matches nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
