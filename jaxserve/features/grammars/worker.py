"""The process that checks grammars before they are compiled: a hostile one costs this process and nothing else.

It is run by `workers/` and needs the standard library and llguidance only. A job is {"source": ...}; its reply is
{"error": null} or {"error": "why"}.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

_NUM_WALKS = 4
_WALK_TOKENS = 24
_MAX_STEP_S = 0.25  # usual masks take less than 1 ms, the first ones of a large grammar tens of ms


def prepare(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns the function that answers jobs, for one vocabulary and its limits."""
    vocabulary, limits = Vocabulary(options), options["limits"]
    check("start: /[a-z]*/", vocabulary, limits)  # one-time allocations must not count as the first job's
    return lambda job: {"error": check(job["source"], vocabulary, limits)}


class Vocabulary:
    """A vocabulary for llguidance; forced text becomes the longest matching tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, options: dict[str, Any]) -> None:
        from llguidance import LLTokenizer

        self.tokens = [token.encode("latin-1") for token in options["tokens"]]
        self.special_token_ids = options["special_token_ids"]
        self.eos_token_id = options["eos_token_ids"][0]
        self.not_eos = ~sum(1 << token_id for token_id in options["eos_token_ids"])
        self.special = sum(1 << token_id for token_id in options["special_token_ids"]) & self.not_eos
        self.native = LLTokenizer(self, eos_token=options["eos_token_ids"])

    def __call__(self, text: str) -> list[int]:
        return self.native.greedy_tokenize(text)


def check(source: str, vocabulary: Vocabulary, limits: dict[str, Any]) -> str | None:
    """Compiles a grammar and takes a few random walks through it; returns what is wrong with it, or None.

    Grammars that compile can still be slow or hit a limit at the first tokens of a sequence. Time is this process's CPU
    time, which a busy host does not stretch.
    """
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary.native, source, log_level=0, limits=LLParserLimits(**limits))
    if matcher.is_error():
        return matcher.get_error()
    chance = random.Random(0)
    for _ in range(_NUM_WALKS):
        walker = matcher.deep_copy()
        for _ in range(_WALK_TOKENS):
            start = time.process_time()
            mask = walker.compute_bitmask()
            if not walker.is_stopped():
                allowed = int.from_bytes(mask, "little") & vocabulary.not_eos
                special = pick_bit(allowed & vocabulary.special, chance)
                if special is not None and walker.validate_tokens([special]) == 0:
                    return "a negation matches special tokens too; intersect it with /(?s:.*)/"
                token_id = pick_bit(allowed, chance)
                if token_id is None or walker.try_consume_tokens([token_id]) == 0:
                    break
            if time.process_time() - start > _MAX_STEP_S:
                return f"takes more than {_MAX_STEP_S:g} s for a token"
            if walker.is_stopped():
                break
        if walker.is_error():
            return walker.get_error()
    return None


def pick_bit(bits: int, chance: random.Random) -> int | None:
    """Returns the index of a random set bit, None if no bit is set."""
    if bits == 0:
        return None
    size = bits.bit_length()
    at = chance.randrange(size)
    above = bits >> at  # not 0: the highest bit is set. The lowest one of these is taken
    return at + (above & -above).bit_length() - 1
