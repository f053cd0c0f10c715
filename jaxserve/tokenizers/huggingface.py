"""`tokenizer.json` files, through the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from jaxserve.errors import InvalidRequestError, JaxServeError, TokenizerError, is_failure, shorten
from jaxserve.tokenizers.decoders import make_piece_table
from jaxserve.tokenizers.files import (
    MAX_TOKENIZER_BYTES,
    MAX_VOCAB_SIZE,
    AddedTokenEntry,
    TokenizerMetadata,
    parse_json,
    read_metadata,
    read_text,
)
from jaxserve.tokenizers.stream import DetokenizerStream, PieceTable, open_stream
from jaxserve.tokenizers.tokenizer import PairForm, compile_special_pattern
from jaxserve.tokenizers.transformers_names import TransformersTokenizer

if TYPE_CHECKING:
    import tokenizers

# transformers' classes that obey add_bos_token and add_eos_token. For others, and without those keys, the
# post-processor of tokenizer.json decides.
_FLAG_CLASSES = frozenset({"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer"})


def load_huggingface(path: Path, *, lowercases: bool = False) -> HuggingFaceTokenizer:
    """Returns the tokenizer of a `tokenizer.json` and the JSON files beside it; `lowercases` as for `load_tokenizer`.

    Raises:
        TokenizerError: a file is missing, truncated or malformed, or the files contradict each other.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import normalizers

    text = read_text(path, MAX_TOKENIZER_BYTES)
    if text is None:
        raise TokenizerError(f"{path} does not exist", field=path.name, value=str(path))
    content = parse_json(text, path)

    def refuse(reason: str) -> TokenizerError:
        message = (
            f"{path} is not a tokenizer that `tokenizers` can use ({reason}); save it again with the newest "
            "transformers, or upgrade the `tokenizers` package"
        )
        return TokenizerError(message, field=path.name, value=str(path))

    with _explain_failures(refuse):
        library = Library.from_str(text)
        library.no_truncation()  # settings left from training, which transformers ignores as well
        library.no_padding()
        if lowercases:
            own = [] if library.normalizer is None else [library.normalizer]
            library.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        return wrap_library(library, content, path)


def wrap_library(library: tokenizers.Tokenizer, content: dict[str, Any], path: Path) -> HuggingFaceTokenizer:
    """Returns the tokenizer of a library's, with what the files beside `path` say; `content` is its tokenizer.json.

    Raises TokenizerError if files contradict each other.
    """
    metadata = read_metadata(path.parent)
    _complete_added_tokens(library, content, metadata, path)
    return HuggingFaceTokenizer(library, metadata, path)


@contextmanager
def _explain_failures(make_error: Callable[[str], JaxServeError]) -> Iterator[None]:
    """Turns the bare exceptions and panics of `tokenizers` into errors made by `make_error`."""
    try:
        yield
    except JaxServeError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise make_error(f"{type(error).__name__}: {error}") from error


def _refuse_text(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"is a text on which the `tokenizers` library fails ({shorten(reason)})", field="prompt")


def _refuse_ids(reason: str) -> InvalidRequestError:
    message = f"are ids on which the `tokenizers` library fails ({shorten(reason)})"
    return InvalidRequestError(message, field="token_ids")


@final
class HuggingFaceTokenizer(TransformersTokenizer):
    """A `Tokenizer` over the `tokenizers` library. Ids are those of transformers' fast tokenizer for the same files.

    An escaped special token splits a text: blanks that adjacent special tokens would absorb (`rstrip`) then stay.

    Decoded text is the library's, with two exceptions. The library shows every byte of a run of byte pieces (`<0xE2>`)
    as U+FFFD if the run is not UTF-8; here the complete characters in it are shown, because they may already have been
    streamed. And where a decoder replaces a character by a space and then strips the first space, bytes at the start of
    a text that spell this character keep their space.
    """

    def __init__(self, library: tokenizers.Tokenizer, metadata: TokenizerMetadata, path: Path) -> None:
        self._with_special = library
        self._plain = _copy_without_special(library)
        self.vocab_size = _get_vocab_size(library, path)
        self.special_tokens = _read_special_tokens(library, metadata)
        self.special_ids = frozenset(self.special_tokens.values())
        self.special_pattern = compile_special_pattern(self.special_tokens)
        self.chat_template = metadata.chat_template
        self._prefix, self._suffix = _read_affixes(library, metadata, path)
        self._pair = _read_pair_form(library, has_types=metadata.has_types)
        self.named_tokens = dict(metadata.named_tokens)
        if "bos_token" not in self.named_tokens and len(self._prefix) == 1:  # a tokenizer.json without the other files
            self.named_tokens["bos_token"] = library.id_to_token(self._prefix[0])
        self.bos_token_id = self._find_named("bos_token")
        eos = self._find_named("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *metadata.eos_token_ids]))
        self._never_from_text = self.special_ids - {self._find_named("unk_token")}
        self._decoder = json.loads(library.decoder.__getstate__()) if library.decoder is not None else None
        texts = map(library.id_to_token, range(self.vocab_size))
        added = {token_id: token.content for token_id, token in library.get_added_tokens_decoder().items()}
        added |= {token_id: text for text, token_id in self.special_tokens.items()}
        self._table = make_piece_table(texts, self.special_ids, added, self._decoder)

    def _encode(self, text: str, allow_special: bool, escape: str) -> list[int]:
        with _explain_failures(_refuse_text):
            if not allow_special:
                return self._encode_plain(text)
            if escape and escape in text:
                return self._encode_escaped(text, escape)
            return self._with_special.encode(text, add_special_tokens=False).ids

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if self._table is not None:
            return super()._decode(ids, skip_special_tokens)
        with _explain_failures(_refuse_ids):
            known = [token_id for token_id in ids if token_id < self.vocab_size]
            return self._with_special.decode(known, skip_special_tokens)

    def new_stream(
        self,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        spaces_between_special_tokens: bool = True,
    ) -> DetokenizerStream:
        """See `Tokenizer.new_stream`."""
        return open_stream(self._require_table(), skip_special_tokens, prompt_ids, spaces_between_special_tokens)

    def decode_token(self, token_id: int) -> str:
        """See `Tokenizer.decode_token`."""
        return self.decode([token_id]) if self._table is None else self._table.show(token_id)

    def list_token_bytes(self) -> list[bytes]:
        """See `Tokenizer.list_token_bytes`."""
        return self._require_table().list_bytes()

    def _require_table(self) -> PieceTable:
        if self._table is None:
            raise TokenizerError(
                "text cannot be streamed through this decoder; ByteLevel, Metaspace and Replace/ByteFallback/Fuse/"
                "Strip can. Use detokenize=False",
                field="decoder",
                value=self._decoder,
            )
        return self._table

    def _encode_plain(self, text: str) -> list[int]:
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if not self._never_from_text.isdisjoint(ids):  # the vocabulary holds special texts as plain pieces
            found = next(token_id for token_id in ids if token_id in self._never_from_text)
            token = self._plain.id_to_token(found)
            raise InvalidRequestError(
                f"spells the special token {token!r}, which this tokenizer cannot keep as plain text",
                field="prompt",
                value=token,
            )
        return ids

    def _encode_escaped(self, text: str, escape: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self.special_pattern.finditer(text):
            ids += self._encode_plain(text[start : match.start()].replace(escape, ""))
            ids.append(self.special_tokens[match[0]])
            start = match.end()
        return ids + self._encode_plain(text[start:].replace(escape, ""))

    def get_vocab(self) -> dict[str, int]:
        """See `TransformersTokenizer.get_vocab`."""
        return self._with_special.get_vocab(with_added_tokens=True)

    def _find_id(self, token: str) -> int | None:
        return self._with_special.token_to_id(token)

    def _find_token(self, token_id: int) -> str | None:
        return self._with_special.id_to_token(token_id) if token_id < self.vocab_size else None


def _complete_added_tokens(
    library: tokenizers.Tokenizer, content: dict[str, Any], metadata: TokenizerMetadata, path: Path
) -> None:
    """Adds the tokens that only the other files name and marks named tokens as special, as transformers does."""
    from tokenizers import AddedToken

    for entry in metadata.added_tokens:
        if library.token_to_id(entry.text) is None:
            add_token(library, entry)
    listed = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    for text, token_id in {**listed, **{e.text: e.token_id for e in metadata.added_tokens}}.items():
        actual = library.token_to_id(text)
        if actual != token_id:
            raise TokenizerError(
                f"{path} and the files beside it give the added token {text!r} the id {token_id}, but its place in the "
                f"vocabulary gives it {actual}; save the tokenizer again with transformers",
                field=path.name,
                value=token_id,
            )
    known = library.get_added_tokens_decoder()
    for text in dict.fromkeys([*metadata.named_tokens.values(), *metadata.extra_special]):
        token_id = library.token_to_id(text)
        if token_id is None:  # a name without a token, such as a default pad_token
            continue
        token = known.get(token_id) or AddedToken(text, normalized=False)
        if not token.special:
            token.special = True
            library.add_special_tokens([token])


def add_token(library: tokenizers.Tokenizer, entry: AddedTokenEntry) -> None:
    """Adds a token to a library's tokenizer; its id is the next one."""
    from tokenizers import AddedToken

    token = AddedToken(
        entry.text,
        special=entry.special,
        lstrip=entry.lstrip,
        rstrip=entry.rstrip,
        normalized=entry.normalized,
        single_word=entry.single_word,
    )
    (library.add_special_tokens if entry.special else library.add_tokens)([token])


def _copy_without_special(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Returns a tokenizer over the same vocabulary (shared, not copied) to which special tokens are plain text.

    The library's switch for that is state of the tokenizer: threads that encode prompts and chats at the same time
    would race for it.
    """
    from tokenizers import Tokenizer as Library

    plain = Library(library.model)
    plain.normalizer = library.normalizer
    plain.pre_tokenizer = library.pre_tokenizer
    for _, token in sorted(library.get_added_tokens_decoder().items()):
        (plain.add_special_tokens if token.special else plain.add_tokens)([token])
    plain.encode_special_tokens = True
    return plain


def _get_vocab_size(library: tokenizers.Tokenizer, path: Path) -> int:
    largest = max(library.get_vocab(with_added_tokens=True).values(), default=-1)
    if not 0 <= largest < MAX_VOCAB_SIZE:
        raise TokenizerError(
            f"{path}: the largest token id is {largest}; 0 to {MAX_VOCAB_SIZE - 1} are possible",
            field=path.name,
            value=largest,
        )
    return largest + 1


def _read_special_tokens(library: tokenizers.Tokenizer, metadata: TokenizerMetadata) -> dict[str, int]:
    special = {
        token.content: token_id
        for token_id, token in sorted(library.get_added_tokens_decoder().items())
        if token.special
    }
    for text in [*metadata.named_tokens.values(), *metadata.extra_special]:
        token_id = library.token_to_id(text)
        if token_id is not None:
            special[text] = token_id
    return special


def _read_affixes(
    library: tokenizers.Tokenizer, metadata: TokenizerMetadata, path: Path
) -> tuple[list[int], list[int]]:
    """Returns the ids that `add_special_tokens` puts before and after a text."""
    encoding = library.encode("a", add_special_tokens=True)
    from_text = [at for at, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
    first, last = (from_text[0], from_text[-1]) if from_text else (len(encoding.ids), len(encoding.ids))
    prefix, suffix = encoding.ids[:first], encoding.ids[last + 1 :]
    if (metadata.tokenizer_class or "").removesuffix("Fast") not in _FLAG_CLASSES:
        return prefix, suffix
    if metadata.add_bos is not None:
        prefix = _find_named(library, metadata, "bos_token", path) if metadata.add_bos else []
    if metadata.add_eos is not None:
        suffix = _find_named(library, metadata, "eos_token", path) if metadata.add_eos else []
    return prefix, suffix


def _read_pair_form(library: tokenizers.Tokenizer, *, has_types: bool) -> PairForm | None:
    """Returns what the post-processor makes of two texts; None if it does not leave each whole, in their order."""
    encoding = library.encode("a", "a", add_special_tokens=True)
    parts = list(zip(encoding.sequence_ids, encoding.ids, encoding.type_ids, strict=True))
    parts = parts if has_types else [(*each[:2], 0) for each in parts]
    spans = [[at for at, (sequence, *_) in enumerate(parts) if sequence == index] for index in (0, 1)]
    if not all(span and span == list(range(span[0], span[-1] + 1)) for span in spans) or spans[0][-1] > spans[1][0]:
        return None
    (first, *_), (second, *_) = spans
    around = parts[:first], parts[spans[0][-1] + 1 : second], parts[spans[1][-1] + 1 :]
    ids, types = (tuple(tuple(part[which] for part in each) for each in around) for which in (1, 2))
    return PairForm(ids, types, (parts[first][2], parts[second][2]))  # type: ignore[arg-type]


def _find_named(library: tokenizers.Tokenizer, metadata: TokenizerMetadata, name: str, path: Path) -> list[int]:
    text = metadata.named_tokens.get(name)
    if text is None:  # transformers adds nothing then
        return []
    token_id = library.token_to_id(text)
    if token_id is None:
        raise TokenizerError(
            f"tokenizer_config.json asks for {name} {text!r}, which {path} does not hold", field=name, value=text
        )
    return [token_id]
