"""What files say about a tokenizer, beside its vocabulary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AddedTokenEntry:
    """A token added to the trained vocabulary. `lstrip` and `rstrip`: it absorbs the blanks on that side."""

    token_id: int
    text: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerMetadata:
    """What the files beside a tokenizer say about it; None or empty where they say nothing."""

    named_tokens: dict[str, str]  # "bos_token" to "<s>", ...
    extra_special: tuple[str, ...]  # further texts that are special tokens
    added_tokens: tuple[AddedTokenEntry, ...]  # by id
    tokenizer_class: str | None  # in transformers
    add_bos: bool | None
    add_eos: bool | None
    legacy: bool  # sentencepiece: text after a special token gets a leading space
    chat_template: str | None
    eos_token_ids: tuple[int, ...]  # generation_config.json's, else config.json's
    has_types: bool  # models get the types of tokens
