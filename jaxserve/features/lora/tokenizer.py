"""Compares a tokenizer beside an adapter with the base model's, which is the one that is used."""

from __future__ import annotations

import logging
from itertools import zip_longest
from pathlib import Path

from jaxserve.errors import TokenizerError
from jaxserve.tokenizers import Tokenizer

_FILES = "tokenizer.json", "tokenizer.model"
_log = logging.getLogger(__name__)


def check_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> None:
    """Logs a chat template that differs; TokenizerError for another vocabulary: the adapter then means other tokens."""
    file = next((found for name in _FILES if (found := folder / name).is_file()), None)
    if tokenizer is None or file is None:
        return
    from jaxserve.tokenizers.load import load_tokenizer

    own = load_tokenizer(folder)
    # One may be padded, with tokens that have no bytes.
    pairs = zip_longest(own.list_token_bytes(), tokenizer.list_token_bytes(), fillvalue=b"")
    other = next((token_id for token_id, (each, base) in enumerate(pairs) if each != base), None)
    if other is not None:
        message = f"has another vocabulary than the base model: token {other} differs"
        raise TokenizerError(message, field=str(file), value=other)
    if own.chat_template not in (None, tokenizer.chat_template):
        _log.warning("adapter in %s: its chat template is not the base model's, which is used", folder)
