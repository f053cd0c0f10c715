"""The portable implementation against the oracle, on the shared cases and on random batches.

A CPU has small groups and short steps of its own, so some cases are traced as for other devices, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import xla
from pallas_kernels.spec import KVSpec
from pallas_kernels.testing.case import LAYER, Case, largest_error, make_inputs
from pallas_kernels.testing.cases import CASES, MUTUAL_CASES
from pallas_kernels.testing.reference import attend_by_formula
from pallas_kernels.testing.runner import run_case
from tests.examples import scale_examples
from tests.pallas_kernels.platforms import trace_for_platform
from tests.pallas_kernels.random_batches import draw_batches

PLATFORMS = ["cpu", "gpu"]


QUICK = {  # as below
    *("decode", "decode window softcap", "decode all padding", "mixed", "mixed window softcap", "mixed all padding"),
    *("a chunk over many tiles", "decode 8:1 of 128, window, softcap, sinks", "decode fp8 8:2 of 128", "8:1 float16"),
    *(
        "drafts verified, 3:1, window, sinks",
        "mixed latents 20 of 320, sinks",
        "pages of one token",
        "decode 8:2 of 192",
    ),
    *("chunks on edges of the step too, in the middle of pages", "encoder", "cross mixed"),
    "encoder of radius 9",
}
assert {case.name for case in CASES} > QUICK, "a case was renamed"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in QUICK else pytest.mark.thorough) for case in CASES],
)
def test_cases(case: Case) -> None:
    check_case(case, "cpu")


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("case", MUTUAL_CASES, ids=lambda case: case.name)
def test_tokens_that_see_each_other(case: Case, platform: str) -> None:
    check_case(case, platform)


def test_tokens_that_see_each_other_in_pages_of_kernels() -> None:
    check_case(MUTUAL_CASES[1].with_layout("paired"), "cpu")


# Head shapes and dtypes are alike on all platforms; groups, steps and how pages are gathered are not.
ELSEWHERE = [case for case in CASES if case.spec == CASES[0].spec or case.sinks]
CI = {  # the others mix what these have
    "decode window softcap",
    "mixed window of a page",
    "a chunk over many tiles",
    "mixed 8:2 of 128 bfloat16, sinks",
}
assert {case.name for case in ELSEWHERE} > CI, "a case was renamed"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in CI else pytest.mark.thorough) for case in ELSEWHERE],
)
def test_cases_for_other_devices(case: Case) -> None:
    check_case(case, "gpu")


def check_case(case: Case, platform: str) -> None:
    inputs = make_inputs(case)
    with trace_for_platform(platform):
        out, _ = run_case(case, inputs)
    expected, _ = attend_by_formula(case, inputs)
    assert out.dtype == inputs.q.dtype
    assert largest_error(case, out, expected, inputs.num_tokens) < 1


@pytest.mark.parametrize("layout", ["padded", "paired"])
@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.thorough)])
def test_layouts_of_kernels_read_alike(layout: str, platform: str) -> None:
    shape = {"spec": KVSpec(2, 64 if layout == "paired" else 80, 16, "float32")}
    case = Case("mixed", ((0, 1), (40, 1), (0, 17), (31, 2)), window=30, **shape)
    plain, other = make_inputs(case), make_inputs(case.with_layout(layout))
    with trace_for_platform(platform):
        out, _ = run_case(case, plain)
        same, _ = run_case(case.with_layout(layout), other)
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
@given(case=draw_batches(SHAPES), platform=st.sampled_from(PLATFORMS), seed=st.integers(0, 2**32 - 1))
def test_random_batches(case: Case, platform: str, seed: int) -> None:
    inputs = make_inputs(case, seed)
    with trace_for_platform(platform):
        out, _ = run_case(case, inputs)
    expected, _ = attend_by_formula(case, inputs)
    assert largest_error(case, out, expected, inputs.num_tokens) < 1


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_row_alone_gives_the_same_answer(platform: str) -> None:
    """A row's answer does not depend on its neighbours' lengths, nor on where their pages lie."""
    case = Case("together", ((100, 1), (3, 1), (20, 30)))
    inputs = make_inputs(case)
    with trace_for_platform(platform):
        together, _ = run_case(case, inputs)
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
        with trace_for_platform(platform):
            alone, _ = run_case(case, alone_inputs)
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


@pytest.mark.parametrize("platform", [*PLATFORMS, "tpu"])
@pytest.mark.parametrize("name", ["decode", "mixed window softcap"])
def test_no_loop_has_a_fixed_length(name: str, platform: str) -> None:
    case = next(case for case in CASES if case.name == name)
    inputs = make_inputs(case)
    with trace_for_platform(platform):
        jaxpr = str(jax.make_jaxpr(lambda: run_case(case, inputs))())
    assert "while[" in jaxpr and "scan[" not in jaxpr and "cond[" not in jaxpr


@pytest.mark.parametrize(
    ("platform", "turns"),
    [
        (
            "cpu",
            24 + 1 + 16,
        ),  # of 128 keys for the token behind 2,999, and for the other group; of 64 keys for the chunk
        ("gpu", 2 + 1),  # of 2,048 keys
    ],
)
def test_steps_follow_the_contexts_whatever_the_page_table_could_hold(
    platform: str, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []

    def mix_and_count(*args: Any) -> Any:
        jax.debug.callback(lambda: counted.append(1))
        return mix(*args)

    mix = xla._mix
    monkeypatch.setattr(xla, "_mix", mix_and_count)
    rows = ((2999, 1), *[(40, 1)] * 8, (1000, 24))
    for table_width in (200, 800):
        case = Case("long", rows, spec=KVSpec(2, 8, 16, "float32"), max_rows=16, table_width=table_width, max_pages=300)
        with trace_for_platform(platform):
            jax.block_until_ready(run_case(case, make_inputs(case)))
        jax.effects_barrier()
        assert len(counted) == turns
        counted.clear()
