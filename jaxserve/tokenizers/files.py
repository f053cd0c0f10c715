"""Reads the small files beside a tokenizer: `tokenizer_config.json` and its companions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.errors import TokenizerError, shorten
from jaxserve.files import read_regular
from jaxserve.gguf_file import is_gguf
from jaxserve.tokenizers.metadata import AddedTokenEntry, TokenizerMetadata

MAX_VOCAB_SIZE = 2**22  # tables by token id are as long as the largest id: a hostile id must not exhaust memory
MAX_TOKENIZER_BYTES = 2**27  # Gemma 3's tokenizer.json has 33 MB
_MAX_TEXT_BYTES = 2**24  # per file beside it
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_metadata(directory: Path) -> TokenizerMetadata:
    """Returns the content of the files beside a tokenizer, of which each may be absent, or what a GGUF file says.

    Raises:
        TokenizerError: a file is malformed; the message names the file or the key.
    """
    if is_gguf(directory):
        from jaxserve.tokenizers.gguf import read_gguf_metadata

        return read_gguf_metadata(directory)
    config = read_json(directory / "tokenizer_config.json") or {}
    token_map = read_json(directory / "special_tokens_map.json") or {}
    named: dict[str, str] = {}
    for name in NAMED_TOKENS:
        text = _read_string(config[name] if name in config else token_map.get(name), name)
        if text:
            named[name] = text
    return TokenizerMetadata(
        named_tokens=named,
        extra_special=_read_extra_special(config) or _read_extra_special(token_map),
        added_tokens=_read_added_tokens(directory, config),
        tokenizer_class=_read_string(config.get("tokenizer_class"), "tokenizer_class"),
        add_bos=_read_flag(config, "add_bos_token"),
        add_eos=_read_flag(config, "add_eos_token"),
        legacy=_read_flag(config, "legacy") or False,
        chat_template=_read_chat_template(directory, config),
        eos_token_ids=read_eos_token_ids(directory),
        has_types=_gives_types(config.get("model_input_names"), config.get("tokenizer_class")),
    )


def _gives_types(names: Any, tokenizer_class: Any) -> bool:
    """Whether transformers would give the model types, by the names of its inputs, or by the default of the class."""
    return "token_type_ids" in names if isinstance(names, list) else tokenizer_class != "TokenizersBackend"


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the object in a JSON file, None when there is no such file.

    Raises:
        TokenizerError: the file is unreadable, not JSON, or not an object.
    """
    text = read_text(path)
    return None if text is None else parse_json(text, path)


def read_text(path: Path, max_bytes: int = _MAX_TEXT_BYTES) -> str | None:
    """Returns a UTF-8 file's text, its line endings as newlines; None when there is no such file.

    Raises:
        TokenizerError: the file is unreadable, not regular, larger than `max_bytes`, or not UTF-8.
    """
    data = read_bytes(path, max_bytes)
    try:
        text = None if data is None else data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"cannot read {path}: {error}", field=path.name, value=str(path)) from error
    return None if text is None else text.replace("\r\n", "\n").replace("\r", "\n")


def read_bytes(path: Path, max_bytes: int) -> bytes | None:
    """Returns a file's content, None when there is no such file.

    Raises:
        TokenizerError: the file is unreadable, not regular, or larger than `max_bytes`.
    """
    try:
        return read_regular(path, max_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error.strerror}", field=path.name, value=str(path)) from error


def parse_json(text: str, path: Path) -> dict[str, Any]:
    """Returns the JSON object in `text`; errors name `path`.

    Raises:
        TokenizerError: the text is not JSON, or not an object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{path} is not valid JSON ({error}); it may be truncated: copy it again from the checkpoint",
            field=path.name,
            value=str(path),
        ) from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object", field=path.name, value=str(path))
    return value


def _read_string(value: Any, name: str) -> str | None:
    """Returns a string or None; a token may also be an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is None or isinstance(text, str):
        return text
    raise TokenizerError(f"must be a string or an object with 'content', got {shorten(value)}", field=name, value=value)


def _read_extra_special(config: dict[str, Any]) -> tuple[str, ...]:
    texts: list[str] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        entries = config.get(name) or []
        if isinstance(entries, dict):  # name to token
            entries = list(entries.values())
        if not isinstance(entries, list):
            raise TokenizerError(f"must be a list, got {shorten(entries)}", field=name, value=entries)
        texts += [text for entry in entries if (text := _read_string(entry, name))]
    return tuple(dict.fromkeys(texts))


def _read_added_tokens(directory: Path, config: dict[str, Any]) -> tuple[AddedTokenEntry, ...]:
    """Returns the tokens of `added_tokens_decoder`, else of `added_tokens.json`, where all count as special."""
    name = "added_tokens_decoder"
    decoder = config.get(name)
    if decoder is None:
        name = "added_tokens.json"
        plain = read_json(directory / name) or {}
        decoder = {token_id: {"content": text, "special": True} for text, token_id in plain.items()}
    if not isinstance(decoder, dict):
        raise TokenizerError(f"must be an object, got {shorten(decoder)}", field=name, value=decoder)
    entries: dict[int, AddedTokenEntry] = {}
    for key, value in decoder.items():
        token_id = _read_token_id(key, name)
        text = _read_string(value, name)
        if not text or token_id in entries:
            raise TokenizerError(
                f"token {token_id} needs one non-empty text, got {shorten(value)}", field=name, value=value
            )
        options = value if isinstance(value, dict) else {}
        flags = {
            flag: options.get(flag) is True for flag in ("special", "lstrip", "rstrip", "normalized", "single_word")
        }
        entries[token_id] = AddedTokenEntry(token_id, text, **flags)
    return tuple(entries[token_id] for token_id in sorted(entries))


def _read_token_id(value: Any, name: str) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 12:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_VOCAB_SIZE:
        return value
    raise TokenizerError(
        f"token ids must be integers from 0 to {MAX_VOCAB_SIZE - 1}, got {shorten(value)}", field=name, value=value
    )


def _read_flag(config: dict[str, Any], name: str) -> bool | None:
    value = config.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise TokenizerError(f"must be true or false, got {shorten(value)}", field=name, value=value)


def _read_chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """Returns `chat_template.jinja`, else the template in `tokenizer_config.json`: a string, or a list of named ones.

    Of a list, "tool_use" renders conversations with tools and "default" all others.
    """
    from_file = read_text(directory / "chat_template.jinja")
    if from_file is not None:
        return from_file
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    try:
        named = {entry["name"]: entry["template"] for entry in value}
        template, tool_use = named.get("default"), named.get("tool_use")
    except (TypeError, KeyError):
        template, tool_use = value, None
    if isinstance(template, str) and isinstance(tool_use, str):
        # each renders as if it stood alone: "+" keeps blanks at the seams, and Jinja drops one final newline
        default, tool_use = (text.removesuffix("\n") for text in (template, tool_use))
        return f"{{% if tools +%}}{tool_use}{{%+ else +%}}{default}{{%+ endif %}}"
    if template is None or (isinstance(template, str) and tool_use is None):
        return template
    raise TokenizerError(
        "must be a string or a list of objects with 'name' and 'template'", field="chat_template", value=value
    )


def read_eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Returns the EOS ids of a checkpoint: generation_config.json's, else config.json's; of a GGUF file its own.

    Raises:
        TokenizerError: a file is malformed, or `eos_token_id` holds something other than token ids.
    """
    if is_gguf(directory):
        from jaxserve.tokenizers.gguf import read_gguf_end_tokens

        return read_gguf_end_tokens(directory)
    config = read_json(directory / "generation_config.json")
    if config is None:
        config = read_json(directory / "config.json") or {}
    value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    return tuple(_read_token_id(token_id, "eos_token_id") for token_id in ids)
