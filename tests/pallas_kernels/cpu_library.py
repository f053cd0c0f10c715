"""Tests of the CPU kernel are skipped, by name, where its library cannot be built."""

from __future__ import annotations

from typing import Any

import pytest

from pallas_kernels.cpu import library
from tests.programs import PROGRAMS

OBSTACLE = library.load(PROGRAMS)
BUILT = pytest.mark.skipif(OBSTACLE is not None, reason=f"the CPU kernel is not here: {OBSTACLE}")


def needs_library(*values: Any) -> Any:
    """A case of a parametrized test that calls the library."""
    return pytest.param(*values, marks=BUILT)
