"""One grammar compiled by the library several times over, so that several threads can compute masks with it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, final

from jaxserve.structured.errors import MatcherError, shorten_message
from jaxserve.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

_SHARD_LIMIT_S = 0.02  # a grammar that takes longer to compile has one shard
# What one grammar may cost: at compilation about 20 ms of regexes, in a step about 20 ms, and about 30 MiB of lexer
# states. Errors without the parser's state: it holds the caller's text.
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
    """The library's matchers at the start of the output.

    Copies of one compiled grammar share its lexer and its lock, and so compute masks one after the other. A grammar is
    compiled once more for each further thread of the masks, if that takes a few milliseconds.
    """

    def __init__(self, source: str, vocabulary: Vocabulary, most: int) -> None:
        """Compiles the first of at most `most`; MatcherError when the grammar does not compile."""
        self.vocabulary = vocabulary
        self._source = source
        start = time.perf_counter()
        first = self.compile()
        self.count = most if time.perf_counter() - start <= _SHARD_LIMIT_S else 1
        self._natives: list[LLMatcher | None] = [first, *[None] * (self.count - 1)]

    def fork(self, shard: int) -> LLMatcher:
        """Returns the library's matcher at the start, with the lexer of a shard."""
        native = self._natives[shard]
        if native is None:
            native = self._natives[shard] = self.compile()
        return native.deep_copy()

    def compile(self) -> LLMatcher:
        """Returns a new matcher of the library, which shares nothing with others.

        Raises:
            MatcherError: the grammar does not compile.
        """
        from llguidance import LLMatcher, LLParserLimits

        native = LLMatcher(self.vocabulary.native, self._source, log_level=0, limits=LLParserLimits(**LIMITS))
        if native.is_error():
            raise MatcherError(shorten_message(native.get_error()))
        return native

    def renew(self, shard: int, native: LLMatcher) -> None:
        """Gives later matchers of a shard the lexer of a new, unused `native`: the old one has met a limit."""
        self._natives[shard] = native.deep_copy()
