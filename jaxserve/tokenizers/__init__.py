"""Text to token ids and back, incremental detokenizing, and chat templates.

Host-only: nothing here imports jax. The tokenizer libraries and jinja2 are imported when they are first needed, so that
this package costs nothing to import.
"""

from __future__ import annotations

from jaxserve.tokenizers.load import load_tokenizer
from jaxserve.tokenizers.stream import DetokenizerStream
from jaxserve.tokenizers.tokenizer import Tokenizer, TokenNamer

__all__ = ["DetokenizerStream", "TokenNamer", "Tokenizer", "load_tokenizer"]
