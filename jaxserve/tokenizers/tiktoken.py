"""Kimi's `tiktoken.model`: a rank for each token, made into a byte-level BPE of the `tokenizers` library.

Such a file lacks the expression that cuts a text before ranks are looked at. It stands in code of the repository, which
is not run, so it is here: that of Moonshot's `TikTokenTokenizer`. Other classes are refused.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

from jaxserve.errors import TokenizerError, shorten
from jaxserve.tokenizers.decoders import BYTE_CHARACTERS
from jaxserve.tokenizers.files import (
    MAX_TOKENIZER_BYTES,
    MAX_VOCAB_SIZE,
    AddedTokenEntry,
    TokenizerMetadata,
    read_bytes,
    read_metadata,
)
from jaxserve.tokenizers.huggingface import HuggingFaceTokenizer, add_token, wrap_library

_CLASS = "TikTokenTokenizer"
_NUM_RESERVED = 256  # ids of special tokens behind those of the file, named or not
_MAX_TOKEN_BYTES = 1024

# A word is capitals, then small letters, of any script but Han; one of both may be missing.
_CAPITALS, _SMALL = (rf"[\p{{{kind}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kind in (r"Lu}\p{Lt", "Ll"))
_BEFORE, _ENDINGS = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_BEFORE}{_CAPITALS}*{_SMALL}+{_ENDINGS}",
        f"{_BEFORE}{_CAPITALS}+{_SMALL}*{_ENDINGS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def load_tiktoken(path: Path) -> HuggingFaceTokenizer:
    """Returns the tokenizer of a `tiktoken.model` and the JSON files beside it.

    Raises:
        TokenizerError: a file is missing, truncated or malformed, or the tokenizer is not of Kimi's class.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    metadata = read_metadata(path.parent)
    if metadata.tokenizer_class != _CLASS:
        message = (
            f"{path} goes with a tokenizer_config.json whose tokenizer_class is {_CLASS}, not "
            f"{shorten(metadata.tokenizer_class)}; use the checkpoint's tokenizer.json"
        )
        raise TokenizerError(message, field="tokenizer_class", value=metadata.tokenizer_class)
    ranks = _read_ranks(path)
    vocab = {_spell(token): rank for token, rank in ranks.items()}
    library = Library(models.BPE(vocab, _list_merges(ranks), ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    for entry in _list_special(metadata, len(ranks)):
        add_token(library, entry)
    return wrap_library(library, {}, path)


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Returns the rank of each token, counted from 0 without a gap."""
    data = read_bytes(path, MAX_TOKENIZER_BYTES)
    if data is None:
        raise TokenizerError(f"{path} does not exist", field=path.name, value=str(path))
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(filter(None, data.splitlines()), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise _refuse(path, f"line {number} is not a token in base64 and its rank", line) from error
        if len(ranks) != number or int(rank) != number - 1 or len(token) > _MAX_TOKEN_BYTES:
            raise _refuse(path, f"line {number} has a doubled token, another rank than {number - 1}, or is long", line)
        if number > MAX_VOCAB_SIZE - _NUM_RESERVED:
            raise _refuse(path, f"it has more than {MAX_VOCAB_SIZE - _NUM_RESERVED} tokens", number)
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise _refuse(path, "a byte has no token; the file may be truncated", missing)
    return ranks


def _refuse(path: Path, reason: str, value: object) -> TokenizerError:
    return TokenizerError(f"{path} is not a tiktoken vocabulary: {reason}", field=path.name, value=value)


def _list_merges(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Returns all pairs of tokens that are a token together, by its rank: these are what tiktoken joins."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(_spell(left), _spell(right)) for left, right in pairs]
    return merges


def _spell(token: bytes) -> str:
    """Returns a token in the alphabet of byte-level BPE."""
    return "".join(BYTE_CHARACTERS[byte] for byte in token)


def _list_special(metadata: TokenizerMetadata, first: int) -> list[AddedTokenEntry]:
    """Returns the tokens behind those of the file."""
    named = {entry.token_id: entry for entry in metadata.added_tokens}
    ids = range(first, first + _NUM_RESERVED)
    return [named.get(each, AddedTokenEntry(each, f"<|reserved_token_{each}|>", special=True)) for each in ids]
