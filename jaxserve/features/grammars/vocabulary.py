"""A tokenizer's vocabulary, as llguidance needs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, final

from jaxserve.errors import InvalidRequestError, JaxServeError
from jaxserve.tokenizers import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLTokenizer

_MARK = "\x02"  # no token spans this character: text after it is encoded as a continuation


@final
class Vocabulary:
    """The bytes of every token, and the tokenization of forced text.

    llguidance copies the attributes and calls the object from its own threads.
    """

    is_tokenizer_wrapper = True  # llguidance asks for it

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: columns of the logits; tokens beyond it are dropped, missing ones have no bytes.

        Raises:
            InvalidRequestError: the tokenizer has no EOS token below `vocab_size`.
        """
        self._tokenizer = tokenizer
        tokens = tokenizer.list_token_bytes()[:vocab_size]
        self.tokens: list[bytes] = tokens + [b""] * (vocab_size - len(tokens))
        self.eos_token_ids = [token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size]
        if not self.eos_token_ids:
            raise InvalidRequestError(
                "needs a tokenizer with an EOS token: without one no output could end", field="structured_outputs"
            )
        special = {token_id for token_id in tokenizer.special_ids if token_id < vocab_size}
        self.special_token_ids = sorted(special | set(self.eos_token_ids))
        self.eos_token_id = self.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self._masks: dict[bytes | int, np.ndarray] = {}  # of tokens by how they begin
        self.native: LLTokenizer = _make_native(self)

    def __call__(self, text: str) -> list[int]:
        """Returns ids whose bytes are exactly the text's: the tokenizer's own, else the longest matches.

        If the tokenizer puts a space before the first word, the text is encoded as a continuation. Catches the
        tokenizer's errors, which llguidance would treat as internal ones.
        """
        data = text.encode()
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            if self._join(ids) == data:
                return ids
            ids = self._tokenizer.encode(_MARK + text, add_special_tokens=False)
        except JaxServeError:  # the text spells a special token that this tokenizer cannot keep as plain text
            return self.native.greedy_tokenize(text)
        for at in range(1, min(len(ids), 3) + 1):
            if self._join(ids[:at]).endswith(_MARK.encode()) and self._join(ids[at:]) == data:
                return ids[at:]
        return self.native.greedy_tokenize(text)

    @cached_property
    def blank_words(self) -> np.ndarray:
        """The mask of the tokens of nothing but blanks, uint32 [ceil(V / 32)]."""
        return self._pack([token.isspace() for token in self.tokens])

    @cached_property
    def longest_digits(self) -> int:
        """The most digits that a token begins with."""
        return max(self._num_digits)

    def list_beginning(self, text: bytes) -> np.ndarray:
        """Returns the mask of the tokens that begin with a text, as `blank_words`."""
        return self._keep(text, lambda: [token.startswith(text) for token in self.tokens])

    def list_longer_digits(self, count: int) -> np.ndarray:
        """Returns the mask of the tokens that begin with more digits than `count`, as `blank_words`."""
        return self._keep(count, lambda: [number > count for number in self._num_digits])

    @cached_property
    def _num_digits(self) -> list[int]:
        return [len(token) - len(token.lstrip(b"0123456789")) for token in self.tokens]

    def _keep(self, key: bytes | int, make: Callable[[], list[bool]]) -> np.ndarray:
        if key not in self._masks:
            self._masks[key] = self._pack(make())
        return self._masks[key]

    def _pack(self, flags: list[bool]) -> np.ndarray:
        import numpy as np

        bits = np.zeros(-(-len(flags) // 32) * 32, np.uint8)
        bits[: len(flags)] = flags
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def _join(self, ids: list[int]) -> bytes:
        size = len(self.tokens)
        return b"".join([self.tokens[token_id] if token_id < size else b"" for token_id in ids])


def import_llguidance() -> None:
    """Imports llguidance; raises InvalidRequestError, with what to install, if that fails."""
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise InvalidRequestError(
            f"needs the package llguidance, which cannot be imported ({error}); pip install 'llguidance>=1.8'",
            field="structured_outputs",
        ) from error


def _make_native(vocabulary: Vocabulary) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(vocabulary, eos_token=vocabulary.eos_token_ids)  # type: ignore[arg-type]
