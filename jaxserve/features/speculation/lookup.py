"""The drafters without weights, `ngram` and `suffix`: their state, and what a step does with it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int32

from jaxserve.core.sampling import map_rows
from jaxserve.core.sampling.drafts import NO_DRAFT
from jaxserve.errors import ConfigError
from jaxserve.features.speculation.blocks import unpack_block
from jaxserve.features.speculation.corpus import (
    LEVELS,
    WAYS,
    Corpus,
    CorpusShape,
    answer_block_specs,
    corpus_specs,
    write_answers,
)
from jaxserve.features.speculation.history import row_block_specs, write_tokens
from jaxserve.features.speculation.ngram import propose_ngram
from jaxserve.features.speculation.suffix import MAX_OCCURRENCES, SuffixRule, propose_suffix
from jaxserve.speculative_config import SpeculativeConfig
from pallas_kernels.cpu import lookup as cpu_lookup

LOOKUP_METHODS = ("ngram", "suffix")
MAX_HISTORY = 2**24  # positions are compared as float32
MIN_CORPUS_TOKENS, MAX_CORPUS_TOKENS = 64, 2**24  # at most some 2 GB


@flax.struct.dataclass
class LookupState:
    """What the rows' tokens are, and what was answered before. It lies beside the rows."""

    history: Int32[Array, "R L"]  # tokens by position, of prompt and output; only those before the row's length count
    corpus: Corpus | None  # suffix with a corpus only


@dataclass(frozen=True)
class LookupDrafter:
    """Looks drafts up. Static and hashable; all functions are pure and of static shapes, for use inside programs."""

    num_drafts: int  # K
    min_match: int  # ngram: a match of fewer tokens gives no draft
    max_match: int  # tokens that are compared
    rule: SuffixRule | None  # suffix; None: ngram
    corpus_shape: CorpusShape | None  # suffix; None: no corpus
    in_library: bool = False  # `propose` and `write_answers` call the CPU kernels' library, which is loaded

    @property
    def keeps_answers(self) -> bool:
        """Whether finished answers are kept."""
        return self.corpus_shape is not None

    def state_specs(
        self, num_rows: int, max_model_len: int, sharding: jax.sharding.Sharding | None = None
    ) -> LookupState:
        """Returns the abstract values of the state for R rows of L = `max_model_len` tokens; zeros are a valid start.

        Raises:
            ConfigError: `max_model_len` is beyond `MAX_HISTORY`.
        """
        if max_model_len > MAX_HISTORY:
            raise ConfigError(
                f"{max_model_len} tokens cannot be searched for drafts; up to {MAX_HISTORY}, or no speculative_config",
                field="max_model_len",
                value=max_model_len,
            )
        history = jax.ShapeDtypeStruct((num_rows, max_model_len), jnp.int32, sharding=sharding)
        corpus = None if self.corpus_shape is None else corpus_specs(self.corpus_shape, num_rows, sharding)
        return LookupState(history, corpus)

    def write_rows(self, state: LookupState, line: Int[Array, " E"]) -> LookupState:
        """Returns the state with tokens that no step has sampled, of a packed `RowBlock`; donate `state`."""
        block = unpack_block(line, row_block_specs(len(state.history)))
        history = write_tokens(state.history, block.rows, block.positions, block.tokens, block.rows >= 0)
        corpus = None if state.corpus is None else replace(state.corpus, row_salts=block.salts)
        return LookupState(history, corpus)

    def append(
        self,
        state: LookupState,
        row_ids: Int[Array, " S"],
        positions: Int[Array, " S"],
        ids: Int[Array, "S W"],
        counts: Int[Array, " S"],
    ) -> LookupState:
        """Returns the state with each row's run: ids[s, i] at positions[s] + i, for i < counts[s].

        Positions outside [0, L) are dropped, and so are ids below zero, which name errors.
        """
        index = jnp.arange(ids.shape[1])
        keep = (index < counts[:, None]) & (ids >= 0)
        rows = jnp.broadcast_to(row_ids[:, None], ids.shape)
        return replace(state, history=write_tokens(state.history, rows, positions[:, None] + index, ids, keep))

    def propose(self, state: LookupState, row_ids: Int[Array, " S"], lengths: Int[Array, " S"]) -> Int32[Array, "S K"]:
        """Returns the drafts of each row's tokens at `lengths` and after; `NO_DRAFT` from the first missing one on.

        Args:
            state: with all tokens of the rows before `lengths`; only read.
            row_ids: the rows.
            lengths: how many tokens of each are known. A row of 0 has no drafts, and none has one at L or after.
        """
        if self.in_library:
            answers = None if state.corpus is None else _list_answers(state.corpus)
            return cpu_lookup.look_up(
                state.history, row_ids, lengths, self.num_drafts, self._make_library_rule(), answers
            )
        max_len = state.history.shape[1]

        def propose_row(row: Int[Array, ""], length: Int[Array, ""]) -> Int32[Array, " K"]:
            tokens = lax.dynamic_index_in_dim(state.history, row, keepdims=False)
            if self.rule is None:
                return propose_ngram(tokens, length, self.min_match, self.max_match, self.num_drafts)
            salt = None if state.corpus is None else state.corpus.row_salts[row]
            return propose_suffix(tokens, length, self.rule, state.corpus, salt)

        drafts = map_rows(propose_row, row_ids, lengths)
        return jnp.where(lengths[:, None] + jnp.arange(self.num_drafts) < max_len, drafts, NO_DRAFT)

    def _make_library_rule(self) -> cpu_lookup.Rule:
        """`ngram` is a rule, too: the last occurrence alone, and all drafts from a match of `min_match` tokens on."""
        rule = self.rule
        if rule is None:
            limits = np.where(np.arange(self.max_match + 1) >= self.min_match, self.num_drafts, 0)
            return cpu_lookup.Rule(limits, np.ones(2), most_occurrences=1, no_draft=NO_DRAFT)
        shape = self.corpus_shape
        most = 0 if shape is None else len(shape.levels) * WAYS
        needs = rule.list_needs(max(MAX_OCCURRENCES, most))
        return cpu_lookup.Rule(rule.list_limits(), needs, MAX_OCCURRENCES, NO_DRAFT)

    def write_answers(self, corpus: Corpus, line: Int[Array, " E"]) -> Corpus:
        """Returns the corpus with the answers of a packed `AnswerBlock`; donate `corpus`."""
        assert self.corpus_shape is not None
        block = unpack_block(line, answer_block_specs(self.corpus_shape))
        if not self.in_library:
            return write_answers(corpus, block)
        numbers = block.first, block.position, block.shift
        answers = block.tokens, block.reaches, block.ways, block.salts
        written = cpu_lookup.remember(_list_answers(corpus), numbers, *answers)
        return replace(corpus, **written, oldest=block.oldest)


def make_lookup_drafter(config: SpeculativeConfig, *, in_library: bool = False) -> LookupDrafter:
    """Returns the drafter of the methods `ngram` and `suffix`.

    Args:
        in_library: see `LookupDrafter`.

    Raises:
        ConfigError: another method, or a corpus too small for two tokens.
    """
    if config.method == "ngram":
        return LookupDrafter(
            num_drafts=config.num_speculative_tokens,
            min_match=config.prompt_lookup_min,
            max_match=config.prompt_lookup_max,
            rule=None,
            corpus_shape=None,
            in_library=in_library,
        )
    if config.method != "suffix":
        raise ConfigError(
            f"{config.method!r} looks nothing up; {' and '.join(LOOKUP_METHODS)} do",
            field="speculative_config.method",
            value=config.method,
        )
    depth = config.suffix_decoding_max_tree_depth
    rule = SuffixRule(
        num_drafts=config.num_speculative_tokens,
        depth=depth,
        factor=config.suffix_decoding_max_spec_factor,
        min_share=config.suffix_decoding_min_token_prob,
    )
    return LookupDrafter(config.num_speculative_tokens, 1, depth, rule, _make_corpus_shape(config), in_library)


def _list_answers(corpus: Corpus) -> cpu_lookup.Answers:
    return cpu_lookup.Answers(
        LEVELS[: corpus.ends.shape[0]], **{each.name: getattr(corpus, each.name) for each in fields(corpus)}
    )


def _make_corpus_shape(config: SpeculativeConfig) -> CorpusShape | None:
    """Returns None if no answers are kept, or none could match because matches of one token are not looked up."""
    num_tokens, num_answers = config.suffix_decoding_corpus_tokens, config.suffix_decoding_max_cached_requests
    depth = config.suffix_decoding_max_tree_depth
    if num_answers == 0 or depth < 2:
        return None
    if not MIN_CORPUS_TOKENS <= num_tokens <= MAX_CORPUS_TOKENS:
        raise ConfigError(
            f"a corpus of {num_tokens} tokens; {MIN_CORPUS_TOKENS} to {MAX_CORPUS_TOKENS} will do",
            field="speculative_config.suffix_decoding_corpus_tokens",
            value=num_tokens,
        )
    most = num_tokens // 3 + 1  # an answer takes three places of the ring, or more
    return CorpusShape(num_tokens, min(num_answers, most), depth)
