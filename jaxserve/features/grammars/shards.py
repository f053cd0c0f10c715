"""One grammar compiled several times, so that several threads can compute its masks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from jaxserve.features.grammars.errors import MatcherError, shorten_message
from jaxserve.features.grammars.limits import LimitMaker
from jaxserve.features.grammars.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

_SHARD_LIMIT_S = 0.02  # a grammar that takes longer to compile has one shard
# Limits of one grammar: about 20 ms of regexes at compilation, 20 ms in a step, and 30 MiB of lexer states. Errors omit
# the parser's state, which holds the caller's text.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 8_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}


@final
class GrammarShards:
    """llguidance's matchers at the start of the output, one per shard.

    Copies of a compiled grammar share its lexer and lock, so they compute masks one after the other. A grammar that
    compiles fast is compiled once per shard.
    """

    def __init__(self, source: str, vocabulary: Vocabulary, most: int, limits: Sequence[LimitMaker] = ()) -> None:
        """Compiles the first of at most `most` shards; MatcherError if the grammar does not compile.

        Args:
            limits: each matcher has these.
        """
        self.vocabulary, self.limits = vocabulary, limits
        self._source = source
        start = time.perf_counter()
        first = self.compile()
        self.count = most if time.perf_counter() - start <= _SHARD_LIMIT_S else 1
        self._natives: list[LLMatcher | None] = [first, *[None] * (self.count - 1)]

    def fork(self, shard: int) -> LLMatcher:
        """Returns a new matcher of llguidance at the start, with the lexer of a shard."""
        native = self._natives[shard]
        if native is None:
            native = self._natives[shard] = self.compile()
        return native.deep_copy()

    def compile(self) -> LLMatcher:
        """Returns a new matcher of llguidance, with a lexer of its own.

        Raises:
            MatcherError: the grammar does not compile.
        """
        from llguidance import LLMatcher, LLParserLimits

        native = LLMatcher(self.vocabulary.native, self._source, log_level=0, limits=LLParserLimits(**LIMITS))
        if native.is_error():
            raise MatcherError(shorten_message(native.get_error()))
        return native

    def renew(self, shard: int, native: LLMatcher) -> None:
        """Replaces a shard whose lexer hit a limit by a copy of `native`, which must be at the start."""
        self._natives[shard] = native.deep_copy()
