"""Drafts from finished answers: whose, how many, and for how long they are kept."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.features.speculation import NO_DRAFT, AnswerQueue, CorpusShape, answer_block_specs, unpack_block
from jaxserve.features.speculation.corpus import corpus_specs, find_in_corpus, write_answers
from jaxserve.features.speculation.suffix import propose_suffix
from tests.examples import scale_examples
from tests.features.speculation import reference
from tests.features.speculation.cases import L, Table, pack_all
from tests.features.speculation.test_lookup import K, make_suffix_config

RULE = (8, 1.5, 0.3)
SALTS = [(0, 0), (0, 1), (1, 0)]
TABLES = {sizes: Table(make_suffix_config(*RULE, *sizes)) for sizes in [(100, 64), (3, 256), (100, 530)]}
answers_in_order = st.lists(
    st.tuples(st.sampled_from(SALTS), st.lists(st.integers(0, 2), max_size=L)), min_size=1, max_size=9
)


@pytest.mark.parametrize("sizes", TABLES)
@settings(max_examples=scale_examples(50), deadline=None)
@given(answers=answers_in_order, query=st.lists(st.integers(0, 2), min_size=1, max_size=10), start=st.integers(0, 3))
def test_the_longest_match_of_the_same_salt_is_drafted(
    sizes: tuple[int, int], answers: list[tuple[reference.Salt, list[int]]], query: list[int], start: int
) -> None:
    """A ring of 64 tokens is overwritten within some answers; of 256 tokens, only the last three answers count; 530 are
    more than a block has.
    """
    table = TABLES[sizes]
    table.clear()
    slow = reference.SlowCorpus(table.drafter.corpus_shape)
    for salt, tokens in answers:
        table.remember(tokens[start:], salt)
        slow.remember(tokens[start:], salt)
    for row, salt in enumerate(SALTS):
        table.set_row(row, query, salt)
    found = table.propose([0, 1, 2, 0], [len(query)] * 4)
    for salt, drafts in zip([*SALTS, SALTS[0]], found, strict=True):
        assert drafts == reference.propose_suffix(query, *RULE, K, slow, salt)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", TABLES)
def test_the_ring_goes_round(sizes: tuple[int, int], seed: int) -> None:
    """Many answers, whose ends come again as queries, alone and with other tokens before them."""
    table = TABLES[sizes]
    table.clear()
    slow = reference.SlowCorpus(table.drafter.corpus_shape)
    rng = random.Random(seed)
    answers: list[list[int]] = []
    for _ in range(40):
        answers.append([rng.randrange(2 + seed) for _ in range(rng.randint(0, L))])
        table.remember(answers[-1])
        slow.remember(answers[-1], SALTS[0])
        queries = []
        for row in range(3):
            text = rng.choice(answers[-8:])
            end = rng.randint(0, len(text))
            queries.append([rng.randrange(2 + seed), *text[max(0, end - 9) : end]])
            table.set_row(row, queries[row])
        found = table.propose([0, 1, 2, 0], [len(query) for query in [*queries, queries[0]]])
        assert found[:3] == [reference.propose_suffix(query, *RULE, K, slow) for query in queries]


def ask(table: Table, query: list[int], salt: tuple[int, int] = (0, 0)) -> list[int]:
    table.set_row(0, query, salt)
    return table.propose([0] * 4, [len(query)] * 4)[0]


def test_an_answer_is_found_by_its_own_salt_only() -> None:
    table = TABLES[100, 64]
    table.clear()
    table.remember([10, 11, 12, 13, 14, 15], (2**32 - 1, 7))
    assert ask(table, [10, 11, 12], (2**32 - 1, 7)) == [13, 14, 15, NO_DRAFT, NO_DRAFT]
    for salt in ((0, 0), (2**32 - 1, 6), (0, 7), (7, 2**32 - 1)):
        assert ask(table, [10, 11, 12], salt) == [NO_DRAFT] * K


def test_neither_a_match_nor_what_follows_leaves_an_answer() -> None:
    table = TABLES[100, 64]
    table.clear()
    table.remember([1, 2, 3, 4])
    table.remember([5, 6, 7, 8])
    assert ask(table, [1, 2, 3]) == [4] + [NO_DRAFT] * 4
    assert ask(table, [3, 4, 5, 6]) == [7, 8, NO_DRAFT, NO_DRAFT, NO_DRAFT]  # three drafts would be 7, 8 and more
    assert ask(table, [2, 3, 4]) == [NO_DRAFT] * K


def test_the_row_comes_first_and_a_longer_match_before_it() -> None:
    table = TABLES[100, 64]
    table.clear()
    table.remember([1, 2, 3, 4])
    assert ask(table, [1, 2, 9, 1, 2]) == [9, 1, 2, NO_DRAFT, NO_DRAFT]
    assert ask(table, [2, 9, 1, 2]) == [3, 4, NO_DRAFT, NO_DRAFT, NO_DRAFT]


def test_shares_decide_between_answers() -> None:
    table = TABLES[100, 64]
    table.clear()
    for last in (5, 6, 5, 7):
        table.remember([1, 2, 3, last, last])
    assert ask(table, [1, 2, 3])[:3] == [5, 5, NO_DRAFT]
    table.remember([1, 2, 3, 8, 8])  # takes the place of the first: four different ways on, a quarter each
    assert ask(table, [1, 2, 3]) == [NO_DRAFT] * K


def test_an_occurrence_has_one_vote() -> None:
    """One is found in the tables of pairs and of triples; the other was displaced in the former."""
    table = TABLES[100, 64]
    table.clear()
    table.remember([1, 2, 3, 5, 5])
    table.remember([1, 2, 3, 6, 6])
    for _ in range(3):
        table.remember([0])
    table.remember([9, 2, 3, 7])  # in the way of the second answer
    assert ask(table, [1, 2, 3])[:2] == [6, 6]  # of equally many the most recent


@pytest.mark.parametrize("depth", [2, 3, 4, 6])
def test_a_corpus_of_few_levels_has_fewer_occurrences_than_a_row(depth: int) -> None:
    """Both lists have one size, whichever is longer: up to a depth of 3 a corpus gives 8, a row 16."""
    table = Table(make_suffix_config(depth, 2.0, 0.3, 4, 64), max_len=64)
    table.clear()
    table.remember([1, 2, 3, 4])
    assert ask(table, [1, 2])[0] == 3
    row = [5, 6] * 9 + [8, 5, 7] * 7 + [9, 5]  # 9 stands nowhere else: one token matches
    expected = reference.propose_suffix(row, depth, 2.0, 0.3, K)
    assert ask(table, row) == expected and expected[0] == 6  # nine of the last sixteen


def test_older_answers_are_forgotten() -> None:
    table = TABLES[3, 256]
    table.clear()
    for number in range(5):
        table.remember([10 * number + offset for offset in range(4)])
        table.remember([])
        for old in range(number + 1):
            drafts = ask(table, [10 * old, 10 * old + 1])
            assert drafts[0] == (10 * old + 2 if old > number - 3 else NO_DRAFT)


def test_positions_move_down_before_they_overflow() -> None:
    """The same answers with and without, over many moves."""
    shape = CorpusShape(num_tokens=64, num_answers=5, depth=6)
    state = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), corpus_specs(shape, 1))
    write = jax.jit(lambda corpus, line: write_answers(corpus, unpack_block(line, answer_block_specs(shape))))
    find = jax.jit(partial(find_in_corpus, num_drafts=K))
    queues, states = (AnswerQueue(shape), AnswerQueue(shape, max_position=150)), [state, state]

    rng, salt, positions = random.Random(2), np.zeros(2, np.uint32), []
    for _ in range(60):
        tokens, count = [rng.randrange(2) for _ in range(20)], rng.randint(0, 20)
        for place, queue in enumerate(queues):
            queue.add(tokens[:count], salt)
            for line in pack_all(queue):
                states[place] = write(states[place], line)
        expected, found = (find(state, np.array(tokens[:6], np.int32), salt) for state in states)
        is_found = expected.starts >= 0
        assert expected.matched == found.matched
        np.testing.assert_array_equal(is_found, found.starts >= 0)
        np.testing.assert_array_equal(expected.ways[is_found], found.ways[is_found])
        positions.append([int(jnp.max(state.ends)) for state in states])
    highest = np.max(positions, axis=0)
    assert highest[0] > 400 and highest[1] < 150 + shape.num_tokens


def test_all_rows_at_once_find_the_same() -> None:
    table = TABLES[100, 64]
    table.clear()
    rng = np.random.default_rng(5)
    for _ in range(4):
        table.remember(rng.integers(0, 2, L).tolist())
    tokens = jnp.asarray(rng.integers(0, 2, (8, L)), jnp.int32)
    lengths = jnp.arange(8, dtype=jnp.int32) + 1
    corpus, rule, salt = table.state.corpus, table.drafter.rule, jnp.zeros(2, jnp.uint32)
    assert rule is not None

    def propose(line: jax.Array, length: jax.Array) -> jax.Array:
        return propose_suffix(line, length, replace(rule, num_drafts=3), corpus, salt)

    at_once = jax.jit(jax.vmap(propose))(tokens, lengths)
    np.testing.assert_array_equal(
        at_once, jax.jit(lambda *rows: jax.lax.map(lambda row: propose(*row), rows))(tokens, lengths)
    )
    assert np.any(np.asarray(at_once) != NO_DRAFT)
