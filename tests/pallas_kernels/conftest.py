"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pallas_kernels.compiling import compile_quickly


@pytest.fixture(autouse=True)
def quick_compiling() -> Iterator[None]:
    """Compiling takes most of the time. Fusions, layouts and buffers are those that users have."""
    with compile_quickly():
        yield
