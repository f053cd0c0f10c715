"""The kernel for Ampere and Ada in the interpreter, with race detection, against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest

from pallas_kernels.ampere import attention, compat
from pallas_kernels.ampere.config import AmpereConfig, TileConfig, UnitConfig
from pallas_kernels.ampere.ring import TileRing
from pallas_kernels.backends import choose_layout
from pallas_kernels.mosaic_gpu import compat as gpu
from pallas_kernels.spec import KVSpec
from pallas_kernels.testing.case import LAYER, Case, largest_error, make_inputs
from pallas_kernels.testing.cases import CASES
from pallas_kernels.testing.reference import attend_by_formula
from pallas_kernels.testing.runner import run_case
from tests.pallas_kernels.gpu_interpreter import reset_interpreter

IMPL = "ampere_interpret"
# Few unit slots, because each costs the interpreter a block; rows are cut at 64 tokens.
UNITS = UnitConfig(tile_tokens=32, stages=3, ctas_per_sm=1, num_sms=2, min_split_tokens=64, unit_cost=0)
SPLIT = AmpereConfig(UNITS, TileConfig(tile_tokens=32, stages=3))
LARGE = AmpereConfig(replace(UNITS, tile_tokens=64), TileConfig(tile_tokens=64, stages=2))
WHOLE = replace(SPLIT, decode=replace(UNITS, num_sms=1, min_split_tokens=512))
# The shared cases that run by default: the others show the same again.
FAST = (
    "decode 8:1 of 128, window, softcap, sinks",
    "decode fp8 4:4 of 64, window",
    "drafts verified, 3:1, window, sinks",
    "mixed fp8 4:2 of 64, window, softcap",
    "cross mixed",
)
BF16 = KVSpec(2, 128, 64, "bfloat16")
OTHERS = (
    Case(
        "pages larger than a tile", ((0, 1), (255, 1)), 2, KVSpec(1, 128, 256, "bfloat16"), window=40, max_query_len=1
    ),
    Case("padded heads, few pages per row", ((100, 1),), 2, KVSpec(1, 80, 128, "float16", "padded"), max_query_len=1),
    Case("rows of 64 query rows", ((61, 4), (3, 2)), 16, replace(BF16, num_kv_heads=1), max_query_len=4),
    Case("mixed of 256", ((40, 1), (31, 20)), 4, KVSpec(1, 256, 32, "bfloat16")),
)


def with_layout(case: Case) -> Case:
    return case.with_layout(choose_layout(IMPL, case.spec))


def shrink(case: Case) -> Case:
    """Without most padding rows: they cost blocks."""
    return replace(case, max_rows=len(case.rows) + 1)


ALLOWED = [shrink(c) for c in map(with_layout, (*CASES, *OTHERS)) if attention.find_obstacle(c.shape) is None]
THOROUGH = [pytest.mark.slow, pytest.mark.thorough]
PARAMS = [
    pytest.param(case, id=case.name, marks=[] if case.name in FAST or case in map(shrink, OTHERS) else THOROUGH)
    for case in ALLOWED
]


def check(case: Case, config: AmpereConfig | None, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = make_inputs(case)
    try:
        out, kv_pages = run_case(case, inputs, impl=IMPL, config=config)
    except Exception:
        reset_interpreter()
        raise
    expected, expected_pages = attend_by_formula(case, inputs)
    assert largest_error(case, out, expected, inputs.num_tokens) < 1
    # JAX 0.12 raises, 0.11 only prints, and forgets with the next kernel.
    assert "RACE DETECTED" not in capsys.readouterr().out
    null_page = LAYER * inputs.num_pages
    pools = [np.delete(np.asarray(pool).view(np.uint8), null_page, 0) for pool in (kv_pages, expected_pages)]
    np.testing.assert_array_equal(*pools)


@pytest.mark.parametrize("case", PARAMS)
def test_same_as_reference(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    check(case, SPLIT, capsys)


def test_the_cases_cover_every_kind() -> None:
    fast = [param.values[0] for param in PARAMS if not param.marks]
    assert {case.max_query_len for case in fast} >= {None, 1, 3, 4}
    assert {case.spec.dtype for case in fast} == {"bfloat16", "float16", "float8_e4m3fn"}
    assert len(fast) == len(FAST) + len(OTHERS)


def test_tiles_of_64(capsys: pytest.CaptureFixture[str]) -> None:
    """By default the interpreter has tiles of 32, which test_long_cases.py covers."""
    check(
        Case("", ((90, 1), (33, 9)), 4, replace(BF16, page_size=16), window=50, max_rows=2, max_tokens=10),
        LARGE,
        capsys,
    )


def test_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    check(Case("", (), 4, BF16, max_rows=2, max_tokens=4, max_query_len=1), SPLIT, capsys)


SMALL = Case("", ((150, 1),), 2, replace(BF16, num_kv_heads=1), max_rows=1, max_tokens=1, max_query_len=1)
SMALL_FP8 = replace(SMALL, spec=replace(SMALL.spec, dtype="float8_e4m3fn"))


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """For breaking the kernel: clears traces before and after, and resets the interpreter."""
    jax.clear_caches()
    yield monkeypatch
    jax.clear_caches()
    reset_interpreter()


def is_right(case: Case, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether neither the values nor the interpreter complain."""
    inputs = make_inputs(case)
    try:
        out = np.asarray(run_case(case, inputs, impl=IMPL, config=WHOLE)[0], np.float32)
    except jax.errors.JaxRuntimeError as error:
        assert "RACE DETECTED" in str(error) or "phase" in str(error), error
        return False
    expected = attend_by_formula(case, inputs)[0]
    is_close = np.isfinite(out).all() and largest_error(case, out, expected, inputs.num_tokens) < 1
    return bool(is_close) and "RACE DETECTED" not in capsys.readouterr().out


FAULTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "no tile is waited for": (TileRing, "wait_tile", lambda *_: None),
    "queries are not waited for": (TileRing, "wait_queries", lambda *_: None),
    "slots are filled that may still be read": (gpu, "commit_smem", lambda: None),
    "unused slots are not zeroed": (compat, "zero_rows", lambda *_: None),
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=[] if fault == "no tile is waited for" else THOROUGH) for fault in FAULTS],
)
def test_a_broken_kernel_is_found(fault: str, broken: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken.setattr(*FAULTS[fault])
    assert not is_right(SMALL, capsys)


@pytest.mark.parametrize("case", [pytest.param(SMALL, id="bf16"), pytest.param(SMALL_FP8, id="fp8", marks=THOROUGH)])
def test_a_unit_longer_than_the_ring(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert is_right(case, capsys)


def test_copies_are_counted_as_waits_count_them(broken: pytest.MonkeyPatch) -> None:
    """The device tells copies apart by their order alone, which the interpreter does not check."""
    started, skipped, waited = [], [], []

    def note(calls: list[int | None], operation: Callable[..., None], position: int | None) -> Callable[..., None]:
        def run(*args: object, **options: object) -> None:
            calls.append(None if position is None else args[position])
            operation(*args, **options)

        return run

    broken.setattr(compat, "start_copy", note(started, compat.start_copy, None))
    broken.setattr(compat, "skip_copies", note(skipped, compat.skip_copies, 0))
    broken.setattr(compat, "wait_copies", note(waited, compat.wait_copies, 0))
    case, stages = replace(SMALL, spec=replace(SMALL.spec, page_size=16)), WHOLE.decode.stages
    run_case(case, make_inputs(case), impl=IMPL, config=WHOLE)
    fills, copies = stages, 2 * 2  # traced: those before the loop, and the one in it; two pages of keys, two of values
    assert len(started) == 1 + fills * copies and skipped == [copies] * fills
    assert waited == [(stages - 1) * copies, (stages - 2) * copies]
