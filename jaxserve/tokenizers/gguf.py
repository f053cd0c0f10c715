"""The tokenizer in a GGUF file's metadata, for the libraries that other checkpoints use."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.errors import TokenizerError, WeightsError, shorten
from jaxserve.gguf_file import CONTROL, list_end_tokens, open_gguf
from jaxserve.tokenizers.metadata import AddedTokenEntry, TokenizerMetadata

if TYPE_CHECKING:
    import tokenizers

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _USER_DEFINED, _BYTE = 1, 2, 4, 6  # kinds of tokens, as sentencepiece numbers them
_KINDS = frozenset(range(1, 7))
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "mask": "mask_token"}

# Where a text is cut before pairs are merged.
_DIGITS = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = (
    rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN, _GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}|{digits}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
    for end, digits in (("", r"\p{N}"), (f"{_ENGLISH}?", r"\p{N}{1,3}"))
)

_CASED, _HAN = r"[\p{Lu}\p{Ll}\p{Lt}]", r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]"
_MARKS = r"[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?{_CASED}+", rf"\s?{_MARKS}+", r"\s+$", rf"{_HAN}+", _DIGITS)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _END,
)


@dataclass(frozen=True)
class _Cut:
    """How one kind of byte-level BPE cuts texts. `whole`: a piece that is a token is not merged of parts."""

    patterns: tuple[str, ...]
    whole: bool = False
    composes: bool = False  # NFC comes first
    adds_bos: bool = False  # unless a key says otherwise


_CUTS = {
    **dict.fromkeys(("gpt-2", "olmo"), _Cut((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _Cut((_DIGITS, _GPT2))),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), _Cut((_LLAMA3,), whole=True, adds_bos=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _Cut((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Cut((_QWEN2,), composes=True)),
    "tekken": _Cut((_TEKKEN,), whole=True, adds_bos=True),
    "gpt-4o": _Cut((_GPT4O,)),
    "deepseek-llm": _Cut(_DEEPSEEK_LLM),
    "deepseek-v3": _Cut(_DEEPSEEK_V3),
}


def write_gguf_tokenizer(path: Path, folder: Path) -> None:
    """Writes the tokenizer of a GGUF file to a folder, as other checkpoints have it; errors as `read_vocabulary`."""
    vocabulary, metadata = read_vocabulary(path), read_gguf_metadata(path)
    config: dict[str, Any] = {**metadata.named_tokens, "chat_template": metadata.chat_template, "legacy": False}
    if vocabulary.model == "gpt2":
        make_bpe(vocabulary, metadata).save(str(folder / "tokenizer.json"))
        config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    else:
        (folder / "tokenizer.model").write_bytes(make_sentencepiece(vocabulary, metadata))
        config |= {"tokenizer_class": "LlamaTokenizer", "add_bos_token": metadata.add_bos}
        config |= {"add_eos_token": metadata.add_eos}
    generation = {"eos_token_id": list(metadata.eos_token_ids)}
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        text = json.dumps({key: value for key, value in content.items() if value is not None}, indent=2)
        (folder / name).write_text(f"{text}\n", encoding="utf-8")


def read_gguf_metadata(path: Path) -> TokenizerMetadata:
    """Returns what the files beside a tokenizer say of other checkpoints; errors as `read_vocabulary`."""
    vocabulary = read_vocabulary(path)
    keys, tokens = vocabulary.keys, vocabulary.tokens
    named = {}
    for key, name in _NAMES.items():
        token_id = keys.get(f"{_PREFIX}{key}_token_id")
        if token_id is not None:
            if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
                message = f"must be the id of one of {len(tokens)} tokens, not {shorten(token_id)}"
                raise TokenizerError(message, field=f"{_PREFIX}{key}_token_id", value=token_id)
            named[name] = tokens[token_id]
    template = keys.get("tokenizer.chat_template")
    is_llama = vocabulary.model == "llama"
    adds_bos = is_llama or vocabulary.cut.adds_bos
    return TokenizerMetadata(
        named_tokens=named,
        extra_special=(),
        added_tokens=tuple(_list_added(vocabulary)),
        tokenizer_class=None,
        add_bos=keys.get(f"{_PREFIX}add_bos_token", adds_bos) is True,
        add_eos=keys.get(f"{_PREFIX}add_eos_token") is True,
        legacy=False,
        chat_template=template if isinstance(template, str) else None,
        eos_token_ids=read_gguf_end_tokens(path),
        has_types=False,
    )


def read_gguf_end_tokens(path: Path) -> tuple[int, ...]:
    """Returns the ids of the tokens that end an answer; errors as `read_vocabulary`."""
    return tuple(list_end_tokens(_open(path)))


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id with their kinds; `keys` are all of the file."""

    path: Path
    model: str
    tokens: Sequence[str]
    kinds: Sequence[int]
    cut: _Cut
    keys: Mapping[str, Any]


def _open(path: Path) -> Mapping[str, Any]:
    try:
        return open_gguf(path).metadata
    except WeightsError as error:
        raise TokenizerError(str(error), field=str(path)) from error


def read_vocabulary(path: Path) -> Vocabulary:
    """Returns the vocabulary of a GGUF file.

    Raises:
        TokenizerError: the file is malformed, or has a kind of tokenizer that is not read; `field` is the key.
    """
    keys = _open(path)
    model, pre = keys.get(f"{_PREFIX}model"), keys.get(f"{_PREFIX}pre", "default")
    if model not in ("gpt2", "llama"):
        message = f"{path}: {shorten(model)} is not read; known are gpt2 (BPE of bytes) and llama (sentencepiece)"
        raise TokenizerError(message, field=f"{_PREFIX}model", value=model)
    if model == "gpt2" and pre not in _CUTS:
        message = f"{path}: {shorten(pre)} is not read; known are {', '.join(_CUTS)}"
        raise TokenizerError(f"{message}. Give another tokenizer's folder", field=f"{_PREFIX}pre", value=pre)
    tokens = _read_list(keys, "tokens", str, path)
    kinds = _read_list(keys, "token_type", int, path) if f"{_PREFIX}token_type" in keys else [_NORMAL] * len(tokens)
    for name, other in (("token_type", kinds), ("scores", keys.get(f"{_PREFIX}scores", tokens))):
        if len(other) != len(tokens):
            message = f"{path}: has {len(other)} items for {len(tokens)} tokens"
            raise TokenizerError(message, field=f"{_PREFIX}{name}")
    return Vocabulary(path, str(model), tokens, kinds, _CUTS.get(str(pre), _Cut(())), keys)


def _read_list(keys: Mapping[str, Any], name: str, kind: type, path: Path) -> list[Any]:
    found = keys.get(f"{_PREFIX}{name}")
    if not isinstance(found, list) or not found or not isinstance(found[0], kind):  # items of an array are of one type
        message = f"{path}: must be a list of {'texts' if kind is str else 'numbers'}, not {shorten(found)}"
        raise TokenizerError(message, field=f"{_PREFIX}{name}")
    return found


def _list_added(vocabulary: Vocabulary) -> Iterator[AddedTokenEntry]:
    """Yields the tokens that a BPE finds in texts before anything else; sentencepiece finds its own."""
    pairs = zip(vocabulary.tokens, vocabulary.kinds, strict=True) if vocabulary.model == "gpt2" else ()
    for index, (text, kind) in enumerate(pairs):
        if text and kind in (CONTROL, _USER_DEFINED):
            yield AddedTokenEntry(index, text, special=kind == CONTROL)


def make_bpe(vocabulary: Vocabulary, metadata: TokenizerMetadata) -> tokenizers.Tokenizer:
    """Returns a byte-level BPE of the `tokenizers` library."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    cut, path = vocabulary.cut, vocabulary.path
    merges = [tuple(pair.split(" ", 1)) for pair in _read_list(vocabulary.keys, "merges", str, path)]
    vocab = {text: index for index, text in enumerate(vocabulary.tokens)}
    if len(vocab) != len(vocabulary.tokens):
        raise TokenizerError(f"{path}: holds a token twice", field=f"{_PREFIX}tokens")
    odd = next((pair for pair in merges if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys()), None)
    if odd is not None:
        raise TokenizerError(f"{path}: merges {shorten(' '.join(odd))}, which are not tokens", field=f"{_PREFIX}merges")
    library = Tokenizer(models.BPE(vocab, merges, ignore_merges=cut.whole))
    if cut.composes:
        library.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    adds_space = vocabulary.keys.get(f"{_PREFIX}add_space_prefix") is True
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=adds_space, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of])
    library.decoder = decoders.ByteLevel()
    for entry in metadata.added_tokens:
        token = AddedToken(entry.text, special=entry.special, normalized=False)
        (library.add_special_tokens if entry.special else library.add_tokens)([token])
    _add_affixes(library, metadata, vocab)
    return library


def _add_affixes(library: tokenizers.Tokenizer, metadata: TokenizerMetadata, vocab: Mapping[str, int]) -> None:
    """Lets the library put the tokens around a text that the flags ask for."""
    from tokenizers import processors

    bos, eos = (
        metadata.named_tokens.get(name) if is_added else None
        for name, is_added in (("bos_token", metadata.add_bos), ("eos_token", metadata.add_eos))
    )
    if bos is not None or eos is not None:
        single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
        special = [(text, vocab[text]) for text in dict.fromkeys(text for text in (bos, eos) if text)]
        library.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def make_sentencepiece(vocabulary: Vocabulary, metadata: TokenizerMetadata) -> bytes:
    """Returns the serialized sentencepiece model of a vocabulary with scores: a BPE that falls back to bytes."""
    keys, kinds = vocabulary.keys, vocabulary.kinds
    scores = _read_list(keys, "scores", float, vocabulary.path)
    if not set(kinds) <= _KINDS or kinds.count(_UNKNOWN) != 1:
        message = "must be kinds from 1 to 6, of which one token is unknown (2)"
        raise TokenizerError(f"{vocabulary.path}: {message}", field=f"{_PREFIX}token_type")
    pieces = (
        _bytes(1, _bytes(1, text.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", score) + _number(3, kind))
        for text, score, kind in zip(vocabulary.tokens, scores, kinds, strict=True)
    )
    trainer = _number(3, 2) + _number(35, _BYTE in kinds)  # model_type BPE, byte_fallback
    trainer += _bytes(45, vocabulary.tokens[kinds.index(_UNKNOWN)].encode())
    for field, name in ((46, "bos_token"), (47, "eos_token")):
        if name in metadata.named_tokens:
            trainer += _bytes(field, metadata.named_tokens[name].encode())
    normalizer = _bytes(1, b"identity") + _number(3, keys.get(f"{_PREFIX}add_space_prefix") is not False)
    normalizer += _number(4, keys.get(f"{_PREFIX}remove_extra_whitespaces") is True)
    return b"".join(pieces) + _bytes(2, trainer) + _bytes(3, normalizer)


def _bytes(field: int, value: bytes) -> bytes:
    """Returns a field of a protocol buffer with bytes, a text or a message."""
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
