"""Incremental detokenizing over a table from token id to text.

`tokenizers.decoders.DecodeStream` decodes a window of ids again for every token, and raises when a byte that was shown
turns out to belong to an invalid run. A table has neither problem: the text that a token adds depends on at most three
bytes before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

EACH_BYTE = "jaxserve.each_byte"  # codec error handler: U+FFFD for each invalid byte


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)


@dataclass(frozen=True, slots=True)
class PieceTable:
    """The piece that each token id adds to a text.

    A piece is a `str` if it is text on its own, else `bytes`: part of a UTF-8 sequence.
    """

    pieces: list[str | bytes]  # by token id; special tokens as their text, "" for an id without a token
    visible: list[str | bytes]  # the same with "" for special tokens
    errors: str  # codec error handler: "replace" (one U+FFFD per broken sequence) or EACH_BYTE
    opening: Mapping[int, str] = field(default_factory=dict)  # pieces that differ at the start of a text
    opens_until_text: bool = False  # the start lasts until a piece leaves text, else for one piece
    joined: Mapping[int, str] = field(default_factory=dict)  # the result of `join_added`
    replacements: Mapping[int, str] = field(default_factory=dict)  # by code point, for characters spelled by `bytes`

    def list_bytes(self) -> list[bytes]:
        """Returns the pieces as UTF-8."""
        return [piece.encode() if isinstance(piece, str) else piece for piece in self.pieces]

    def show(self, token_id: int) -> str:
        """Returns the text of a token inside a text: U+FFFD for part of a character, "" for an unknown id."""
        piece = self.pieces[token_id] if token_id < len(self.pieces) else ""
        return piece if isinstance(piece, str) else self.decode(piece, True)[0]

    def decode(self, data: bytes, final: bool) -> tuple[str, int]:
        """Returns the text of `bytes` pieces and how many bytes it took; an open character waits unless `final`."""
        text, consumed = codecs.utf_8_decode(data, self.errors, final)
        return text.translate(self.replacements) if self.replacements else text, consumed


def trim_space(piece: str | bytes) -> str | bytes:
    """Returns a piece without a leading space; `bytes` unchanged."""
    return piece.removeprefix(" ") if isinstance(piece, str) else piece


def list_openings(pieces: Sequence[str | bytes], openings: Iterable[str | bytes]) -> dict[int, str]:
    """Returns `PieceTable.opening`, given the pieces of all ids and their forms at the start of a text."""
    pairs = enumerate(zip(pieces, openings, strict=True))
    return {token_id: opening for token_id, (piece, opening) in pairs if isinstance(opening, str) and opening != piece}


def join_added(pieces: Sequence[str | bytes], texts: Mapping[int, str]) -> dict[int, str]:
    """Returns the pieces of added tokens, by id, right after another one: without the decoder's space.

    Empty if the decoder puts no space in front of any of them, as is usual. A token of blanks only keeps them.

    Args:
        pieces: the piece of each token id.
        texts: special and other added tokens by id, as the vocabulary spells them.
    """
    joined: dict[int, str] = {}
    for token_id, text in texts.items():
        piece = pieces[token_id]
        if isinstance(piece, str):
            is_spaced = piece.startswith(" ") and piece != text and not piece.isspace()
            joined[token_id] = piece[1:] if is_spaced else piece
    return joined if any(pieces[token_id] != piece for token_id, piece in joined.items()) else {}


class DetokenizerStream:
    """Turns output token ids into text, token by token, with constant work per token.

    The results of `push` and `flush` joined are the decoded output. A prompt decides whether the first word keeps its
    space, and the output can complete a character that the prompt began.
    """

    __slots__ = ("_at_start", "_clear", "_inherited", "_pending", "_pieces", "_table")

    def __init__(self, table: PieceTable, *, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()) -> None:
        self._table = table
        self._pieces = table.visible if skip_special_tokens else table.pieces
        self._pending = self._find_open_bytes(prompt_ids)
        self._inherited = bool(self._pending)  # all pending bytes are the prompt's
        self._at_start = bool(table.opening) and not any(map(self._get_piece, prompt_ids))
        self._clear = not (self._pending or self._at_start)  # the next piece, if a `str`, is text as it stands

    def push(self, token_id: int) -> str:
        """Returns the text that became certain with this token; "" while a character is incomplete.

        `token_id` is at least 0; an id that is not in the vocabulary has no text.
        """
        try:
            piece = self._pieces[token_id]
        except IndexError:
            return ""
        if self._clear and type(piece) is str:
            return piece
        return self._push_at_edge(token_id, piece)

    def push_many(self, token_ids: Sequence[int]) -> str:
        """Returns the text that became certain with these tokens."""
        push = self.push
        return "".join([push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Returns the rest of the output's text: U+FFFD for a character that stayed incomplete, else ""."""
        pending, self._pending = self._pending, b""
        self._clear = not self._at_start
        if self._inherited:
            return ""
        return self._table.decode(pending, True)[0]

    def _push_at_edge(self, token_id: int, piece: str | bytes) -> str:
        """`push` at the start of a text or inside a character."""
        if not piece:
            return ""
        table = self._table
        if self._at_start:
            piece = table.opening.get(token_id, piece)
            self._at_start = table.opens_until_text and not piece
        if self._inherited:
            self._inherited = False
            if isinstance(piece, str) or piece[0] & 0xC0 != 0x80:
                self._pending = b""  # the prompt's last character is broken, but not part of the output
        if isinstance(piece, str):  # ends the character before it, complete or not
            text, self._pending = table.decode(self._pending, True)[0] + piece, b""
        else:
            data = self._pending + piece
            text, consumed = table.decode(data, False)
            self._pending = data[consumed:]
        self._clear = not (self._pending or self._at_start)
        return text

    def _get_piece(self, token_id: int) -> str | bytes:
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else ""

    def _find_open_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """Returns the bytes, at most three, of a character that the prompt's last tokens began but did not finish."""
        tail = b""
        for token_id in reversed(prompt_ids[-3:]):
            piece = self._get_piece(token_id)
            if not isinstance(piece, bytes):
                break
            tail = piece + tail
        return tail[self._table.decode(tail, False)[1] :]


class JoiningStream(DetokenizerStream):
    """A stream that shows special tokens, without the decoder's space between two added tokens.

    The prompt's last token counts as the one before the output's first.
    """

    __slots__ = ("_after_added",)

    def __init__(self, table: PieceTable, *, prompt_ids: Sequence[int] = ()) -> None:
        super().__init__(table, skip_special_tokens=False, prompt_ids=prompt_ids)
        self._after_added = any(token_id in table.joined for token_id in prompt_ids[-1:])

    def push(self, token_id: int) -> str:
        """See `DetokenizerStream.push`."""
        piece = super().push(token_id)
        joined = self._table.joined.get(token_id)
        follows, self._after_added = self._after_added, joined is not None
        return joined if follows and joined is not None else piece


def open_stream(
    table: PieceTable, skip_special_tokens: bool, prompt_ids: Sequence[int], spaces_between_special_tokens: bool
) -> DetokenizerStream:
    """Returns the stream for these options, the plain one wherever the text is the same."""
    if skip_special_tokens or spaces_between_special_tokens or not table.joined:
        return DetokenizerStream(table, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)
    return JoiningStream(table, prompt_ids=prompt_ids)
