"""sentencepiece `.model` files, with the added tokens and options in the JSON files beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.tokenizers.decoders import hide
from jaxserve.tokenizers.files import (
    MAX_TOKENIZER_BYTES,
    AddedTokenEntry,
    TokenizerMetadata,
    read_bytes,
    read_metadata,
)
from jaxserve.tokenizers.stream import (
    EACH_BYTE,
    DetokenizerStream,
    PieceTable,
    join_added,
    list_openings,
    open_stream,
    trim_space,
)
from jaxserve.tokenizers.tokenizer import compile_special_pattern
from jaxserve.tokenizers.transformers_names import TransformersTokenizer

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

_SPACE_MARK = "\u2581"
# A ModelProto that holds only normalizer_spec { add_dummy_prefix: false }. Appended to a model it is merged into it.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
_MODEL_FIELDS = {1: "pieces", 2: "trainer_spec", 3: "normalizer_spec"}


def load_sentencepiece(path: Path) -> SentencePieceTokenizer:
    """Returns the tokenizer of a `.model` file and the JSON files beside it.

    Raises:
        TokenizerError: a file is missing, truncated or malformed.
    """
    data = read_bytes(path, MAX_TOKENIZER_BYTES)
    if data is None:
        raise TokenizerError(f"{path} does not exist", field=path.name, value=str(path))
    missing = [name for number, name in _MODEL_FIELDS.items() if number not in _list_fields(data)]
    if missing:
        raise TokenizerError(
            f"{path} is not a complete sentencepiece model (no {missing[0]}): if it was truncated, copy it again; if "
            "it is a tiktoken vocabulary, use the checkpoint's tokenizer.json",
            field=path.name,
            value=str(path),
        )
    return SentencePieceTokenizer(data, read_metadata(path.parent), path)


@final
class SentencePieceTokenizer(TransformersTokenizer):
    """A `Tokenizer` over the sentencepiece library. Adds BOS unless `add_bos_token` is false, as Llama 2 does.

    Text after a special token is encoded as a continuation, or with `legacy` in tokenizer_config.json as a new text,
    with a leading space. Decoded text equals sentencepiece's own for ordinary and byte pieces.
    """

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
        self.special_pattern = compile_special_pattern(self.special_tokens)
        self._all_pattern = compile_special_pattern([*self.special_tokens, *self._added])
        self._ordinary_pattern = compile_special_pattern(set(self._added) - set(self.special_tokens))
        self._found_in_text = {  # special tokens that the model finds in plain text
            text: token_id
            for text, token_id in self.special_tokens.items()
            if token_id < self._model_size and self._continuing.encode(text) == [token_id]
        }
        self._found_pattern = compile_special_pattern(self._found_in_text)
        self.bos_token_id = self._find_named("bos_token")
        eos = self._find_named("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *metadata.eos_token_ids]))
        add_bos = metadata.add_bos is not False and self.bos_token_id is not None
        self._prefix = [self.bos_token_id] if add_bos else []
        self._suffix = [eos] if metadata.add_eos and eos is not None else []
        self.chat_template = metadata.chat_template
        added = {entry.token_id: entry.text for entry in metadata.added_tokens}
        added |= {token_id: text for text, token_id in self.special_tokens.items()}
        trims, repeats = _probe_start(self._at_start)
        self._table = PieceTable(
            pieces,
            hide(pieces, self.special_ids),
            EACH_BYTE,
            opening=list_openings(pieces, map(trim_space, pieces)) if trims else {},
            opens_until_text=repeats,
            joined=join_added(pieces, added),
        )

    def _encode(self, text: str, allow_special: bool, escape: str) -> list[int]:
        pattern = self._all_pattern if allow_special else self._ordinary_pattern
        ids: list[int] = []
        start = 0
        swallow = False  # the token before absorbs the blanks that follow it
        for match in pattern.finditer(text):
            entry = self._added.get(match[0])
            segment = text[start : match.start()]
            if entry is not None and entry.lstrip:
                segment = segment.rstrip()
            ids += self._encode_segment(segment.lstrip() if swallow else segment, start == 0, escape)
            ids.append(self._get_id(match[0]))
            start, swallow = match.end(), entry is not None and entry.rstrip
        segment = text[start:]
        return ids + self._encode_segment(segment.lstrip() if swallow else segment, start == 0, escape)

    def new_stream(
        self,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        spaces_between_special_tokens: bool = True,
    ) -> DetokenizerStream:
        """See `Tokenizer.new_stream`."""
        return open_stream(self._table, skip_special_tokens, prompt_ids, spaces_between_special_tokens)

    def decode_token(self, token_id: int) -> str:
        """See `Tokenizer.decode_token`."""
        return self._table.show(token_id)

    def list_token_bytes(self) -> list[bytes]:
        """See `Tokenizer.list_token_bytes`."""
        return self._table.list_bytes()

    def _encode_segment(self, segment: str, first: bool, escape: str) -> list[int]:
        """Returns the ids of text without special tokens; `first`: the text begins the prompt."""
        if escape:
            segment = segment.replace(escape, "")
        if not segment:
            return []
        model = self._at_start if first or self._legacy else self._continuing
        if self._found_pattern.search(segment) is None:
            return model.encode(segment)
        ids: list[int] = []
        start = 0
        for match in self._found_pattern.finditer(segment):  # the model does not find a text that is cut in two
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

    def get_vocab(self) -> dict[str, int]:
        """See `TransformersTokenizer.get_vocab`."""
        ids = list(range(self._model_size))
        own = dict(zip(self._at_start.id_to_piece(ids), ids, strict=True))
        return own | {text: entry.token_id for text, entry in self._added.items()}

    def _find_id(self, token: str) -> int | None:
        if (entry := self._added.get(token)) is not None:
            return entry.token_id
        token_id: int = self._at_start.piece_to_id(token)
        return token_id if self._at_start.id_to_piece(token_id) == token else None

    def _find_token(self, token_id: int) -> str | None:
        if token_id < self._model_size:
            return self._at_start.id_to_piece(token_id)
        return next((text for text, entry in self._added.items() if entry.token_id == token_id), None)

    def _read_named_tokens(self, metadata: TokenizerMetadata) -> dict[str, str]:
        model = self._at_start
        own = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
        texts = {name: model.id_to_piece(token_id) for name, token_id in own.items() if token_id >= 0}
        return texts | metadata.named_tokens

    def _read_special_tokens(self, metadata: TokenizerMetadata) -> dict[str, int]:
        """Returns control and unknown pieces, special added tokens, and all that the files name as special."""
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
    """Returns the numbers of the fields in a serialized protocol buffer; none if it ends inside a field.

    A model that was cut between two fields still parses, with defaults for the missing ones, and encodes wrongly.
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
    """Returns the number at offset `at` and the offset after it; bytes past the end read as zeros."""
    value = shift = 0
    while at < len(data) and data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, min(shift + 7, 70)
    return value | (data[at] if at < len(data) else 0) << shift, at + 1


def _read_piece_texts(model: SentencePieceProcessor, added_tokens: tuple[AddedTokenEntry, ...]) -> list[str | bytes]:
    """Returns the piece of each id; byte pieces are `bytes`, because sentencepiece strips no space from them."""
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


def _probe_start(model: SentencePieceProcessor) -> tuple[bool, bool]:
    """Returns whether decoding strips a space from the first piece, and whether it does so until a piece leaves text.

    That depends on the model's normalizer, which the library does not expose.
    """
    pieces = (model.id_to_piece(token_id) for token_id in range(model.get_piece_size()))
    word = next((text for text in pieces if text[0] == _SPACE_MARK and text[1:].strip(_SPACE_MARK)), None)
    if word is None or model.decode_pieces([word]).startswith(" "):
        return False, False
    return True, not model.decode_pieces([_SPACE_MARK, word]).startswith(" ")
