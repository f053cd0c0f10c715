"""Turns the decoder of a `tokenizer.json` into a table from token id to text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.tokenizers.stream import EACH_BYTE, PieceTable, join_added, list_openings, trim_space

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a decoder turns each token into text."""

    to_piece: Callable[[str], str | bytes]
    to_opening: Callable[[str], str | bytes] | None = None  # for the first token of a text; None: `to_piece`
    errors: str = "replace"  # codec error handler for broken UTF-8
    replacements: Mapping[int, str] = field(
        default_factory=dict
    )  # by code point, for characters spelled by byte tokens


def make_piece_table(
    texts: Iterable[str | None],
    special_ids: frozenset[int],
    added: Mapping[int, str],
    decoder: dict[str, Any] | None,
) -> PieceTable | None:
    """Returns the text that each token adds, None when the decoder needs more than one token at a time.

    Args:
        texts: the vocabulary's token texts by id; None for an id without a token.
        special_ids: ids that `visible` hides.
        added: special and other added tokens, by id.
        decoder: the `decoder` object of tokenizer.json. Known are `ByteLevel` (GPT-2, Llama 3, Qwen), sequences of
            `Replace`, `ByteFallback`, `Fuse` and a leading `Strip` (Llama 2, Mistral, Gemma, Phi-3), `Metaspace`, and
            none at all (words joined by spaces). A `Replace` after `ByteFallback` is known if it replaces a single
            character: several tokens may spell a longer text.
    """
    rule = _read_rule(decoder)
    if rule is None:
        return None
    listed = list(texts)
    pieces = _map_tokens(rule.to_piece, listed)
    opening = {} if rule.to_opening is None else list_openings(pieces, _map_tokens(rule.to_opening, listed))
    return PieceTable(
        pieces,
        hide(pieces, special_ids),
        rule.errors,
        opening=opening,
        joined=join_added(pieces, added),
        replacements=rule.replacements,
    )


def _map_tokens(function: Callable[[str], str | bytes], texts: Iterable[str | None]) -> list[str | bytes]:
    return ["" if text is None else function(text) for text in texts]


def hide(pieces: list[str | bytes], special_ids: frozenset[int]) -> list[str | bytes]:
    """Returns the pieces with "" for the special tokens."""
    visible = list(pieces)
    for token_id in special_ids:
        visible[token_id] = ""
    return visible


def _read_rule(decoder: dict[str, Any] | None) -> _Rule | None:
    """Returns the rule of a decoder, None if it needs more than one token at a time."""
    if decoder is None:
        return _Rule(" {}".format, str)
    match steps := _flatten(decoder):
        case [{"type": "ByteLevel"}]:
            return _Rule(_make_byte_level_reader())
        case [{"type": "Metaspace", "prepend_scheme": "never", "replacement": mark}]:
            return _Rule(lambda text: text.replace(mark, " "))
        case [{"type": "Metaspace", "replacement": mark}]:  # the first token loses its marks, not its spaces
            return _Rule(lambda text: text.replace(mark, " "), lambda text: text.replace(mark, ""))
    return _read_sequence(steps)


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


def _read_sequence(steps: list[dict[str, Any]]) -> _Rule | None:
    """Returns the rule of a sequence of steps; without any, texts are joined as they are."""
    before: list[tuple[str, str]] = []  # replacements in the token's text
    after: list[tuple[str, str]] = []  # replacements after byte tokens became bytes
    byte_fallback = fused = strips = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if old and not fused:
                if byte_fallback and len(old) > 1:
                    return None
                (after if byte_fallback else before).append((old, new))
            case {"type": "ByteFallback"} if not (byte_fallback or fused):
                byte_fallback = True
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if fused and not strips:
                strips = bool(start)
            case {"type": "Fuse"}:
                fused = True
            case _:
                return None

    def to_piece(text: str) -> str | bytes:
        text = _replace(text, before)
        byte = _BYTE_PIECE.fullmatch(text) if byte_fallback else None
        piece = split_utf8(bytes([int(byte[1], 16)])) if byte else text
        return _replace(piece, after) if isinstance(piece, str) else piece

    to_opening = (lambda text: trim_space(to_piece(text))) if strips else None
    return _Rule(to_piece, to_opening, EACH_BYTE, {ord(old): _replace(old, after) for old, _ in after})


def _replace(text: str, replacements: Iterable[tuple[str, str]]) -> str:
    for old, new in replacements:
        text = text.replace(old, new)
    return text


def _list_byte_characters() -> str:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_CHARACTERS = _list_byte_characters()
"""GPT-2's alphabet, in which each byte is one printable character.

The bytes that are printable in Latin-1 stand for themselves; the others, in order, are the characters from U+0100.
"""


def _make_byte_level_reader() -> Callable[[str], str | bytes]:
    """Returns the inverse of BYTE_CHARACTERS.

    A token with any other character is an added token, and its own text.
    """
    to_byte = dict.fromkeys(range(0x200), 0x100)  # U+0100 does not encode to Latin-1
    to_byte |= {ord(character): byte for byte, character in enumerate(BYTE_CHARACTERS)}

    def to_piece(text: str) -> str | bytes:
        try:
            return split_utf8(text.translate(to_byte).encode("latin-1"))
        except UnicodeEncodeError:
            return text

    return to_piece


def split_utf8(data: bytes) -> str | bytes:
    """Returns bytes as text if they are complete UTF-8, else as they are."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
