from __future__ import annotations

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.sampling import draw
from jaxserve.core.sampling.thresholds import BLOCK, make_filters
from tests.core.sampling.cases import make_inputs, make_logits, sample
from tests.core.sampling.oracle import kept_tokens
from tests.examples import scale_examples

SIZE = 16 * BLOCK
FEW = 4  # blocks that the form for CPUs looks at first, here
SLACK = 2e-6  # of a float32 cumulative mass


@pytest.fixture(scope="module")
def forms():
    """The forms of `draw`, and that for CPUs with so few candidates that they often do not do."""

    def build(form):
        def run(logits, top_k, top_p, min_p, uniform):
            return run_form(form, logits, make_filters(top_k, top_p, min_p, SIZE), uniform)

        return jax.jit(lambda *columns: jax.lax.map(lambda row: run(*row), columns))

    built = {"fixed": build(draw.draw_in_fixed_passes), "all": build(draw.draw_from_few), "few": build(_draw_from_four)}
    return lambda *columns: {name: np.asarray(form(*columns)) for name, form in built.items()}


def run_form(form, logits, filters, uniform) -> jax.Array:
    blocks = logits.reshape(-1, BLOCK)
    return form(draw.RowLogits(blocks, jnp.max(blocks, axis=-1), jnp.float32(1)), filters, uniform)


def _draw_from_four(*arguments) -> jax.Array:
    with mock.patch.object(draw, "NUM_CANDIDATE_BLOCKS", FEW):
        return draw.draw_from_few(*arguments)


def make_scaled(kind: str, rows: int, seed: int) -> np.ndarray:
    """`flat`: many tokens count. `steep`: few do. `tied`: many are equal. `masked`: most are banned."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, SIZE)) * {"flat": 0.5, "steep": 6, "tied": 2, "masked": 2}[kind]
    if kind == "tied":
        logits = np.round(logits)
    if kind == "masked":
        logits[rng.random(logits.shape) < 0.99] = -np.inf
    logits[:, 0] = 0
    return (logits - logits.max(axis=1, keepdims=True)).astype(np.float32)


def make_columns(rows: int, seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    top_k = rng.choice([0, 1, 2, 3, 4, 5, 50, 500, SIZE], rows).astype(np.int32)
    top_p = rng.choice([1, 0.99, 0.9, 0.5, 0.05], rows).astype(np.float32)
    min_p = rng.choice([0, 0, 1e-3, 0.05, 0.5], rows).astype(np.float32)
    return top_k, top_p, min_p, rng.random(rows).astype(np.float32)


@pytest.mark.parametrize("kind", ["flat", "steep", "tied", "masked"])
def test_forms_draw_the_same_tokens(forms, kind) -> None:
    for seed in range(8):
        found = forms(make_scaled(kind, 64, seed), *make_columns(64, seed))
        np.testing.assert_array_equal(found["few"], found["fixed"], err_msg=f"seed {seed}")
        np.testing.assert_array_equal(found["all"], found["fixed"], err_msg=f"seed {seed}")


@settings(max_examples=scale_examples(40), deadline=None)
@given(kind=st.sampled_from(["flat", "steep", "tied", "masked"]), seed=st.integers(0, 2**32 - 1))
def test_the_token_is_the_one_that_the_number_falls_on(forms, kind, seed) -> None:
    scaled, columns = make_scaled(kind, 8, seed), make_columns(8, seed)
    for form, ids in forms(scaled, *columns).items():
        for row, token in enumerate(ids):
            top_k, top_p, min_p, uniform = (column[row].item() for column in columns)
            filters = {"temperature": 1.0, "top_k": top_k, "top_p": top_p, "min_p": min_p}
            must, may = (kept_tokens(scaled[row], **filters, slack=slack) for slack in (-SLACK, SLACK))
            assert may[token], (form, filters)
            if not np.array_equal(must, may):
                continue  # rounding decides what is kept, and so the sums
            weights = np.where(must, np.exp(scaled[row].astype(np.float64)), 0)
            ends = np.cumsum(weights / weights.sum())
            assert ends[token] - weights[token] / weights.sum() - SLACK <= uniform <= ends[token] + SLACK, form


def test_a_top_p_that_float32_cannot_hold_keeps_the_likeliest_token(forms) -> None:
    rows, scaled = 8, make_scaled("masked", 8, 3)
    top_k, min_p = np.int32([0, 1, 50, 0] * 2), np.float32([0, 0, 0, 0.1, 0, 0.5, 1, 1])
    for top_p in (1e-38, 1e-50):
        columns = np.full(rows, top_p, np.float32), min_p, np.full(rows, 0.5, np.float32)
        for form, ids in forms(scaled, top_k, *columns).items():
            np.testing.assert_array_equal(ids, scaled.argmax(axis=1), err_msg=f"{form} {top_p}")


def test_few_blocks_do_for_steep_rows_and_not_for_flat_ones() -> None:
    """A draw over all tokens is made to fail, so that the form for CPUs shows when it needs one."""

    def run(scaled, top_k, top_p, min_p):
        filters = make_filters(jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p), SIZE)
        with mock.patch.object(draw, "find_threshold", lambda *_: jnp.float32(jnp.nan)):  # keeps no token: id 0
            return int(run_form(jax.jit(_draw_from_four), scaled, filters, jnp.float32(0.5)))

    steep, flat = jnp.full(SIZE, -20.0).at[5 * BLOCK + 7].set(0), jnp.zeros(SIZE)
    spread = (
        jnp.full(SIZE, -20.0).at[jnp.arange(8) * BLOCK + 3].set(-jnp.arange(8) / 8)
    )  # one token in each of 8 blocks
    assert run(steep, 0, 0.9, 0) == run(steep, 1, 1, 0) == run(steep, 0, 1, 0.5) == 5 * BLOCK + 7
    assert run(spread, 3, 1, 0) > 0  # three tokens lie above the fourth block's largest
    assert run(spread, 4, 1, 0) == run(spread, 0, 0.9, 0) == run(flat, 0, 0.5, 0) == run(flat, 3, 1, 0) == 0


_invert = jax.jit(lambda weights, uniform: draw.invert_cumulative(weights, lambda line: line, uniform))


@settings(max_examples=scale_examples(100), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kept=st.integers(1, 1024),
    span=st.sampled_from([0, 5, 60]),
    uniform=st.sampled_from([0.0, 2**-24, 0.5, 1 - 2**-23, 1 - 2**-24, 1.0]) | st.floats(0, 1),
)
def test_draw_never_meets_an_empty_entry(seed, kept, span, uniform) -> None:
    """Whatever rounding does: u is even allowed to be 1 here."""
    rng = np.random.default_rng(seed)
    weights = np.exp(-span * rng.random(1024)).astype(np.float32)
    weights[np.argsort(rng.random(1024)) >= kept] = 0
    token = int(_invert(weights.reshape(-1, BLOCK), np.float32(uniform)))
    cumulative = weights.cumsum(dtype=np.float64) / weights.sum(dtype=np.float64)
    assert weights[token] > 0
    below = cumulative[token - 1] if token else 0
    assert below - SLACK <= uniform <= cumulative[token] + SLACK


def test_form_for_accelerators_has_no_branch_and_no_open_loop() -> None:
    inputs = make_inputs(2, temperature=0.5, top_k=3, top_p=0.5)
    filters = make_filters(inputs.top_k, inputs.top_p, inputs.min_p, 32768)
    arguments = (draw.RowLogits(jnp.zeros((2, 256, BLOCK)), jnp.zeros((2, 256)), jnp.ones(2)), filters, jnp.zeros(2))
    programs = [
        str(jax.make_jaxpr(jax.vmap(form))(*arguments)) for form in (draw.draw_from_few, draw.draw_in_fixed_passes)
    ]
    assert ["while[" in program for program in programs] == [True, False]
    assert "cond[" not in programs[1]


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_no_platform_sorts_the_vocabulary_and_only_cpu_loops_over_rows(platform) -> None:
    logits, inputs = make_logits(2, 32768), make_inputs(2, temperature=0.5, top_k=3, top_p=0.5)
    traced = jax.jit(partial(sample, vocab_size=32768)).trace(logits, inputs)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("top_k" in text) == (platform == "cpu")  # of the blocks' maxima
    assert not any("sort" in line and "32768" in line for line in text.splitlines())
    if platform != "cpu":
        assert text.count("stablehlo.while") == 2  # a search each for top_k and top_p
