from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core import sampling
from jaxserve.core.sampling import pack_bits, record, sampler_state_specs
from tests.core.sampling.cases import (
    RowCase,
    case_columns,
    chi_square,
    finite_rows,
    make_inputs,
    make_logits,
    make_state,
    mask_logits,
    mixed_inputs,
    random_case,
    sample,
    shape_logits,
    take,
)
from tests.core.sampling.oracle import probabilities, shape_row
from tests.examples import scale_examples

R = 11  # rows of the persistent batch
shape = jax.jit(shape_logits, static_argnames="vocab_size")
mask = jax.jit(mask_logits)
run = jax.jit(sample, static_argnames="vocab_size")


@jax.jit
def step(state, logits, inputs, row_ids, keep):
    """The full program of one step, as the engine puts it together."""
    shaped = shape_logits(logits, inputs, state, row_ids, vocab_size=logits.shape[1])
    ids = sample(shaped, inputs, vocab_size=logits.shape[1])
    return record(state, row_ids, ids, keep & (inputs.has_edits != 0)), ids, shaped


def shape_cases(cases: list[RowCase], logits: np.ndarray, seed: int = 0) -> np.ndarray:
    size = logits.shape[1]
    row_ids = np.random.default_rng(seed).permutation(R)[: len(cases)]
    inputs = make_inputs(len(cases), **case_columns(cases))
    state = make_state(cases, row_ids, R, size)
    return np.asarray(shape(logits, inputs, state, row_ids, vocab_size=size))


def assert_bits_equal(found: np.ndarray, expected: np.ndarray, message: str = "") -> None:
    np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32), err_msg=message)


@settings(max_examples=scale_examples(60), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([37, 128, 331]))
def test_shaped_logits_are_the_oracles(seed, size) -> None:
    rng = np.random.default_rng(seed)
    cases = [random_case(rng, size) for _ in range(8)]
    logits = make_logits(8, size, seed)
    found = shape_cases(cases, logits, seed)
    for row, case in enumerate(cases):
        assert_bits_equal(found[row], shape_row(logits[row], case), str(case))


@pytest.mark.parametrize("size", [37, 331])
def test_any_numbers_shape_up_to_rounding(size) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        cases = [random_case(rng, size, exact=False) for _ in range(8)]
        logits = make_logits(8, size, seed)
        expected = np.stack([shape_row(row, case) for row, case in zip(logits, cases, strict=True)])
        np.testing.assert_allclose(shape_cases(cases, logits, seed), expected, rtol=3e-6, atol=3e-6)


ALONE = {
    "allowed": {"allowed": [0, 3, 31, 32, 36]},
    "bias": {"bias": {0: 2.5, 36: -1.25, 7: 100.0}},
    "bad_words": {"bad_words": [[4], [6, 9], [1, 6, 30], [9, 6, 31]]},
    "min_tokens": {"banned": [2, 36], "min_tokens": 4},
    "presence": {"presence": 0.75},
    "frequency": {"frequency": -0.5},
    "repetition": {"repetition": 2.0},
}


@pytest.mark.parametrize("name", ALONE)
def test_every_parameter_does_something_alone(name) -> None:
    case = RowCase(prompt=[1, 2, 2, 8], output=[8, 1, 6], **ALONE[name])
    logits = make_logits(1, 37, seed=1)
    found = shape_cases([case], logits)
    assert_bits_equal(found[0], shape_row(logits[0], case))
    changed = np.flatnonzero(found[0] != logits[0])
    expected = {
        "allowed": sorted(set(range(37)) - {0, 3, 31, 32, 36}),
        "bias": [0, 7, 36],
        "bad_words": [4, 9, 30],
        "min_tokens": [2, 36],
        "presence": [1, 6, 8],
        "frequency": [1, 6, 8],
        "repetition": [1, 2, 6, 8],
    }[name]
    np.testing.assert_array_equal(changed, expected)


def test_an_empty_wish_changes_no_bit() -> None:
    logits = make_logits(3, 37)
    logits[0, :3] = [0.0, -0.0, -np.inf]
    logits[:, -1] = [0.0, -0.0, -np.inf]  # where what is unused is added
    assert_bits_equal(shape_cases([RowCase(prompt=[0, 1, 2], output=[0, 1, 2])] * 3, logits), logits)


def test_min_tokens_ends_where_it_says() -> None:
    logits = np.zeros((6, 37), np.float32)
    bias = {4: 1.5}
    cases = [RowCase([9] * 5, [1] * count, bias, banned=[3, 4], min_tokens=4) for count in range(6)]
    assert shape_cases(cases, logits)[:, 3:6].tolist() == [[-np.inf, -np.inf, 0]] * 4 + [[0, 1.5, 0]] * 2


@pytest.mark.parametrize("length", range(1, 9))
def test_a_bad_word_is_banned_at_its_last_token_only(length) -> None:
    word = list(range(10, 10 + length))
    begin = word[:-1]
    cases = [
        RowCase(output=begin, bad_words=[word]),
        RowCase(output=[20, *begin], bad_words=[word]),
        RowCase(output=[*begin, 20], bad_words=[word]),  # interrupted
        RowCase(output=begin[1:], bad_words=[word]),  # its first token is missing
        RowCase(prompt=begin, bad_words=[word]),  # a prompt may say what it wants
        RowCase(output=[*begin[:-1], 21] if begin else [], bad_words=[word]),
    ]
    found = shape_cases(cases, make_logits(6, 37))
    banned = [bool(row[word[-1]] == -np.inf) for row in found]
    assert banned == ([True] * 6 if length == 1 else [True, True, False, False, False, False])
    assert np.isfinite(np.delete(found, word[-1], axis=1)).all()


def test_overlapping_bad_words_are_all_seen() -> None:
    words = [[1, 1], [1, 1, 1], [1, 1, 2], [2, 1, 3], [1, 4], [1, 1, 1, 1, 1, 1, 1, 5]]
    outputs = {
        (1,): {1, 4},
        (1, 1): {1, 2, 4},
        (2, 1): {1, 3, 4},
        (1,) * 6: {1, 2, 4},
        (1,) * 7: {1, 2, 4, 5},
        (2, *(1,) * 6): {1, 2, 4},
        (3,): set(),
    }
    cases = [RowCase(output=list(output), bad_words=words) for output in outputs]
    found = shape_cases(cases, make_logits(len(cases), 37))
    assert [set(np.flatnonzero(row == -np.inf)) for row in found] == list(outputs.values())


def test_bad_words_are_followed_as_tokens_are_sampled() -> None:
    """The likeliest token is always 5, then 6, then 7: the word 5 6 7 must break off, again and again."""
    case = RowCase(prompt=[5, 6], bad_words=[[5, 6, 7]])
    row_ids, state = np.array([4]), make_state([case], np.array([4]), R, 37)
    ids = []
    for position in range(2, 11):
        logits = np.zeros((1, 37), np.float32)
        logits[0, 5 + (position - 2) % 3] = 2
        logits[0, 20] = 1
        inputs = make_inputs(1, temperature=0, has_edits=1, positions=position)
        state, token, _ = step(state, logits, inputs, row_ids, np.array([True]))
        ids.append(int(token[0]))
    assert ids == [5, 6, 20] * 3


def test_penalties_follow_the_tokens_that_are_sampled() -> None:
    case = RowCase(prompt=[3], frequency=0.5, presence=0.25, repetition=2.0)
    row_ids, state = np.array([2]), make_state([case], np.array([2]), R, 37)
    logits = np.zeros((1, 37), np.float32)
    logits[0, [3, 8, 9]] = [4.5, 3.0, 2.0]
    for _ in range(12):
        inputs = make_inputs(1, temperature=0, **case_columns([case]))
        expected = shape_row(logits[0], case)
        state, ids, shaped = step(state, logits, inputs, row_ids, np.array([True]))
        assert_bits_equal(np.asarray(shaped)[0], expected)
        assert ids[0] == expected.argmax()
        case.output.append(int(ids[0]))
    assert len(set(case.output)) > 2


def test_contradictions_are_reported_and_stay_alone() -> None:
    cases = [
        RowCase(allowed=[3], banned=[3], min_tokens=2, bias={3: 100.0}),
        RowCase(allowed=[3, 4], bad_words=[[3], [4]]),
        RowCase(allowed=[]),
        RowCase(allowed=[3]),
        RowCase(is_on=False),
    ]
    logits, row_ids = make_logits(5, 37), np.arange(5)
    state = make_state(cases, row_ids, R, 37)
    for temperature in (0, 1):
        inputs = make_inputs(5, temperature=temperature, **case_columns(cases))
        _, ids, shaped = step(state, logits, inputs, row_ids, np.ones(5, bool))
        np.testing.assert_array_equal(finite_rows(shaped), [False] * 3 + [True] * 2)
        assert finite_rows(logits).all()
        assert ids[:4].tolist() == [0, 0, 0, 3]
        assert ids[4] == run(logits, inputs, vocab_size=37)[4]


@pytest.mark.parametrize("size", [37, 331])
def test_rows_switched_off_draw_what_sample_alone_draws(size) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        cases = [random_case(rng, size) for _ in range(8)]
        for case in cases[::2]:
            case.is_on = False
        logits, row_ids = make_logits(8, size, seed), rng.permutation(R)[:8]
        state = make_state(cases, row_ids, R, size)
        inputs = mixed_inputs(8, seed, **case_columns(cases))
        after, ids, shaped = step(state, logits, inputs, row_ids, np.ones(8, bool))
        assert_bits_equal(np.asarray(shaped)[::2], logits[::2])
        np.testing.assert_array_equal(ids[::2], run(logits, inputs, vocab_size=size)[::2])
        for before, now in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(before[row_ids[::2]], now[row_ids[::2]])


@pytest.mark.parametrize("size", [37, 331, 1024])
def test_a_row_alone_is_what_it_is_in_any_batch(size) -> None:
    for seed in range(2):
        rng = np.random.default_rng(seed)
        cases = [random_case(rng, size, exact=False) for _ in range(8)]
        logits, row_ids = make_logits(8, size, seed), rng.permutation(R)[:8]
        faulty = 5
        logits[faulty, 3] = np.nan  # what this row draws is arbitrary, and replaced by a report
        state = make_state(cases, row_ids, R, size)
        inputs, keep = mixed_inputs(8, seed, **case_columns(cases)), np.ones(8, bool)
        together, ids, shaped = step(state, logits, inputs, row_ids, keep)
        for row in range(8):
            part = slice(row, row + 1)
            alone, id_alone, shaped_alone = step(state, logits[part], take(inputs, part), row_ids[part], keep[part])
            assert_bits_equal(np.asarray(shaped_alone)[0], np.asarray(shaped)[row])
            if row == faulty:
                continue
            assert id_alone[0] == ids[row]
            for left, right in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
                np.testing.assert_array_equal(left[row_ids[row]], right[row_ids[row]])


@pytest.mark.parametrize("size", [1, 32, 37, 331])
def test_mask_keeps_bits_and_bans_the_rest(size) -> None:
    rng = np.random.default_rng(size)
    allowed = rng.random((4, size)) < 0.5
    allowed[0] = True
    logits = make_logits(4, size)
    assert_bits_equal(np.asarray(mask(logits, pack_bits(allowed))), np.where(allowed, logits, np.float32(-np.inf)))


def test_padding_is_banned_though_a_state_speaks_of_it() -> None:
    case = RowCase(bias={35: 90.0}, allowed=[1, 35], banned=[1], min_tokens=3)
    logits, row_ids = make_logits(2, 37), np.array([3, 6])
    cases = [case, RowCase(is_on=False)]
    state, inputs = make_state(cases, row_ids, R, 37), make_inputs(2, **case_columns(cases))
    shaped = np.asarray(shape(logits, inputs, state, row_ids, vocab_size=33))
    assert np.all(shaped[:, 33:] == -np.inf)
    np.testing.assert_array_equal(finite_rows(shaped), [False, True])


FILTERS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 12},
    "top_p": {"temperature": 1.5, "top_p": 0.8},
    "min_p": {"min_p": 0.03},
    "all": {"temperature": 1.3, "top_k": 60, "top_p": 0.9, "min_p": 0.002},
}
SHAPES = {
    "penalties": RowCase(prompt=list(range(40)), output=[*range(60), 5, 5], presence=1, frequency=0.5, repetition=1.5),
    "bias": RowCase(bias={token: (-1.0) ** token * 3 for token in range(200)}),
    "allowed": RowCase(allowed=list(range(0, 331, 3))),
    "everything": RowCase(
        prompt=[4] * 9,
        output=[*range(0, 90, 3)],
        bias={6: 5.0, 9: 2.0, 12: -4.0},
        allowed=list(range(0, 331, 2)),
        bad_words=[[8], [87, 10]],
        banned=[14, 16],
        min_tokens=50,
        presence=0.5,
        frequency=-0.25,
        repetition=0.8,
    ),
}


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("wish", SHAPES)
def test_draws_follow_the_shaped_distribution(wish, filters) -> None:
    rows, size, case = 512, 331, SHAPES[wish]
    logits = make_logits(1, size, seed=9) / 2
    state = make_state([case], np.array([0]), 1, size)
    ids = []
    for number in range(12):
        columns = case_columns([case]) | FILTERS[filters] | {"seed_low": np.arange(rows) + number * rows}
        repeated = np.repeat(logits, rows, axis=0)
        ids.append(step(state, repeated, make_inputs(rows, **columns), np.zeros(rows, int), np.zeros(rows, bool))[1])
    ids = np.concatenate(ids)
    expected = {"temperature": 1.0} | FILTERS[filters]
    assert chi_square(ids, probabilities(shape_row(logits[0], case), **expected)) < 5
    assert chi_square(ids, probabilities(logits[0], **expected)) > 5  # the wish does show in the draws


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_no_platform_branches_sorts_or_loops(platform) -> None:
    specs = sampler_state_specs(5, 331)
    row_ids, words = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((2, 11), jnp.uint32)

    def shape_and_record(state, logits, inputs, row_ids, words):
        def shape_row(line, words, inputs, row_id):
            return sampling.shape_logits(sampling.mask_logits(line, words), inputs, state, row_id, vocab_size=331)

        shaped = jax.vmap(shape_row)(logits, words, inputs, row_ids)  # as `map_rows` does for accelerators
        return shaped, record(state, row_ids, row_ids, row_ids > 0)

    traced = jax.jit(shape_and_record).trace(
        specs, jax.ShapeDtypeStruct((2, 331), jnp.float32), make_inputs(2), row_ids, words
    )
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    for operation in ("stablehlo.sort", "top_k", "stablehlo.while", "stablehlo.case", "stablehlo.if"):
        assert operation not in text
    # Bad words, edits, counts, recent tokens; and an automaton's tokens, line and state.
    assert text.count('"stablehlo.scatter"') == 7
