"""Drafts from a row's own tokens, and how its tokens are kept."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import ConfigError
from jaxserve.features.speculation import LOOKUP_METHODS, NO_DRAFT, make_lookup_drafter, pack_rows
from jaxserve.features.speculation.lookup import MAX_HISTORY
from jaxserve.features.speculation.ngram import propose_ngram
from jaxserve.features.speculation.suffix import SuffixRule, follow_most, propose_suffix
from jaxserve.speculative_config import SpeculativeConfig
from tests.features.speculation import reference
from tests.features.speculation.cases import L, R, Table

K = 5
NGRAMS = {bounds: Table(SpeculativeConfig("ngram", K, None, *bounds)) for bounds in [(1, 1), (2, 4), (1, 7)]}


def make_suffix_config(
    depth: int, factor: float, share: float, answers: int = 0, tokens: int = 64
) -> SpeculativeConfig:
    return SpeculativeConfig(
        "suffix",
        K,
        suffix_decoding_max_tree_depth=depth,
        suffix_decoding_max_spec_factor=factor,
        suffix_decoding_min_token_prob=share,
        suffix_decoding_max_cached_requests=answers,
        suffix_decoding_corpus_tokens=tokens,
    )


RULES = [(6, 1.0, 0.1), (3, 2.5, 0.5), (24, 0.34, 0.0), (1, 9.0, 1.0)]
SUFFIXES = {rule: Table(make_suffix_config(*rule)) for rule in RULES}
rows_of_tokens = st.lists(st.lists(st.integers(0, 2), max_size=L), min_size=R, max_size=R)


def expect_in_row(drafts: list[int], length: int) -> list[int]:
    """No token has a position at L or after."""
    return reference.pad(drafts[: max(0, L - length)], K)


@pytest.mark.parametrize("bounds", NGRAMS)
@settings(deadline=None)
@given(rows=rows_of_tokens)
def test_ngram_drafts_what_followed_the_longest_latest_match(bounds: tuple[int, int], rows: list[list[int]]) -> None:
    table = NGRAMS[bounds]
    table.clear()
    for row, tokens in enumerate(rows):
        table.set_row(row, tokens)
    order = [2, 0, 3, 1]
    found = table.propose(order, [len(rows[row]) for row in order])
    for row, drafts in zip(order, found, strict=True):
        assert drafts == expect_in_row(reference.propose_ngram(rows[row], *bounds, K), len(rows[row]))


@pytest.mark.parametrize("rule", SUFFIXES)
@settings(deadline=None)
@given(rows=rows_of_tokens)
def test_suffix_drafts_the_likeliest_way_on(rule: tuple[int, float, float], rows: list[list[int]]) -> None:
    table = SUFFIXES[rule]
    table.clear()
    for row, tokens in enumerate(rows):
        table.set_row(row, tokens)
    for tokens, drafts in zip(rows, table.propose([0, 1, 2, 3], [len(tokens) for tokens in rows]), strict=True):
        assert drafts == expect_in_row(reference.propose_suffix(tokens, *rule, K), len(tokens))


def test_a_period_goes_on() -> None:
    table = NGRAMS[2, 4]
    table.set_row(0, [1, 2, 1, 2, 1, 2])
    table.set_row(1, [7, 7, 7])
    table.set_row(2, [1, 2, 3, 4])
    assert table.propose([0, 1, 2, 3], [6, 3, 4, 0]) == [[1, 2, 1, 2, 1], [7] * K, [NO_DRAFT] * K, [NO_DRAFT] * K]


def test_suffix_counts_sixteen_occurrences() -> None:
    """Of a longer row: older ones have no say, and of equally many the latest decides."""
    table = Table(make_suffix_config(1, float(K), 0.2), max_len=128)
    tokens = [9, 5] * 30 + [9, 6] * 9 + [9, 7] * 7
    for end, first in ((len(tokens), 6), (len(tokens) - 14, 6), (60, 5)):
        row = [*tokens[:end], 9]
        table.set_row(0, row)
        (drafts,) = table.propose([0], [len(row)])
        assert drafts[0] == first and drafts == reference.propose_suffix(row, 1, float(K), 0.2, K)


def test_tokens_are_written_where_they_belong() -> None:
    table = NGRAMS[1, 7]
    table.clear()
    rng = random.Random(1)
    expected = table.history()
    for _ in range(30):
        rows = rng.sample(range(R), 3)
        positions = [rng.choice([0, 1, L - 3, L - 1, L, L + 4, -1, rng.randrange(L)]) for _ in rows]
        ids = [[rng.choice([-3, -1, *range(100)]) for _ in range(4)] for _ in rows]
        counts = [rng.randint(0, 4) for _ in rows]
        table.append(rows, positions, ids, counts)
        for row, position, run, count in zip(rows, positions, ids, counts, strict=True):
            for offset, token in enumerate(run[:count]):
                if 0 <= position + offset < L and token >= 0:
                    expected[row, position + offset] = token
        np.testing.assert_array_equal(table.history(), expected)

        row, start = rng.randrange(R), rng.randrange(L)
        tokens = [rng.randrange(100) for _ in range(rng.randint(0, L - start))]
        table.set_row(row, tokens, start=start)
        expected[row, start : start + len(tokens)] = tokens
        np.testing.assert_array_equal(table.history(), expected)


@pytest.mark.parametrize(("rows", "num_blocks"), [((0, 1), 1), ((0, 2000), 2), ((900, 300, 5), 2), ((1024, 1), 2)])
def test_rows_share_blocks(rows: tuple[int, ...], num_blocks: int) -> None:
    table = Table(make_suffix_config(6, 1.0, 0.1, answers=4), max_len=2048)
    table.salts[1] = 5, 2**32 - 1
    spans = [(row, 7 * row, [100 + row] * count) for row, count in enumerate(rows)]
    assert len(list(pack_rows(spans, table.salts))) == num_blocks
    expected = table.history()
    table.write(spans)
    for row, start, tokens in spans:
        expected[row, start : start + len(tokens)] = tokens
    np.testing.assert_array_equal(table.history(), expected)
    np.testing.assert_array_equal(table.state.corpus.row_salts, table.salts)


@pytest.mark.parametrize("table", [NGRAMS[1, 7], SUFFIXES[RULES[0]]])
def test_no_draft_lies_beyond_the_longest_row(table: Table) -> None:
    table.set_row(0, [1] * L)
    assert table.propose([0] * 4, [L, L - 1, L - 2, L + 3]) == [reference.pad([1] * count, K) for count in (0, 1, 2, 0)]


def test_the_state_is_written_in_place() -> None:
    """A donated history is not copied: what comes back lies where it lay."""
    table = Table(make_suffix_config(6, 1.0, 0.1, answers=4))
    table.clear()
    place = table.state.history.unsafe_buffer_pointer()
    ends = table.state.corpus.ends.unsafe_buffer_pointer()
    table.set_row(1, [1, 2])
    table.append([1, 0], [2, 0], [[3, 4], [0, 0]], [2, 0])
    table.set_row(2, [5], start=1)
    table.remember([1, 2, 3, 4])
    assert table.state.history.unsafe_buffer_pointer() == place
    assert table.state.corpus.ends.unsafe_buffer_pointer() == ends


def test_all_rows_at_once_give_the_same() -> None:
    """Accelerators map the function of a row; a CPU takes one after the other."""
    rng = np.random.default_rng(3)
    tokens = jnp.asarray(rng.integers(0, 2, (8, L)), jnp.int32)
    lengths = jnp.arange(8, dtype=jnp.int32) * 3
    rule = SuffixRule(K, *RULES[0])
    functions = (
        lambda line, length: propose_ngram(line, length, 1, 4, K),
        lambda line, length: propose_suffix(line, length, rule, None, None),
    )
    for function in functions:
        at_once = jax.jit(jax.vmap(function))(tokens, lengths)
        one_by_one = jax.jit(lambda *rows, function=function: jax.lax.map(lambda row: function(*row), rows))
        np.testing.assert_array_equal(at_once, one_by_one(tokens, lengths))


def test_votes_of_ways_that_ended_are_lost() -> None:
    ways = jnp.array([[1, 2, -1], [1, 2, 3], [1, 5, -1], [8, 8, 8]], jnp.int32)
    starts = jnp.array([4, 3, 9, -1])
    assert follow_most(ways, starts, jnp.int32(1), jnp.int32(3)).tolist() == [1, 2, 3]
    assert follow_most(ways, starts, jnp.int32(2), jnp.int32(3)).tolist() == [1, 2, NO_DRAFT]
    assert follow_most(ways, starts, jnp.int32(1), jnp.int32(1)).tolist() == [1, NO_DRAFT, NO_DRAFT]


def test_shares_are_exact() -> None:
    rule = SuffixRule(100, 10, 0.3, 0.1)
    assert rule.list_limits().tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert SuffixRule(2, 10, 0.3, 0.1).list_limits().tolist()[-1] == 2
    assert rule.list_needs(31)[[0, 1, 10, 11, 30, 31]].tolist() == [1, 1, 1, 2, 3, 4]


def test_what_cannot_be_looked_up_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"speculative_config.method: 'eagle3' .*ngram and suffix") as caught:
        make_lookup_drafter(SpeculativeConfig("eagle3", 3))
    assert (caught.value.field, caught.value.value) == ("speculative_config.method", "eagle3")
    with pytest.raises(ConfigError, match=r"suffix_decoding_corpus_tokens: .* 3 tokens; 64 to"):
        make_lookup_drafter(make_suffix_config(6, 1.0, 0.1, answers=4, tokens=3))
    with pytest.raises(ConfigError, match="max_model_len"):
        NGRAMS[1, 7].drafter.state_specs(2, MAX_HISTORY + 1)


def test_drafters_are_static() -> None:
    assert LOOKUP_METHODS == ("ngram", "suffix")
    for config in (
        SpeculativeConfig("ngram", 3),
        make_suffix_config(6, 1.0, 0.1, 4),
        make_suffix_config(1, 1.0, 0.1, 4),
    ):
        drafter = make_lookup_drafter(config)
        assert hash(drafter) == hash(make_lookup_drafter(config)) and drafter == make_lookup_drafter(config)
        assert drafter.num_drafts == config.num_speculative_tokens
        assert drafter.keeps_answers == (config.method == "suffix" and config.suffix_decoding_max_tree_depth > 1)
