"""The interpreter does find what it is trusted to find: a kernel with a wait left out fails a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import pytest

from pallas_kernels.testing.case import Case
from pallas_kernels.tpu import decode, pages, prefill
from pallas_kernels.tpu.config import TpuConfig
from tests.pallas_kernels.test_tpu import check_case, find_case, group_config, small_config
from tests.pallas_kernels.tpu_faults import forget_failure, quick_interpreter


@pytest.fixture(autouse=True)
def _fresh_kernels() -> Iterator[None]:
    """Programs compiled with a fault must not serve other tests, nor the other way round."""
    jax.clear_caches()
    with quick_interpreter():
        yield
    forget_failure()


def is_right(case: Case, config: TpuConfig | None = None) -> bool:
    """Whether a case runs without a race, to the right answer and pool."""
    try:
        check_case(case, config or small_config(case))
    except (RuntimeError, jax.errors.JaxRuntimeError) as error:
        assert "race" in str(error).lower(), error
        return False
    except AssertionError:
        return False
    return True


def test_kernels_without_a_fault_are_right() -> None:
    assert is_right(find_case("decode one row of many"))


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("decode one row of many", pages),
        pytest.param("mixed one chunk deep in its row", prefill, marks=pytest.mark.thorough),
    ],
)
def test_a_missing_wait_is_found(name: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `pages` keys are read before they have arrived; in `prefill` before they were written."""
    monkeypatch.setattr(module, "wait_copy", lambda copy: None)
    assert not is_right(find_case(name))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "module"),
    [("decode", decode), ("mixed one chunk deep in its row", pages), ("a chunk over many tiles", prefill)],
)
def test_other_missing_waits_are_found(name: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "wait_copy", lambda copy: None)
    assert not is_right(find_case(name))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "owner", "part", "broken"),
    [
        ("decode one row of many", decode, "keep_values", lambda values, _: values),
        ("mixed one chunk deep in its row", pages.PageBlocks, "clean", lambda *_, **__: None),
    ],
)
def test_values_that_are_nobodys_must_be_cleaned(
    name: str, owner: object, part: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, part, broken)
    assert not is_right(find_case(name))


@pytest.mark.thorough
def test_rows_of_a_group_need_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied to the same place of the block, the last row's keys would be those of all."""
    start = pages.PageBlocks.start

    def start_at_first(*args: Any, place: int = 0, **options: Any) -> None:
        start(*args, **options)

    monkeypatch.setattr(pages.PageBlocks, "start", start_at_first)
    case = find_case("decode sinks")
    assert not is_right(case, group_config(case, 4))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("module", [decode, pages])
def test_missing_waits_of_groups_are_found(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "wait_copy", lambda copy: None)
    case = find_case("decode sinks")
    assert not is_right(case, group_config(case, 2))
