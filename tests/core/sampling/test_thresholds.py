from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.sampling import thresholds
from tests.core.sampling.oracle import kept_tokens
from tests.examples import scale_examples

FORMS = {"until_exact": thresholds.search_until_exact, "fixed": thresholds.search_fixed}
FILTERS = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
OFF = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
SLACK = 2e-6  # of a float32 cumulative mass and of a scaled logit
KINDS = ("normal", "tied", "masked", "constant", "one")


@pytest.fixture(scope="module")
def kept_by_form():
    """`find_threshold` with either form of the search: (logits, **filters) -> {form: bool[S, V]}."""

    def build(search):
        def kept(row):
            logits, temperature, top_k, top_p, min_p = row
            size = len(logits)
            padded = jnp.pad(logits, (0, -size % thresholds.BLOCK), constant_values=-jnp.inf)
            scaled = (padded - jnp.max(padded)) * (1 / temperature)
            filters = thresholds.make_filters(top_k, top_p, min_p, size)
            blocks = scaled.reshape(-1, thresholds.BLOCK)
            return (scaled >= thresholds.find_threshold(search, blocks, filters))[:size]

        return jax.jit(lambda logits, **columns: jax.lax.map(kept, (logits, *(columns[name] for name in FILTERS))))

    compiled = {name: build(form) for name, form in FORMS.items()}

    def kept(logits, **filters):
        columns = {
            name: np.broadcast_to(np.asarray(filters.get(name, OFF[name]), dtype), len(logits))
            for name, dtype in FILTERS.items()
        }
        return {name: np.asarray(form(np.asarray(logits, np.float32), **columns)) for name, form in compiled.items()}

    return kept


def assert_kept(kept_by_form, logits, **filters):
    """Compares both forms with the oracle, up to float32 rounding."""
    columns = {
        name: np.broadcast_to(np.asarray(values, FILTERS[name]), len(logits)) for name, values in filters.items()
    }
    for form, kept in kept_by_form(logits, **columns).items():
        for row, row_logits in enumerate(logits):
            values = {name: column[row].item() for name, column in columns.items()}
            must, may = (kept_tokens(row_logits, **values, slack=slack) for slack in (-SLACK, SLACK))
            assert kept[row][np.argmax(row_logits)], (form, values)
            assert not np.any(must & ~kept[row]), f"{form} dropped {np.flatnonzero(must & ~kept[row])[:5]} at {values}"
            assert not np.any(kept[row] & ~may), f"{form} kept {np.flatnonzero(kept[row] & ~may)[:5]} at {values}"


def make_logits(kind: str, seed: int, rows: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, size)) * rng.uniform(0.1, 6, size=(rows, 1)) + rng.normal(size=(rows, 1)) * 20
    if kind == "tied":
        logits = np.round(logits)
    elif kind == "masked":
        logits[:, 1:][rng.random((rows, size - 1)) < rng.random()] = -np.inf
    elif kind == "constant":
        logits[:] = logits[:, :1]
    elif kind == "one":
        logits[:, size // 2] += 200
    return logits.astype(np.float32)


def filters_of_a_row() -> st.SearchStrategy[dict[str, float]]:
    return st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.01, 0.7, 1.0, 10.0]) | st.floats(0.01, 10),
            "top_k": st.sampled_from([0, 1, 2, 50, 128, 330, 331, 10**9]) | st.integers(1, 331),
            "top_p": st.sampled_from([1.0, 0.95, 0.5, 1e-6]) | st.floats(1e-3, 1),
            "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]) | st.floats(0, 0.99),
        }
    )


@settings(max_examples=scale_examples(100), deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 5, 331]),
    rows=st.lists(filters_of_a_row(), min_size=4, max_size=4),
)
def test_kept_set_is_the_sorted_one(kept_by_form, kind, seed, size, rows) -> None:
    columns = {name: [row[name] for row in rows] for name in FILTERS}
    assert_kept(kept_by_form, make_logits(kind, seed, 4, size), **columns)


@pytest.mark.parametrize("size", [8192, 32000])
@pytest.mark.parametrize("kind", ["normal", "tied"])
def test_kept_set_of_large_vocabularies(kept_by_form, size, kind) -> None:
    rows = np.arange(8)
    rng = np.random.default_rng(size)
    assert_kept(
        kept_by_form,
        make_logits(kind, 3, len(rows), size),
        temperature=rng.choice([0.05, 0.5, 1.0, 3.0, 10.0], len(rows)),
        top_k=[0, 1, 50, 129, 1000, size // 2, size - 1, size],
        top_p=np.where(rows % 4 == 1, 1.0, rng.uniform(0.05, 0.999, len(rows))),
        min_p=np.where(rows % 3 == 0, rng.uniform(0, 0.2, len(rows)), 0),
    )


def test_filters_apply_in_order_and_renormalise(kept_by_form) -> None:
    logits = np.log(np.float32([[0.4, 0.2, 0.2, 0.1, 0.06, 0.04]])).repeat(6, axis=0)
    expected = [
        3,  # top_k 2: the tie with the second stays
        1,  # top_k 3 leaves .8, of which .4 is half: top_p .49 needs one token
        3,  # of all tokens .4 is less than .49, and the next two are tied
        4,  # min_p .2 keeps .08 and more
        3,  # min_p .4 leaves .8, of which top_p .6 needs .48
        5,  # top_p .95 of everything
    ]
    filters = {"top_k": [2, 3, 0, 0, 0, 0], "top_p": [1, 0.49, 0.49, 1, 0.6, 0.95], "min_p": [0, 0, 0, 0.2, 0.4, 0]}
    for name, kept in kept_by_form(logits, **filters).items():
        np.testing.assert_array_equal(kept, np.arange(6) < np.array(expected)[:, None], err_msg=name)


def test_forms_keep_the_same_tokens(kept_by_form) -> None:
    rng = np.random.default_rng(5)
    for kind in KINDS:
        kept = kept_by_form(
            make_logits(kind, 6, 16, 331),
            temperature=rng.uniform(0.3, 2, 16),
            top_k=rng.integers(0, 331, 16),
            top_p=rng.uniform(0.2, 1, 16),
            min_p=rng.choice([0, 0.01], 16),
        )
        np.testing.assert_array_equal(kept["until_exact"], kept["fixed"], err_msg=kind)
