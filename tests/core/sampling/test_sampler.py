from __future__ import annotations

from functools import partial
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.sampling import draw
from tests.core.sampling.cases import (
    chi_square,
    finite_rows,
    make_inputs,
    make_logits,
    mixed_inputs,
    sample,
    sample_greedy,
    take,
)
from tests.core.sampling.oracle import kept_tokens, probabilities
from tests.examples import scale_examples

run = jax.jit(sample, static_argnames="vocab_size")


@pytest.mark.parametrize("size", [1, 128, 331, 8192, 32000])
@pytest.mark.parametrize("rows", [2, 32])
def test_greedy_is_the_first_largest(rows, size) -> None:
    logits = np.round(make_logits(rows, size))  # full of ties
    expected = logits.argmax(axis=-1)
    np.testing.assert_array_equal(jax.jit(sample_greedy)(logits), expected)
    inputs = make_inputs(rows, temperature=np.where(np.arange(rows) % 2, 1.0, 0.0), top_k=3, top_p=0.5)
    np.testing.assert_array_equal(run(logits, inputs, vocab_size=size)[::2], expected[::2])


def test_greedy_ignores_padding() -> None:
    logits = make_logits(4, 384)
    logits[:, 331:] += 100
    np.testing.assert_array_equal(sample_greedy(logits, vocab_size=331), logits[:, :331].argmax(axis=-1))


@pytest.mark.parametrize("size", [331, 8192])
def test_a_row_alone_draws_what_it_draws_in_any_batch(size) -> None:
    for seed in range(4):
        logits, inputs = make_logits(32, size, seed), mixed_inputs(32, seed)
        together = np.asarray(run(logits, inputs, vocab_size=size))
        order = np.random.default_rng(seed).permutation(32)
        np.testing.assert_array_equal(run(logits[order], take(inputs, order), vocab_size=size), together[order])
        for width in (1, 2):
            parts = [slice(start, start + width) for start in range(0, 32, width)]
            alone = [run(logits[part], take(inputs, part), vocab_size=size) for part in parts]
            np.testing.assert_array_equal(np.concatenate(alone), together)


def test_accelerator_form_draws_the_same_tokens() -> None:
    logits, inputs = make_logits(64, 331), mixed_inputs(64, 1)
    with mock.patch.object(draw, "draw_from_few", draw.draw_in_fixed_passes):  # what CPU takes, at trace time
        other = jax.jit(partial(sample, vocab_size=331))(logits, inputs)
    np.testing.assert_array_equal(run(logits, inputs, vocab_size=331), other)


@pytest.mark.parametrize("width", [331, 384, 512])
def test_padding_lanes_change_nothing(width) -> None:
    logits, inputs = make_logits(16, 331), mixed_inputs(16, 2)
    padded = np.pad(logits, ((0, 0), (0, width - 331)), constant_values=50)
    np.testing.assert_array_equal(run(padded, inputs, vocab_size=331), run(logits, inputs, vocab_size=331))


@pytest.mark.parametrize("width", [1, 128])
def test_vocabulary_of_one_token(width) -> None:
    ids = run(np.zeros((3, width), np.float32), make_inputs(3, temperature=[0, 1, 9], top_p=0.5), vocab_size=1)
    np.testing.assert_array_equal(ids, 0)


@settings(max_examples=scale_examples(60), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([0, 1, 30, 1e4, 1e30]), allowed=st.integers(1, 331))
def test_drawn_ids_are_kept_ids(seed, scale, allowed) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(8, 331)) * scale).astype(np.float32)
    logits[np.argsort(rng.random((8, 331)), axis=-1) >= allowed] = -np.inf
    inputs = mixed_inputs(8, seed)
    ids = np.asarray(run(logits, inputs, vocab_size=331))
    for row in np.flatnonzero(inputs.temperature):
        filters = {name: getattr(inputs, name)[row].item() for name in ("temperature", "top_k", "top_p", "min_p")}
        assert kept_tokens(logits[row], **filters, slack=2e-6)[ids[row]]
        assert logits[row, ids[row]] > -np.inf


CASES = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_p": {"temperature": 1.5, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "all": {"temperature": 1.3, "top_k": 100, "top_p": 0.9, "min_p": 0.002},
}


@pytest.mark.parametrize(("case", "size", "vary"), [
    *((case, 331, "seed_low") for case in CASES),
    ("all", 331, "seed_high"), ("all", 331, "positions"), ("all", 331, "sequence_index"),
    ("temperature", 8192, "positions"), ("all", 8192, "positions"),
])  # fmt: skip
def test_draws_follow_the_distribution(case, size, vary) -> None:
    rows = 512
    logits = make_logits(1, size, seed=9)
    ids = []
    for step in range(24):
        columns = {"seed_low": 11, vary: np.arange(rows) + step * rows, **CASES[case]}
        ids.append(run(np.repeat(logits, rows, axis=0), make_inputs(rows, **columns), vocab_size=size))
    ids = np.concatenate(ids)
    assert chi_square(ids, probabilities(logits[0], **CASES[case])) < 5
    wrong = CASES[case] | {"temperature": CASES[case]["temperature"] * 1.1}
    assert chi_square(ids, probabilities(logits[0], **wrong)) > 5  # the statistic does find 10 % of temperature


def test_nearly_zero_temperature_is_greedy() -> None:
    logits = make_logits(8, 331)
    for temperature in (1e-4, 1e-6, 1e-30, 1e-45):
        ids = run(logits, make_inputs(8, temperature=temperature), vocab_size=331)
        np.testing.assert_array_equal(ids, logits.argmax(axis=-1), err_msg=str(temperature))


@pytest.mark.parametrize("size", [1, 331, 8192])
@pytest.mark.parametrize("rows", [1, 5])
def test_finite_rows(rows, size) -> None:
    for place in {0, size // 2, size - 1}:
        for value, finite in ((np.nan, False), (np.inf, False), (-np.inf, size > 1), (3e38, True)):
            logits = make_logits(rows, size)
            logits[-1, place] = value
            expected = [True] * (rows - 1) + [finite]
            np.testing.assert_array_equal(jax.jit(finite_rows)(logits), expected, err_msg=f"{value} at {place}")
    assert not finite_rows(np.full((1, size), -np.inf, np.float32))[0]


def test_a_faulty_row_harms_no_other_and_gets_an_id() -> None:
    logits, inputs = make_logits(8, 331), mixed_inputs(8, 4)
    expected = np.asarray(run(logits, inputs, vocab_size=331))
    for fault in (np.nan, np.inf, -np.inf):
        for lanes in (slice(None), slice(3, 4)):
            broken = logits.copy()
            broken[2:4, lanes] = fault
            ids = np.asarray(run(broken, inputs, vocab_size=331))
            assert np.all((ids >= 0) & (ids < 331))
            np.testing.assert_array_equal(np.delete(ids, [2, 3]), np.delete(expected, [2, 3]))
