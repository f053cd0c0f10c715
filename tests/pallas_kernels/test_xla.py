"""The portable implementation against the oracle, on the shared cases and on random batches, in both loop modes."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.spec import KVSpec
from pallas_kernels.testing.case import LAYER, Case, largest_error, make_inputs
from pallas_kernels.testing.cases import CASES
from pallas_kernels.testing.reference import attend_by_formula
from pallas_kernels.testing.runner import run_case
from pallas_kernels.xla import XlaConfig
from tests.examples import scale_examples
from tests.pallas_kernels.random_batches import draw_batches

MODES = [True, False]


QUICK = {  # as below
    *("decode", "decode window softcap", "decode all padding", "mixed", "mixed window softcap", "mixed all padding"),
    *("a chunk over many tiles", "decode 8:1 of 128, window, softcap, sinks", "decode fp8 8:2 of 128", "8:1 float16"),
    *(
        "drafts verified, 3:1, window, sinks",
        "mixed latents 20 of 320, sinks",
        "pages of one token",
        "decode 8:2 of 192",
    ),
    *("chunks on edges of the step too, in the middle of pages", "encoder", "cross mixed", "tree float32"),
}
assert {case.name for case in CASES} > QUICK, "a case was renamed"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in QUICK else pytest.mark.thorough) for case in CASES],
)
def test_cases(case: Case) -> None:
    check_case(case, bounded=True)


# Head shapes and dtypes are alike in both modes; loops, windows and tiles are not.
STATIC = [case for case in CASES if case.spec == CASES[0].spec or case.sinks]
CI = {  # the others mix what these have
    "decode window softcap",
    "mixed window of a page",
    "a chunk over many tiles",
    "mixed 8:2 of 128 bfloat16, sinks",
}
assert {case.name for case in STATIC} > CI, "a case was renamed"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in CI else pytest.mark.thorough) for case in STATIC],
)
def test_cases_with_static_loops(case: Case) -> None:
    check_case(case, bounded=False)


def check_case(case: Case, *, bounded: bool) -> None:
    inputs = make_inputs(case)
    out, _ = run_case(case, inputs, config=XlaConfig(bounded))
    expected, _ = attend_by_formula(case, inputs)
    assert out.dtype == inputs.q.dtype
    assert largest_error(case, out, expected, inputs.num_tokens) < 1


@pytest.mark.parametrize("layout", ["padded", "paired"])
@pytest.mark.parametrize(
    "bounded", [pytest.param(True, id="bounded"), pytest.param(False, id="static", marks=pytest.mark.thorough)]
)
def test_layouts_of_kernels_read_alike(layout: str, bounded: bool) -> None:
    shape = {"spec": KVSpec(2, 64 if layout == "paired" else 80, 16, "float32")}
    case = Case("mixed", ((0, 1), (40, 1), (0, 17), (31, 2)), window=30, **shape)
    plain, other = make_inputs(case), make_inputs(case.with_layout(layout))
    out, _ = run_case(case, plain, config=XlaConfig(bounded))
    same, _ = run_case(case.with_layout(layout), other, config=XlaConfig(bounded))
    assert largest_error(case, same, out, plain.num_tokens) < 1


# Few static shapes, so that compiling does not dominate; all the rest is drawn.
SHAPES = [
    Case("decode", (), max_tokens=8, max_query_len=1, table_width=20),
    Case("decode window", (), max_tokens=8, max_query_len=1, table_width=20, window=37),
    Case("mixed", (), max_tokens=48, table_width=20),
    Case("mixed window softcap", (), 6, KVSpec(2, 24, 8, "bfloat16"), 21, 3.0, False, 6, 40, 24),
]


@pytest.mark.thorough
@settings(max_examples=scale_examples(60), deadline=None)
@given(case=draw_batches(SHAPES), bounded=st.sampled_from(MODES), seed=st.integers(0, 2**32 - 1))
def test_random_batches(case: Case, bounded: bool, seed: int) -> None:
    inputs = make_inputs(case, seed)
    out, _ = run_case(case, inputs, config=XlaConfig(bounded))
    expected, _ = attend_by_formula(case, inputs)
    assert largest_error(case, out, expected, inputs.num_tokens) < 1


@pytest.mark.parametrize("bounded", MODES, ids=["bounded", "static"])
def test_a_row_alone_gives_the_same_answer(bounded: bool) -> None:
    """A row's answer does not depend on its neighbours' lengths, nor on where their pages lie."""
    case = Case("together", ((100, 1), (3, 1), (20, 30)))
    inputs = make_inputs(case)
    together, _ = run_case(case, inputs, config=XlaConfig(bounded))
    for row, (begin, end) in enumerate(zip(inputs.query_start_loc[:3], inputs.query_start_loc[1:4], strict=True)):
        query_lens = np.where(np.arange(case.max_rows) == row, np.diff(inputs.query_start_loc), 0)
        pad = np.zeros_like(inputs.q)
        alone_inputs = replace(
            inputs,
            q=np.concatenate([inputs.q[begin:end], pad])[: case.max_tokens],
            k=np.concatenate([inputs.k[begin:end], pad[:, :2]])[: case.max_tokens],
            v=np.concatenate([inputs.v[begin:end], pad[:, :2]])[: case.max_tokens],
            query_start_loc=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
        )
        alone, _ = run_case(case, alone_inputs, config=XlaConfig(bounded))
        np.testing.assert_allclose(alone[: end - begin], together[begin:end], atol=2e-6)


def test_nan_in_one_row_stays_in_it() -> None:
    case = Case("three", ((100, 1), (90, 1), (20, 30)))
    inputs = make_inputs(case)
    poisoned = inputs.kv_pages.copy()
    poisoned[LAYER * inputs.num_pages + inputs.page_table[1, 0]] = np.nan
    out, _ = run_case(case, replace(inputs, kv_pages=poisoned))
    clean, _ = run_case(case, inputs)
    assert np.isnan(out[1]).all()
    np.testing.assert_array_equal(np.delete(out, 1, axis=0), np.delete(clean, 1, axis=0))


@pytest.mark.parametrize("bounded", MODES, ids=["bounded", "static"])
def test_static_mode_never_asks_the_device_how_far_to_go(bounded: bool) -> None:
    """XLA on a GPU reads the predicate of such a loop back to the host, and waits for it."""
    case = next(case for case in CASES if case.name == "mixed window softcap")
    inputs = make_inputs(case)
    jaxpr = str(jax.make_jaxpr(lambda: run_case(case, inputs, config=XlaConfig(bounded)))())
    assert ("while[" in jaxpr) is bounded and "cond[" not in jaxpr
