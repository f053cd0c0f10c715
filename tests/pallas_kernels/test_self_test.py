"""The self-test of a start: every kind of fault is found, and nothing is said of kernels that are right."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NoReturn

import jax
import pytest

from pallas_kernels.backends import choose_layout
from pallas_kernels.spec import AttnShape, KVSpec
from pallas_kernels.testing import self_test
from pallas_kernels.testing.case import Case, Inputs, make_inputs
from pallas_kernels.testing.runner import run_case
from pallas_kernels.testing.self_test import LONGEST_WINDOW, list_cases, run_self_test
from tests.pallas_kernels.cpu_kernel import FAULTS, serve_kernel

SIZES = {"num_rows": 4, "num_tokens": 160, "table_width": 8}


def make_shape(impl: str, head_dim: int = 32, *, dtype: str = "bfloat16", window: int | None = None) -> AttnShape:
    spec = KVSpec(2, head_dim, 32, dtype)
    return AttnShape(4, replace(spec, layout=choose_layout(impl, spec)), "bfloat16", window)


@pytest.mark.parametrize(
    ("dtype", "window"), [pytest.param("bfloat16", None, marks=pytest.mark.thorough), ("float8_e4m3fn", 100)]
)
def test_a_kernel_that_is_right_passes(dtype: str, window: int | None) -> None:
    with serve_kernel():
        assert run_self_test("gpu", make_shape("gpu", dtype=dtype, window=window), **SIZES) is None


def test_latents_are_tested_too() -> None:
    shape = AttnShape(16, KVSpec(1, 72, 32, "bfloat16", "padded", value_dim=64), "bfloat16")
    with serve_kernel():
        assert run_self_test("gpu", shape, **SIZES) is None
    with serve_kernel("wrong keys"):
        assert "wrong keys or values" in str(run_self_test("gpu", shape, **SIZES))


@pytest.mark.parametrize(("fault", "message"), FAULTS.items())
def test_faults_are_found(fault: str, message: str) -> None:
    with serve_kernel(fault):
        said = run_self_test("gpu", make_shape("gpu"), **SIZES)
    assert said is not None and message in said and said.startswith(("decode batch: ", "mixed batch: "))
    assert "\n" not in said


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("impl", ["gpu_interpret", "ampere_interpret", "tpu_interpret"])
def test_the_kernels_pass(impl: str) -> None:
    assert run_self_test(impl, make_shape(impl, 64), num_rows=2, num_tokens=64, table_width=3) is None


def test_cases_fit_every_engine() -> None:
    for rows, tokens, width, size in itertools.product((1, 2, 8, 64), (1, 16, 64, 512), (1, 2, 40), (8, 64)):
        for window in (None, 3, LONGEST_WINDOW, LONGEST_WINDOW + 1):
            shape = replace(make_shape("xla"), spec=KVSpec(2, 32, size, "bfloat16"), window=window)
            cases = list_cases(shape, num_rows=rows, num_tokens=max(rows, tokens), table_width=width, softcap=9.0)
            assert cases[0].max_query_len == 1 and cases[0].shape == shape and cases[0].softcap == 9.0
            for case in cases:
                assert 0 < len(case.rows) <= rows and sum(new for _, new in case.rows) <= case.max_tokens
                assert all(new > 0 and 0 <= computed <= width * size - new for computed, new in case.rows)


def test_rows_leave_the_window_and_the_null_page_is_nobodys() -> None:
    shape = make_shape("xla", window=100)
    decode, mixed = list_cases(shape, **SIZES)
    assert decode.rows[0][0] > 100 < max(computed for computed, new in mixed.rows if new > 1)
    assert mixed.num_chunks == 2 and mixed.rows[0][1] == 1
    pages = sum(-(-(computed + new) // 32) for computed, new in mixed.rows)
    inputs = make_inputs(replace(mixed, max_pages=pages))
    assert inputs.kv_pages.shape[0] == 2 * (2 + pages)


def test_a_tpu_runs_each_batch_with_bounds_checked_and_then_as_it_will_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(case: Case, inputs: Inputs, *, impl: str, checks_bounds: bool) -> tuple[jax.Array, jax.Array]:
        seen.append((case.name, checks_bounds))
        return run_case(case, inputs)

    monkeypatch.setattr(self_test, "run_case", run)
    assert run_self_test("tpu", make_shape("xla", 128), **SIZES) is None
    assert seen == [(name, checked) for name in ("decode batch", "mixed batch") for checked in (True, False)]


def test_a_copy_out_of_bounds_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: Case, inputs: Inputs, *, impl: str, checks_bounds: bool) -> NoReturn:
        raise RuntimeError("out of bounds" if checks_bounds else "not reached")

    monkeypatch.setattr(self_test, "run_case", run)
    said = run_self_test("tpu", make_shape("xla", 128), **SIZES)
    assert said == "decode batch, bounds checked: RuntimeError: out of bounds"
