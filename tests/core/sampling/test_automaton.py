"""Rows that follow an automaton on the device, against the same automaton on the host."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.sampling import make_row_setting, pack_bits, record, set_row
from jaxserve.token_automaton import MAX_STATE_TRANSITIONS, MAX_TRANSITIONS, TokenAutomaton
from tests.core.sampling.cases import stale_state
from tests.examples import scale_examples

V, R = 331, 5
write, count = jax.jit(set_row), jax.jit(record)


def make_automaton(rng: random.Random, sizes: list[int]) -> TokenAutomaton:
    """So many states with so many transitions each, to anywhere."""
    begins = [sum(sizes[:index]) for index in range(len(sizes))]
    lines = []
    for state, size in zip(begins, sizes, strict=True):
        lines += [(state, token, rng.choice(begins)) for token in sorted(rng.sample(range(V), size))]
    return TokenAutomaton(tuple(lines))


def allowed_line(automaton: TokenAutomaton, state: int) -> np.ndarray:
    mask = np.zeros(V, bool)
    mask[automaton.list_allowed(state)] = True
    return pack_bits(mask)


@settings(max_examples=scale_examples(40), deadline=None)
@given(sizes=st.lists(st.integers(1, MAX_STATE_TRANSITIONS), min_size=1, max_size=8), seed=st.integers(0, 2**32))
def test_rows_follow_their_automata(sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    automaton = make_automaton(rng, sizes)
    state = stale_state(R, V)
    start = [rng.choice(automaton.list_allowed(0))]
    state = write(state, 3, make_row_setting(V, [1, 2], start, automaton=automaton))
    state = write(state, 1, make_row_setting(V, [1, 2], []))
    plain = np.array(state.allowed[1])
    at = automaton.find_state(start)
    for step in range(6):
        np.testing.assert_array_equal(state.allowed[3], allowed_line(automaton, at))
        assert state.state[3] == at and state.state[1] == -1
        token = rng.choice(automaton.list_allowed(at))
        keeps = step != 2  # a row that does not sample stays where it is
        state = count(state, jnp.array([1, 3]), jnp.array([token, token]), jnp.array([True, keeps]))
        at = after(automaton, at, token) if keeps else at
        np.testing.assert_array_equal(state.allowed[1], plain)


def after(automaton: TokenAutomaton, state: int, token: int) -> int:
    return next(following for at, one, following in automaton.transitions if (at, one) == (state, token))


def test_other_rows_keep_what_they_may_choose() -> None:
    """A row whose switch is off has a stale line, that nothing touches."""
    automaton = make_automaton(random.Random(0), [3, 4])
    state = stale_state(R, V)
    for row in range(R):
        state = write(state, row, make_row_setting(V, [1], [], automaton=automaton))
    before = jax.tree.map(np.array, state)
    token = automaton.list_allowed(0)[0]
    state = count(state, jnp.array([0, 2]), jnp.array([token, token]), jnp.array([True, False]))
    for name in ("allowed", "state", "transitions"):
        found, expected = np.array(getattr(state, name)), getattr(before, name)
        np.testing.assert_array_equal(found[1:], expected[1:], err_msg=name)
    assert state.state[0] == after(automaton, 0, token)


def test_the_window_of_the_last_state_of_the_largest_automaton_fits() -> None:
    last = MAX_TRANSITIONS - MAX_STATE_TRANSITIONS
    made = make_automaton(random.Random(1), [MAX_STATE_TRANSITIONS] * (MAX_TRANSITIONS // MAX_STATE_TRANSITIONS))
    (_, token, _), *others = made.transitions
    automaton = TokenAutomaton(((0, token, last), *others))
    assert len(automaton.transitions) == MAX_TRANSITIONS
    state = write(stale_state(R, V), 0, make_row_setting(V, [1], [], automaton=automaton))
    state = count(state, jnp.array([0]), jnp.array([token]), jnp.array([True]))
    assert state.state[0] == last
    np.testing.assert_array_equal(state.allowed[0], allowed_line(automaton, last))
