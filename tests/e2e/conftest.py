"""Engines that tests share, and programs that compile quickly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.engines import Engines
from tests.programs import compile_quickly, drop_programs, has_many_programs


@pytest.fixture(scope="package", autouse=True)
def quick_programs() -> Iterator[None]:
    with compile_quickly():
        yield


@pytest.fixture(scope="session")
def engines() -> Engines:
    """The shared engines of this process, which xdist has several of."""
    return Engines()


@pytest.fixture(scope="module", autouse=True)
def few_engines(engines: Engines) -> None:
    """Engines of earlier modules are dropped where they hold many programs."""
    if has_many_programs():
        engines.clear()
        drop_programs()


@pytest.fixture(autouse=True)
def engines_at_rest(engines: Engines) -> Iterator[None]:
    """Every test begins with empty prefix caches, and fails if it leaves something in a shared engine."""
    engines.reset_prefix_caches()
    yield
    engines.check_rest()
