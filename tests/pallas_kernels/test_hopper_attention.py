"""The Hopper implementation as a whole, interpreted: both kernels and the write, on the shared cases."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.backends import choose_layout, find_backend
from pallas_kernels.testing.case import LAYER, Case, largest_error, make_inputs
from pallas_kernels.testing.cases import CASES
from pallas_kernels.testing.reference import attend_by_formula
from pallas_kernels.testing.runner import run_case
from tests.pallas_kernels.gpu_interpreter import reset_interpreter

IMPL = "gpu_interpret"


def with_layout(case: Case) -> Case:
    return case.with_layout(choose_layout(IMPL, case.spec))


ALLOWED = [with_layout(c) for c in CASES if find_backend(IMPL).module.find_obstacle(with_layout(c).shape) is None]
MIXED = [case for case in ALLOWED if case.max_query_len is None]
CI = (  # the others only show again what these do
    "mixed fp8 4:2 of 64, window, softcap",
    "cross mixed",
)
PARAMS = [pytest.param(case, id=case.name, marks=[] if case.name in CI else pytest.mark.thorough) for case in MIXED]


def test_the_cases_cover_both_kernels() -> None:
    assert len(ALLOWED) - len(MIXED) >= 8 and len(MIXED) >= 8
    assert {case.name for case in MIXED} >= set(CI), "a case was renamed"


@pytest.mark.slow
@pytest.mark.parametrize("case", PARAMS)
def test_mixed_steps(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    check(case, capfd)


def check(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """At the sizes that the kernels choose themselves."""
    inputs = make_inputs(case)
    try:
        out, kv_pages = run_case(case, inputs, impl=IMPL)
    except Exception:
        reset_interpreter()
        raise
    expected, expected_pages = attend_by_formula(case, inputs)
    assert largest_error(case, out, expected, inputs.num_tokens) < 1
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
    null_page = LAYER * inputs.num_pages
    pools = [np.delete(np.asarray(pool).view(np.uint8), null_page, 0) for pool in (kv_pages, expected_pages)]
    np.testing.assert_array_equal(*pools)
