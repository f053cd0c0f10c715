"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pallas_kernels.compiling import compile_quickly


@pytest.fixture
def quick_compiling() -> Iterator[None]:
    """For tests in interpreters, and of lists: no user's program is like theirs."""
    with compile_quickly():
        yield
