"""What every test process needs before JAX starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cpu_seconds import CpuSeconds
from tests.examples import register_profiles
from tests.programs import PROGRAMS, drop_programs, has_many_programs

# The interpreter of GPU kernels blocks threads of XLA's CPU pool, one per warpgroup. The pool has as many threads as
# there are cores, and on two of them it can deadlock.
os.environ.setdefault("NPROC", "8")

register_profiles()


def pytest_sessionstart() -> None:
    """Compiling takes most of the time of tests: also what runs outside of engines is kept."""
    from jaxserve.core.runtime.program_cache import enable_persistent_cache
    from pallas_kernels.cpu import library

    enable_persistent_cache(PROGRAMS)
    library.load(PROGRAMS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, metavar="FILE", help="write what each test costs in CPU seconds there")


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(CpuSeconds(None if is_worker else config.getoption("--costs")))


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> None:
    """A module of tests begins with few programs loaded."""
    if has_many_programs():
        drop_programs()
