"""What every tokenizer offers: to the rest of jaxserve, and to scripts that were written for transformers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxserve.tokenizers.chat import encode_chat
from jaxserve.tokenizers.checks import refuse_all_arguments, refuse_arguments, require_text, require_token_ids
from jaxserve.tokenizers.stream import DetokenizerStream


class RenderedChat(str):
    """A conversation as text that remembers its token ids, so that its special tokens stay what they are.

    `encode` of the tokenizer that made it returns these ids, and so `LLM.generate` continues the conversation. A copy,
    a slice or a sum of it is plain text.
    """

    __slots__ = ("maker", "token_ids")
    maker: Tokenizer
    token_ids: list[int]

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


class BatchEncoding(dict[str, Any]):
    """What a call of a tokenizer returns: `input_ids` and `attention_mask`, as keys and as attributes."""

    def __init__(self, input_ids: list[Any]) -> None:
        """Takes the ids of a text, or those of several texts."""
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

    The methods' names, and their defaults, are those of transformers' tokenizers. An argument of transformers' that is
    not here is taken at the value that changes nothing and refused otherwise.
    """

    vocab_size: int  # largest token id + 1; a model's embedding may have more rows
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # the tokenizer's own first, then those of generation_config.json
    special_tokens: Mapping[str, int]  # text to id of every token that plain text never becomes
    special_ids: frozenset[int]  # the ids of `special_tokens`: hidden by skip_special_tokens
    special_pattern: re.Pattern[str]  # matches the text of any special token, the longest first
    named_tokens: Mapping[str, str]  # bos_token, eos_token, ... to their text: variables of a chat template
    chat_template: str | None
    _prefix: Sequence[int]  # what `add_special_tokens` puts before a text
    _suffix: Sequence[int]  # and behind it

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        allow_special: bool = False,
        escape: str = "",
        **arguments: Any,
    ) -> list[int]:
        """Returns the ids of a text; of what `apply_chat_template` returned as text, the ids that it stands for.

        Args:
            text: any Unicode text, also empty.
            add_special_tokens: put BOS (and EOS) around it where the checkpoint's own tokenizer does.
            allow_special: turn the text of a special token into that token, as transformers does. Off for a user's
                text, on for a rendered chat template.
            escape: with `allow_special`, one character that stands inside the text of each special token that has to
                stay plain text; it is removed everywhere before the text is encoded.
            arguments: of transformers', without effect.

        Raises:
            InvalidRequestError: `text` is no string, holds lone surrogates, or spells a special token that this
                tokenizer cannot keep as plain text; the tokenizer's library fails on it; or an argument is refused.
        """
        refuse_all_arguments(arguments)
        if isinstance(text, RenderedChat) and text.maker is self:
            return list(text.token_ids)  # the template has written BOS if the model wants one
        ids = self._encode(require_text(text, "prompt"), allow_special, escape)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False, **arguments: Any) -> str:
        """Returns the text of ids, or of one: all that a fresh `new_stream` gives for them.

        Ids that are not in the vocabulary have no text, as in `tokenizers`.

        Raises:
            InvalidRequestError: an id is negative or no integer, the tokenizer's library fails on them, or an argument
                is refused.
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
        """`encode` of a valid text, with nothing put around it."""

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
            TokenizerError: this tokenizer's decoder needs the whole text (its message names the decoder).
        """

    @abstractmethod
    def list_token_bytes(self) -> list[bytes]:
        """Returns what each token id adds to a text that has begun, special tokens as their text; b"" without a token.

        Raises:
            TokenizerError: this tokenizer's decoder needs the whole text (its message names the decoder).
        """

    @abstractmethod
    def get_vocab(self) -> dict[str, int]:
        """Returns every token as the vocabulary spells it ("▁the", "Ġthe"), with its id."""

    @abstractmethod
    def _find_id(self, token: str) -> int | None:
        """Returns the id of a token as the vocabulary spells it, None without one."""

    @abstractmethod
    def _find_token(self, token_id: int) -> str | None:
        """Returns how the vocabulary spells a token, None for an id of at least 0 that is not in it."""

    # What follows is for scripts; nothing else in jaxserve calls it.

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
        """Returns a conversation as token ids, or as text (`RenderedChat`) without `tokenize`; for a list, a list.

        Args:
            conversation: messages, or a list of conversations.
            return_dict: return a `BatchEncoding` instead of the ids.
            options: variables of the template (`jaxserve.tokenizers.chat.OPTIONS`), and arguments of transformers'
                without effect. The others are those of `encode_chat`.

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
        """Returns the ids of a text, or of each of a list of texts, under `input_ids`; raises what `encode` does."""
        if isinstance(text, str):
            return BatchEncoding(self.encode(text, add_special_tokens, **arguments))
        return BatchEncoding([self.encode(each, add_special_tokens, **arguments) for each in text])

    def batch_decode(
        self, sequences: Iterable[Sequence[int]], skip_special_tokens: bool = False, **arguments: Any
    ) -> list[str]:
        """Returns `decode` of each."""
        return [self.decode(ids, skip_special_tokens, **arguments) for ids in sequences]

    def tokenize(self, text: str) -> list[str]:
        """Returns the tokens of a text as the vocabulary spells them."""
        return [self._find_token(token_id) or "" for token_id in self.encode(text, add_special_tokens=False)]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Returns the id of a token as the vocabulary spells it, or a list of ids; the unknown token's for others."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self._find_id(tokens)
        return self.unk_token_id if found is None else found

    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> Any:
        """Returns how the vocabulary spells a token, or a list of tokens; None for an id that is not in it."""
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
        """Their ids, in the same order."""
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
        """Its id. A model may end a text by others too: `eos_token_ids`."""
        return self._find_named("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The text of the token that fills batches up; jaxserve needs none."""
        return self.named_tokens.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        """Its id."""
        return self._find_named("pad_token")

    @property
    def unk_token(self) -> str | None:
        """The text of the token that stands for what the vocabulary lacks."""
        return self.named_tokens.get("unk_token")

    @property
    def unk_token_id(self) -> int | None:
        """Its id."""
        return self._find_named("unk_token")

    def _find_named(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self._find_id(text)


def compile_special_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the texts, the longest first; nothing when there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
