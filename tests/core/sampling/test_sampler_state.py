from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.sampling import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_EDITS,
    RowSetting,
    SamplerState,
    make_row_setting,
    pack_bits,
    record,
    sampler_state_specs,
    set_row,
)
from jaxserve.core.sampling.sampler_state import NO_STATE
from jaxserve.token_automaton import TokenAutomaton
from tests.core.sampling.cases import make_inputs, sample, shape_logits, stale_state
from tests.examples import scale_examples

V = 331
write = jax.jit(set_row)
count = jax.jit(record)


def line(state: SamplerState, row: int) -> dict[str, np.ndarray]:
    return {name: np.array(field[row]) for name, field in vars(state).items()}


def assert_equal_lines(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def assert_unused(setting: RowSetting, *, edits: int, words: int) -> None:
    """Nothing but the first so many is in use, and all lie in the order of the tokens that they change."""
    values = setting.edit_values[edits:]
    assert np.all(values == 0) and np.all(np.signbit(values)) and np.all(setting.edit_until[edits:] == 0)
    assert np.all(setting.bad_words[words:, :-1] == -2)
    for tokens in (setting.edit_ids, setting.bad_words[:, -1]):
        assert np.all(np.diff(tokens) >= 0) and tokens[0] >= 0 and tokens[-1] <= V - 1


def test_a_setting_says_what_was_asked() -> None:
    setting = make_row_setting(
        V,
        [5, 7, 7],
        [7, 9, 9, 330],
        logit_bias={3: 1.5, 330: -100.0},
        allowed_ids={0, 31, 32, 330},
        bad_words=[[4], [1, 2, 3]],
        banned_ids=[2, 2, 330, 10**6],
        banned_until=40,
    )
    stats = np.zeros(V, np.int32)
    stats[[5, 7, 9, 330]] = [1, 3, 4, 2]
    np.testing.assert_array_equal(setting.token_stats, stats)
    np.testing.assert_array_equal(setting.recent, [-1, -1, -1, 7, 9, 9, 330])
    edits = np.stack([setting.edit_ids, setting.edit_values, setting.edit_until])
    np.testing.assert_array_equal(edits[:, :4], [[2, 3, 330, 330], [0, 1.5, -100, 0], [40, 0, 40, 0]])
    np.testing.assert_array_equal(setting.bad_words[0], [-1] * 5 + [1, 2, 3])
    np.testing.assert_array_equal(setting.bad_words[1], [-1] * 7 + [4])
    assert_unused(setting, edits=3, words=2)
    np.testing.assert_array_equal(setting.allowed[:2], [2**31 + 1, 1])
    assert setting.allowed[10] == 1 << 10 and not setting.allowed[2:10].any()


def test_a_plain_setting_asks_for_nothing() -> None:
    setting = make_row_setting(V, [1], [])
    assert np.all(setting.recent == -1)
    assert_unused(setting, edits=0, words=0)
    assert np.all(setting.allowed[:10] == 2**32 - 1)


def test_any_number_of_tokens_is_suppressed() -> None:
    setting = make_row_setting(V, [1], [], suppressed_ids=[-1, *range(1, V), V, 10**9])
    assert setting.allowed[0] == 1 and not setting.allowed[1:].any()
    setting = make_row_setting(V, [1], [], allowed_ids=[3, 5], suppressed_ids=[5, 7])
    assert setting.allowed[0] == 1 << 3 and not setting.allowed[1:].any()


@pytest.mark.parametrize("size", [1, 31, 32, 33, 331])
def test_packed_bits_are_the_mask(size) -> None:
    mask = np.random.default_rng(size).random((3, size)) < 0.5
    words = pack_bits(mask)
    assert words.dtype == np.uint32 and words.shape == (3, -(-size // 32))
    tokens = np.arange(size)
    np.testing.assert_array_equal(words[:, tokens // 32] >> (tokens % 32) & 1, mask)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("logit_bias", {"logit_bias": {V: 1.0}}),
        ("logit_bias", {"logit_bias": {-1: 1.0}}),
        ("allowed_ids", {"allowed_ids": [3, 2**40]}),
        ("bad_words", {"bad_words": [[1, V]]}),
        ("bad_words", {"bad_words": [[]]}),
        ("bad_words", {"bad_words": [[1] * (MAX_BAD_WORD_TOKENS + 1)]}),
        ("bad_words", {"bad_words": [[1]] * (MAX_BAD_WORDS + 1)}),
        ("edits", {"logit_bias": dict.fromkeys(range(1000), 1.0)}),
        ("edits", {"logit_bias": dict.fromkeys(range(400), 1.0), "banned_ids": range(399, MAX_EDITS + 1)}),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name, options) -> None:
    with pytest.raises(ValueError, match=name):
        make_row_setting(V if name != "edits" else 1000, [1], [2], **options)
    with pytest.raises(ValueError, match="allowed_ids and automaton"):
        make_row_setting(V, [1], [], allowed_ids=[1], automaton=TokenAutomaton(((0, 1, 0),)))
    with pytest.raises(ValueError, match="suppressed_ids"):
        make_row_setting(V, [1], [], suppressed_ids=[1], automaton=TokenAutomaton(((0, 1, 0),)))
    with pytest.raises(ValueError, match=r"prompt_ids: token id 331"):
        make_row_setting(V, [331], [])


def test_a_line_holds_its_limits() -> None:
    banned = range(400, 400 + MAX_EDITS - 300)
    setting = make_row_setting(
        1000,
        [1],
        [],
        logit_bias=dict.fromkeys(range(300), -1.0),
        banned_ids=banned,
        banned_until=9,
        bad_words=[[1] * MAX_BAD_WORD_TOKENS] * MAX_BAD_WORDS,
    )
    np.testing.assert_array_equal(setting.edit_ids, [*range(300), *banned])
    assert np.all(setting.bad_words == 1)


def test_set_row_writes_one_line_and_no_other() -> None:
    state, setting = stale_state(5, V), make_row_setting(V, [1, 2], [3], logit_bias={4: 2.0})
    after = write(state, np.int32(3), setting)
    for row in range(5):
        assert_equal_lines(line(after, row), vars(setting) if row == 3 else line(state, row))


@settings(max_examples=scale_examples(40), deadline=None)
@given(
    prompt=st.lists(st.integers(0, V - 1), max_size=20),
    output=st.lists(st.integers(0, 20), max_size=20),
    cut=st.integers(0, 20),
)
def test_readmission_equals_recording_all_along(prompt, output, cut) -> None:
    cut = min(cut, len(output))
    state = write(stale_state(4, V), np.int32(2), make_row_setting(V, prompt, output[:cut]))
    before = line(state, 0)
    for token in output[cut:]:
        state = count(state, np.array([1, 2]), np.array([7, token], np.int32), np.array([False, True]))
    assert_equal_lines(line(state, 2), vars(make_row_setting(V, prompt, output)))
    assert_equal_lines(line(state, 0), before)


def test_record_counts_kept_tokens_only() -> None:
    state = replace(stale_state(4, V), state=jnp.full(4, NO_STATE))
    rows, ids = np.array([3, 0, 1, 2, 3]), np.array([5, V - 1, 0, -1, 6], np.int32)
    after = count(state, rows, ids, np.array([False, True, True, True, False]))  # row 3 is padding, twice
    for row, token in ((0, V - 1), (1, 0)):
        expected = line(state, row)
        expected["token_stats"][token] += 2
        expected["recent"] = np.append(expected["recent"][1:], token)
        assert_equal_lines(line(after, row), expected)
    for row in (2, 3):  # row 2 had no token but a report
        assert_equal_lines(line(after, row), line(state, row))


def test_state_is_updated_where_it_lies() -> None:
    specs = sampler_state_specs(256, 8192)
    nbytes = sum(spec.size * spec.dtype.itemsize for spec in jax.tree.leaves(specs))
    column = jax.ShapeDtypeStruct((2,), jnp.int32)
    keep = jax.ShapeDtypeStruct((2,), jnp.bool_)
    logits = jax.ShapeDtypeStruct((2, 8192), jnp.float32)

    def step(state, logits, inputs, rows, keep):
        shaped = shape_logits(logits, inputs, state, rows, vocab_size=8192)
        ids = sample(shaped, inputs, vocab_size=8192)
        return record(state, rows, ids, keep), ids

    programs = {
        "record": jax.jit(record, donate_argnums=0).lower(specs, column, column, keep),
        "set_row": jax.jit(set_row, donate_argnums=0).lower(
            specs, jax.ShapeDtypeStruct((), jnp.int32), make_row_setting(8192, [], [])
        ),
        "step": jax.jit(step, donate_argnums=0).lower(specs, logits, make_inputs(2), column, keep),
    }
    for name, lowered in programs.items():
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= nbytes, name
        assert memory.temp_size_in_bytes < nbytes / 10, name
