"""The position of one sequence in its grammar."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

from jaxserve.features.grammars.errors import MatcherError, shorten_message
from jaxserve.features.grammars.shards import GrammarShards
from jaxserve.features.grammars.vocabulary import Vocabulary

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher

_WORD_BITS = 32


@final
class Matcher:
    """The tokens of one sequence so far, and those that may come next. Safe to use from several threads.

    A refused token changes nothing. The library's parser stops for good when it hits a limit. The matcher then rebuilds
    it from the tokens, once, because another sequence that shares its lexer may be the cause; when the parser stops
    again, the sequence fails.
    """

    def __init__(self, shards: GrammarShards, shard: int) -> None:
        self._shards = shards
        self.version = 0  # counts accepted tokens: a mask belongs to one version
        self.mask_job: Any = None  # the pool's job for the latest mask
        self._shard = shard
        self._native: LLMatcher = shards.fork(shard)
        self._ids: list[int] = []
        self._limits = [make(shards.vocabulary) for make in shards.limits]
        self._has_ended = False  # by EOS
        self._was_recovered = False
        self._may_walk = True  # until a walk along drafts meets an error
        self._rolls_back: bool | None = None  # not with `max_tokens` in the grammar; None: no walk has shown it yet
        self._failure: MatcherError | None = None  # it could not be brought back from such a walk
        self._lock = threading.Lock()

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the grammar."""
        return self._shards.vocabulary

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens accepted so far, EOS included."""
        return tuple(self._ids)

    @property
    def is_finished(self) -> bool:
        """Whether EOS came or only EOS may follow: the sequence can end without it."""
        with self._lock:
            return self._has_ended or (self._native.is_stopped() and not self._native.is_error())

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far is complete: EOS may come next, perhaps other tokens too."""
        with self._lock:
            return self._has_ended or self._native.is_accepting()

    def accept(self, token_id: int) -> None:
        """Appends the sequence's next token.

        Raises:
            MatcherError: the grammar does not allow the token here, which leaves the matcher unchanged; or it failed.
        """
        with self._lock:
            self._accept(token_id)
            self.version += 1

    def fill_mask(self, row: np.ndarray) -> None:
        """Writes the mask of the tokens that may come next to `row`.

        EOS is allowed exactly when the text is complete. Where the grammar forces a text, only the tokenizer's own
        tokens for it are allowed.

        Args:
            row: uint32 [at least ceil(V / 32)], contiguous; bit i % 32 of word i // 32 is token i. Words beyond the
                vocabulary become 0.

        Raises:
            MatcherError: the grammar hit a limit, or no token can continue the text; `row` is all zeros then.
            ValueError: `row` is not such an array.
        """
        num_words = self._count_words(row)
        row[num_words:] = 0
        with self._lock:
            self._raise_failure()
            if self._has_ended or (self._native.is_stopped() and not self._native.is_error()):
                row[:num_words] = 0
                for token_id in self.vocabulary.eos_token_ids:
                    row[token_id // _WORD_BITS] |= 1 << (token_id % _WORD_BITS)
                return
            address, num_bytes = row.ctypes.data, num_words * 4
            self._native.unsafe_compute_mask_ptr(address, num_bytes)
            if self._native.is_error():  # the library has filled in a mask of EOS
                row[:num_words] = 0
                self._recover()
                self._native.unsafe_compute_mask_ptr(address, num_bytes)
            if self._native.is_error():
                row[:num_words] = 0
                raise self._make_error()
            for limit in self._limits:
                limit.narrow(row)

    def fill_along(
        self, drafts: Sequence[int], lines: np.ndarray, version: int, go_on: Callable[[int], bool] = lambda _: True
    ) -> None:
        """Writes the masks along drafts: line i + 1 is the mask after draft i. The matcher stays where it is.

        The walk ends in front of the first draft that the line before it does not allow (so also at one below zero),
        in front of EOS, and after a draft that completes the text for good. Lines that it does not reach are left as
        they are. An error ends it, too: if the sequence really comes there, it meets the error again. No other use of
        the matcher sees the walk; they wait for it.

        Args:
            drafts: guessed ids of the tokens that come next.
            lines: uint32 [at least len(drafts) + 1, at least ceil(V / 32)], contiguous. Line 0 is the mask here, made
                by `fill_mask`.
            version: the `version` that line 0 belongs to; a matcher that has another by now does not walk.
            go_on: called with the number of complete lines after each further one; False ends the walk. So `accept`
                waits for one mask at most, not for the whole walk.

        Raises:
            ValueError: `lines` is not such an array.
        """
        if len(lines) <= len(drafts):
            raise ValueError(f"lines: {len(drafts)} drafts need {len(drafts) + 1}, got {len(lines)}")
        num_words = self._count_words(lines[0])
        with self._lock:
            if self.version != version or not self._may_walk or self._has_ended or self._native.is_stopped():
                return
            # A copy costs more the longer the text is, but a failed rollback would cost the parser.
            native = self._native if self._rolls_back else self._native.deep_copy()
            limits = [limit.copy() for limit in self._limits]
            num_taken, is_back = 0, False
            try:
                for draft in drafts:
                    if not self._take_draft(native, draft, lines[num_taken]):
                        break
                    num_taken += 1
                    if not _fill_behind_draft(native, lines[num_taken], num_words):
                        break
                    for limit in limits:
                        limit.accept(draft)
                        limit.narrow(lines[num_taken])
                    if not go_on(num_taken + 1):
                        break
                self._may_walk = not native.is_error()
                if num_taken and self._may_walk and self._rolls_back is not False:
                    self._rolls_back = native.rollback(num_taken)
                is_back = self._may_walk and (num_taken == 0 or self._rolls_back is True)
            finally:
                if native is self._native and not is_back:
                    self._return_to_tokens()

    def forced_tokens(self) -> list[int]:
        """Returns the tokens that must come next, in the tokenizer's own spelling; often none.

        Never waits: returns none while another thread uses this matcher.
        """
        if not self._lock.acquire(blocking=False):
            return []
        try:
            if self._has_ended or self._native.is_stopped():
                return []
            return self._native.compute_ff_tokens()
        finally:
            self._lock.release()

    def copy(self) -> Matcher:
        """Returns an independent matcher at the same position, in tens of microseconds."""
        other = object.__new__(Matcher)
        with self._lock:
            other._shards, other.version, other.mask_job = self._shards, self.version, None
            other._shard, other._ids = self._shard, list(self._ids)
            other._native = self._native.deep_copy()
            other._limits = [limit.copy() for limit in self._limits]
            other._has_ended, other._was_recovered = self._has_ended, self._was_recovered
            other._may_walk, other._rolls_back, other._failure = self._may_walk, self._rolls_back, self._failure
        other._lock = threading.Lock()
        return other

    def _count_words(self, row: np.ndarray) -> int:
        """Returns the words of a mask; ValueError if the row does not have them."""
        num_words = -(-len(self.vocabulary.tokens) // _WORD_BITS)
        if row.ndim != 1 or row.itemsize != 4 or row.shape[0] < num_words or not row.flags.c_contiguous:
            raise ValueError(f"row: needs {num_words} contiguous uint32, got {row.dtype} {row.shape}")
        return num_words

    def _take_draft(self, native: LLMatcher, draft: int, row: np.ndarray) -> bool:
        """Advances a parser by a draft that `row` allows; returns False for others. EOS stops the parser."""
        if not 0 <= draft < len(self.vocabulary.tokens):
            return False
        is_allowed = int(row[draft // _WORD_BITS]) >> (draft % _WORD_BITS) & 1
        return bool(is_allowed) and native.try_consume_tokens([draft]) == 1

    def _return_to_tokens(self) -> None:
        """Rebuilds a parser that a walk has lost. It walks no more, so drafts cost this once at most."""
        self._may_walk = False
        try:
            self._rebuild()
        except MatcherError as error:
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise MatcherError(str(self._failure))

    def _accept(self, token_id: int) -> None:
        self._raise_failure()
        is_taken = self._consume(token_id)
        if not is_taken and self._native.is_error():
            self._recover()
            is_taken = self._consume(token_id)
        if not is_taken and self._native.is_error():
            raise self._make_error()
        if not is_taken:
            where = "after its end" if self._has_ended else f"as token {len(self._ids) + 1} of the output"
            raise MatcherError(f"the grammar does not allow the token id {token_id} {where}")

    def _consume(self, token_id: int) -> bool:
        """Advances by one token; returns False if it is not allowed or the parser has stopped with an error."""
        vocabulary = self.vocabulary
        if self._has_ended or not 0 <= token_id < len(vocabulary.tokens):
            return False
        is_eos = token_id in vocabulary.eos_token_ids
        if self._native.is_stopped():
            is_taken = is_eos and not self._native.is_error()
        else:
            is_taken = self._native.try_consume_tokens([token_id]) == 1
        if is_taken:
            self._has_ended = is_eos
            self._ids.append(token_id)
            for limit in self._limits:
                limit.accept(token_id)
        return is_taken

    def _recover(self) -> None:
        """Replaces a failed parser as `_rebuild` does; MatcherError the second time."""
        if self._was_recovered:
            raise self._make_error()
        self._was_recovered = True
        self._rebuild()

    def _rebuild(self) -> None:
        """Replaces the parser by one with a new lexer; MatcherError if a token is refused."""
        self._native = self._shards.compile()
        self._shards.renew(self._shard, self._native)
        token_ids, self._ids, self._has_ended = self._ids, [], False
        self._limits = [make(self.vocabulary) for make in self._shards.limits]
        for token_id in token_ids:
            if not self._consume(token_id):
                raise self._make_error(token_id)

    def _make_error(self, token_id: int | None = None) -> MatcherError:
        if self._native.is_error():
            return MatcherError(f"the grammar cannot continue: {shorten_message(self._native.get_error())}")
        return MatcherError(f"the grammar does not allow the token id {token_id} as token {len(self._ids) + 1}")


def _fill_behind_draft(native: LLMatcher, row: np.ndarray, num_words: int) -> bool:
    """Writes the mask behind a draft; returns False, without a mask, where the text is complete or on an error."""
    if native.is_stopped():
        return False
    row[num_words:] = 0
    native.unsafe_compute_mask_ptr(row.ctypes.data, num_words * 4)
    if native.is_error():  # the library has filled in a mask of EOS
        row[:] = 0
        return False
    return True
