"""Programs that compile quickly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.programs import compile_quickly


@pytest.fixture(scope="package", autouse=True)
def quick_programs() -> Iterator[None]:
    with compile_quickly():
        yield
