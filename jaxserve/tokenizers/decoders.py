"""Reads the decoder of a `tokenizer.json` into a table from token id to text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxserve.tokenizers.stream import EACH_BYTE, Leading, PieceTable, join_added

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def make_piece_table(
    texts: Iterable[str | None],
    special_ids: frozenset[int],
    added: Mapping[int, str],
    decoder: dict[str, Any] | None,
) -> PieceTable | None:
    """Returns what each token adds to a text, None when the decoder needs more than one token at a time.

    Args:
        texts: the vocabulary's token texts by id; None for an id without a token.
        special_ids: ids that `visible` hides.
        added: special and other added tokens, by id.
        decoder: the `decoder` object of tokenizer.json. Known are `ByteLevel` (GPT-2, Llama 3, Qwen), sequences of
            `Replace`, `ByteFallback`, `Fuse` and a leading `Strip` (Llama 2, Mistral, Gemma, Phi-3), `Metaspace`, and
            none at all (words joined by spaces).
    """
    rule = _read_rule(decoder)
    if rule is None:
        return None
    to_piece, leading, errors = rule
    pieces = ["" if text is None else to_piece(text) for text in texts]
    return PieceTable(pieces, hide(pieces, special_ids), leading, errors, join_added(pieces, added))


def hide(pieces: list[str | bytes], special_ids: frozenset[int]) -> list[str | bytes]:
    """Returns the pieces with "" for the special tokens."""
    visible = list(pieces)
    for token_id in special_ids:
        visible[token_id] = ""
    return visible


def _read_rule(
    decoder: dict[str, Any] | None,
) -> tuple[Callable[[str], str | bytes], Leading, str] | None:
    """Returns the function from a token to its piece, what the first piece loses, and how broken UTF-8 shows."""
    steps = _flatten(decoder)
    kinds = [step["type"] for step in steps]
    if not steps:
        return " {}".format, Leading.ONE_SPACE, "replace"
    if kinds == ["ByteLevel"]:
        return _make_byte_level_reader(), Leading.KEEP, "replace"
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        leading = Leading.KEEP if steps[0].get("prepend_scheme") == "never" else Leading.ALL_SPACES
        return (lambda text: text.replace(mark, " ")), leading, "replace"
    replacements: list[tuple[str, str]] = []
    byte_fallback, leading = False, Leading.KEEP
    for at, step in enumerate(steps):
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"] and "Fuse" not in kinds[:at]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback" and not byte_fallback:
            byte_fallback = True
        elif kind == "Strip" and kinds[at - 1] == "Fuse" and at == len(steps) - 1:
            if step["content"] != " " or step["start"] > 1 or step["stop"] > 0:
                return None
            leading = Leading.ONE_SPACE if step["start"] else Leading.KEEP
        elif kind != "Fuse":
            return None
    return _make_fallback_reader(replacements, byte_fallback), leading, EACH_BYTE


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


def _make_fallback_reader(replacements: list[tuple[str, str]], byte_fallback: bool) -> Callable[[str], str | bytes]:
    def to_piece(text: str) -> str | bytes:
        for old, new in replacements:
            text = text.replace(old, new)
        byte = _BYTE_PIECE.fullmatch(text) if byte_fallback else None
        return split_utf8(bytes([int(byte[1], 16)])) if byte else text

    return to_piece


def _make_byte_level_reader() -> Callable[[str], str | bytes]:
    """Inverts GPT-2's alphabet, in which each byte is one printable character.

    The bytes that are printable in Latin-1 stand for themselves; the others, in order, are the characters from U+0100.
    A token with any other character (an added one) is its own text.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    to_byte = dict.fromkeys(range(0x100 + len(others)), 0x100)  # U+0100 does not encode to Latin-1
    to_byte |= {byte: byte for byte in printable}
    to_byte |= {0x100 + n: byte for n, byte in enumerate(others)}

    def to_piece(text: str) -> str | bytes:
        try:
            return split_utf8(text.translate(to_byte).encode("latin-1"))
        except UnicodeEncodeError:
            return text

    return to_piece


def split_utf8(data: bytes) -> str | bytes:
    """Returns bytes as text if they are whole UTF-8 characters, else as they are."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
