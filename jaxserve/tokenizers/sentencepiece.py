"""sentencepiece `.model` files, with the added tokens and options of the JSON files beside them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.tokenizers.decoders import hide
from jaxserve.tokenizers.files import AddedTokenEntry, TokenizerMetadata, read_metadata
from jaxserve.tokenizers.stream import EACH_BYTE, DetokenizerStream, Leading, PieceTable, join_added, open_stream
from jaxserve.tokenizers.tokenizer import compile_special_pattern, require_text, require_token_ids

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

_SPACE_MARK = "\u2581"
# A ModelProto that holds only normalizer_spec { add_dummy_prefix: false }. Appended to a model it is merged into it,
# as protocol buffers define.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
_MODEL_FIELDS = {1: "pieces", 2: "trainer_spec", 3: "normalizer_spec"}


def load_sentencepiece(path: Path) -> SentencePieceTokenizer:
    """Loads a `.model` file and the JSON files beside it.

    Raises:
        TokenizerError: a file is missing, truncated or malformed, or they contradict each other.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error}", field=path.name, value=str(path)) from error
    missing = [name for number, name in _MODEL_FIELDS.items() if number not in _list_fields(data)]
    if missing:
        raise TokenizerError(
            f"{path} is not a whole sentencepiece model (no {missing[0]}): if it was truncated, copy it again; if it "
            "is a tiktoken vocabulary, use the checkpoint's tokenizer.json",
            field=path.name,
            value=str(path),
        )
    return SentencePieceTokenizer(data, read_metadata(path.parent), path)


@final
class SentencePieceTokenizer:
    """A `Tokenizer` over the sentencepiece library. Adds BOS unless `add_bos_token` is false, as Llama 2 does."""

    def __init__(self, data: bytes, metadata: TokenizerMetadata, path: Path) -> None:
        self._at_start = _load(data, path)
        self._continuing = _load(data + _NO_DUMMY_PREFIX, path)
        self._legacy = metadata.legacy
        pieces = _read_piece_texts(self._at_start, metadata.added_tokens)
        self.vocab_size = len(pieces)
        self._added = {entry.text: entry for entry in metadata.added_tokens}
        self._model_size = self._at_start.get_piece_size()
        self.named_tokens = self._read_named_tokens(metadata)
        self.special_tokens = self._read_special_tokens(metadata)
        self.special_ids = frozenset(self.special_tokens.values())
        self.special_pattern: re.Pattern[str] = compile_special_pattern(self.special_tokens)
        self._all_pattern = compile_special_pattern([*self.special_tokens, *self._added])
        self._ordinary_pattern = compile_special_pattern(set(self._added) - set(self.special_tokens))
        self._found_in_text = {  # special tokens that the model itself finds in any text
            text: token_id
            for text, token_id in self.special_tokens.items()
            if token_id < self._model_size and self._continuing.encode(text) == [token_id]
        }
        self._found_pattern = compile_special_pattern(self._found_in_text)
        self.bos_token_id = self._get_named_id("bos_token")
        eos = self._get_named_id("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *metadata.eos_token_ids]))
        add_bos = metadata.add_bos is not False and self.bos_token_id is not None
        self._prefix = [self.bos_token_id] if add_bos else []
        self._suffix = [eos] if metadata.add_eos and eos is not None else []
        self.chat_template = metadata.chat_template
        added = {entry.token_id: entry.text for entry in metadata.added_tokens}
        added |= {token_id: text for text, token_id in self.special_tokens.items()}
        leading, joined = _probe_leading(self._at_start), join_added(pieces, added)
        self._table = PieceTable(pieces, hide(pieces, self.special_ids), leading, EACH_BYTE, joined)

    def encode(
        self, text: str, add_special_tokens: bool = True, *, allow_special: bool = False, escape: str = ""
    ) -> list[int]:
        """See `Tokenizer.encode`.

        Text that follows a special token is encoded as a continuation; with `legacy` in tokenizer_config.json, and
        only then, it gets the leading space of a new text.
        """
        require_text(text, "prompt")
        pattern = self._all_pattern if allow_special else self._ordinary_pattern
        ids: list[int] = list(self._prefix) if add_special_tokens else []
        start = 0
        swallow = False  # the token before takes the blanks that follow it
        for match in pattern.finditer(text):
            entry = self._added.get(match[0])
            segment = text[start : match.start()]
            if entry is not None and entry.lstrip:
                segment = segment.rstrip()
            ids += self._encode_segment(segment.lstrip() if swallow else segment, start == 0, escape)
            ids.append(self._get_id(match[0]))
            start, swallow = match.end(), entry is not None and entry.rstrip
        segment = text[start:]
        ids += self._encode_segment(segment.lstrip() if swallow else segment, start == 0, escape)
        return ids + self._suffix if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`. Equal to sentencepiece's own for ordinary and byte pieces."""
        require_token_ids(ids)
        stream = self.new_stream(skip_special_tokens)
        return stream.push_many(ids) + stream.flush()

    def new_stream(
        self,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        spaces_between_special_tokens: bool = True,
    ) -> DetokenizerStream:
        """See `Tokenizer.new_stream`."""
        return open_stream(self._table, skip_special_tokens, prompt_ids, spaces_between_special_tokens)

    def list_token_bytes(self) -> list[bytes]:
        """See `Tokenizer.list_token_bytes`."""
        return self._table.list_bytes()

    def _encode_segment(self, segment: str, first: bool, escape: str) -> list[int]:
        """Encodes text without special tokens; `first`: it begins the prompt."""
        if escape:
            segment = segment.replace(escape, "")
        if not segment:
            return []
        model = self._at_start if first or self._legacy else self._continuing
        if self._found_pattern.search(segment) is None:
            return model.encode(segment)
        ids: list[int] = []
        start = 0
        for match in self._found_pattern.finditer(segment):  # cut in two, the model does not find it
            ids += model.encode(segment[start : match.start() + 1])
            start, model = match.start() + 1, self._continuing
        ids += model.encode(segment[start:])
        if not set(self._found_in_text.values()).isdisjoint(ids):
            token = self._found_pattern.search(segment)[0]
            raise InvalidRequestError(
                f"spells the special token {token!r}, which this tokenizer cannot keep as plain text",
                field="prompt",
                value=token,
            )
        return ids

    def _get_id(self, text: str) -> int:
        entry = self._added.get(text)
        return self.special_tokens[text] if entry is None else entry.token_id

    def _get_named_id(self, name: str) -> int | None:
        return self.special_tokens.get(self.named_tokens.get(name, ""))

    def _read_named_tokens(self, metadata: TokenizerMetadata) -> dict[str, str]:
        model = self._at_start
        own = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
        texts = {name: model.id_to_piece(token_id) for name, token_id in own.items() if token_id >= 0}
        return texts | metadata.named_tokens

    def _read_special_tokens(self, metadata: TokenizerMetadata) -> dict[str, int]:
        """Control and unknown pieces, added tokens that are special, and whatever the files name as special."""
        model = self._at_start
        ids = list(range(self._model_size))
        special = {
            model.id_to_piece(token_id): token_id
            for token_id, control, unknown in zip(ids, model.is_control(ids), model.is_unknown(ids), strict=True)
            if control or unknown
        }
        special |= {entry.text: entry.token_id for entry in metadata.added_tokens if entry.special}
        for text in [*self.named_tokens.values(), *metadata.extra_special]:
            token_id = self._added[text].token_id if text in self._added else model.piece_to_id(text)
            if text in self._added or model.id_to_piece(token_id) == text:
                special[text] = token_id
        return special


def _load(data: bytes, path: Path) -> SentencePieceProcessor:
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor()
        model.LoadFromSerializedProto(data)
    except (RuntimeError, ValueError, TypeError) as error:
        raise TokenizerError(
            f"{path} is not a sentencepiece model that the library can read ({error}); if it was truncated, copy it "
            "again; if it is a tiktoken vocabulary, use the checkpoint's tokenizer.json",
            field=path.name,
            value=str(path),
        ) from error
    return model


def _list_fields(data: bytes) -> set[int]:
    """Returns the numbers of the fields in a serialized protocol buffer; none if it ends inside one.

    A model that was cut between two fields still parses, with defaults for what is gone: it would encode wrongly.
    """
    numbers: set[int] = set()
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        kind = tag & 7
        if kind == 0:
            _, at = _read_varint(data, at)
        elif kind == 2:
            length, at = _read_varint(data, at)
            at += length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            return set()
        numbers.add(tag >> 3)
    return numbers if at == len(data) else set()


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number at a place and the place after it; past the end it reads zeros."""
    value = shift = 0
    while at < len(data) and data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, min(shift + 7, 70)
    return value | (data[at] if at < len(data) else 0) << shift, at + 1


def _read_piece_texts(model: SentencePieceProcessor, added_tokens: tuple[AddedTokenEntry, ...]) -> list[str | bytes]:
    """Returns the piece of each id; byte pieces stay `bytes`, because sentencepiece strips no space from them."""
    ids = list(range(model.get_piece_size()))
    pieces: list[str | bytes] = [
        bytes([int(text[3:5], 16)]) if is_byte else text.replace(_SPACE_MARK, " ")
        for text, is_byte in zip(model.id_to_piece(ids), model.is_byte(ids), strict=True)
    ]
    size = max([len(pieces), *(entry.token_id + 1 for entry in added_tokens)])
    pieces += [""] * (size - len(pieces))
    for entry in added_tokens:
        pieces[entry.token_id] = entry.text
    return pieces


def _probe_leading(model: SentencePieceProcessor) -> Leading:
    """Returns what decoding strips from the start: the model's normalizer decides, which the library does not show."""
    pieces = (model.id_to_piece(token_id) for token_id in range(model.get_piece_size()))
    word = next((text for text in pieces if text[0] == _SPACE_MARK and text[1:].strip(_SPACE_MARK)), None)
    if word is None or model.decode_pieces([word]).startswith(" "):
        return Leading.KEEP
    return Leading.ONE_SPACE if model.decode_pieces([_SPACE_MARK, word]).startswith(" ") else Leading.SPACES
