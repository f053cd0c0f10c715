"""Methods that scripts written for transformers call on a tokenizer. jaxserve itself calls none of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.tokenizers.chat import encode_chat
from jaxserve.tokenizers.checks import require_token_ids
from jaxserve.tokenizers.tokenizer import Tokenizer

_LISTS = "ids are lists of int; make an array of them yourself"
_LENGTHS = "nothing is padded or cut here; SamplingParams(truncate_prompt_tokens=N) keeps the end of a prompt"
# Arguments that scripts pass to transformers' tokenizers: the accepted values, and the hint in the error for others.
_ARGUMENTS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "clean_up_tokenization_spaces": ((None, False), "text stays as the tokens spell it"),
    "max_length": ((None,), _LENGTHS),
    "padding": ((None, False, "do_not_pad"), _LENGTHS),
    "return_tensors": ((None,), _LISTS),
    "text_pair": ((None,), "give one text, or a list of texts"),
    "truncation": ((None, False, "do_not_truncate"), _LENGTHS),
}


class RenderedChat(str):
    """The text of a conversation with its token ids, so that its special tokens stay special.

    `encode` of the tokenizer that made the text returns these ids, so `LLM.generate` continues the conversation. A
    copy, slice or sum is plain text.
    """

    __slots__ = ("maker", "token_ids")
    maker: TransformersTokenizer
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


class TransformersTokenizer(Tokenizer):
    """A `Tokenizer` with the methods of transformers' tokenizers, by their names and defaults.

    Other arguments of transformers are accepted at values that change nothing, else they are an InvalidRequestError.
    """

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        allow_special: bool = False,
        escape: str = "",
        **arguments: Any,
    ) -> list[int]:
        """See `Tokenizer.encode`. A `RenderedChat` of this tokenizer is encoded as its conversation."""
        _refuse_all(arguments)
        if isinstance(text, RenderedChat) and text.maker is self:
            return list(text.token_ids)  # the template has written BOS if the model wants one
        return super().encode(text, add_special_tokens, allow_special=allow_special, escape=escape)

    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False, **arguments: Any) -> str:
        """See `Tokenizer.decode`; takes one id, too."""
        _refuse_all(arguments)
        return super().decode([ids] if isinstance(ids, int) else ids, skip_special_tokens)

    @abstractmethod
    def get_vocab(self) -> dict[str, int]:
        """Returns the id of every token, by its spelling in the vocabulary ("▁the", "Ġthe")."""

    @abstractmethod
    def _find_token(self, token_id: int) -> str | None:
        """Returns a token's spelling in the vocabulary, None for an id beyond it."""

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        documents: Sequence[Mapping[str, Any]] | None = None,
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
            documents: a variable of the template, which it must read, as are those in `options`.
            options: further variables, and arguments of transformers without effect. The other arguments are those of
                `encode_chat`.

        Raises:
            InvalidRequestError: messages, tools or options are malformed, or the template refuses the conversation.
            TokenizerError: there is no template, or it is broken.
        """
        variables = _drop_harmless(options) | ({} if documents is None else {"documents": documents})
        given: dict[str, Any] = {"tools": tools, "chat_template": chat_template, "variables": variables}
        given["continue_final_message"] = continue_final_message
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


def _drop_harmless(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments without those of transformers that have no effect here.

    Raises:
        InvalidRequestError: an argument of transformers has a value that would change something.
    """
    for name in given.keys() & _ARGUMENTS.keys():
        harmless, hint = _ARGUMENTS[name]
        if not any(given[name] is value or given[name] == value for value in harmless):
            message = f"only {' or '.join(map(repr, harmless))} is accepted, got {shorten(given[name])}: {hint}"
            raise InvalidRequestError(message, field=name, value=given[name])
    return {name: value for name, value in given.items() if name not in _ARGUMENTS}


def _refuse_all(given: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for any argument but those of transformers at values that change nothing."""
    for name, value in _drop_harmless(given).items():
        message = f"not an argument here; of transformers' others, {', '.join(_ARGUMENTS)} may be given unset"
        raise InvalidRequestError(message, field=name, value=value)
