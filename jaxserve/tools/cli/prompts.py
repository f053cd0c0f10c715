"""Separates the model from the prompts in a command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from jaxserve.errors import ConfigError
from jaxserve.gguf_file import is_gguf
from jaxserve.model_options import DEMO_MODEL
from jaxserve.presets import SMOL_MODEL, list_presets

RULE = (
    "The first word is the model if it is one (demo, smol, a preset, a checkpoint's directory, a GGUF file, or of the "
    "form owner/name) "
    "and a prompt follows it, as a word or on standard input. Else all words are prompts for --model."
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PATH = re.compile(r"(/|~/|\.\.?/)[^/\s]\S*")


def looks_like_model(word: str) -> bool:
    """Whether a word may be a model: by its name, its form, or a checkpoint at that path."""
    if word in (DEMO_MODEL, SMOL_MODEL, *list_presets()) or is_gguf(word):
        return True
    if _HUB_ID.fullmatch(word) or _PATH.fullmatch(word):
        return True
    try:
        return (Path(word) / "config.json").is_file()
    except OSError:  # too long for a name, as prompts may be, or in a folder that may not be read
        return False


def split_words(words: Sequence[str], model: str | None, stdin: TextIO) -> tuple[str | None, list[str]]:
    """Returns the model, if the words name one, and the prompts.

    Standard input is read only if no prompt is among the words, and from a terminal only if there are no words at all.

    Args:
        words: the arguments of `generate` other than flags.
        model: the value of --model; if given, all words are prompts.

    Raises:
        ConfigError: there is no prompt.
    """
    may_name = bool(words) and model is None and looks_like_model(words[0])
    if may_name and len(words) > 1:
        return words[0], list(words[1:])
    if words and not (may_name and not stdin.isatty()):
        return None, list(words)
    prompts = [line.rstrip("\n") for line in stdin if line.strip()]
    if words:
        return (words[0], prompts) if prompts else (None, list(words))
    if not prompts:
        raise ConfigError(
            "none is given; write one after the flags, or one per line on standard input", field="prompts"
        )
    return None, prompts
