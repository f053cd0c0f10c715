"""One server with the demo model for all tests that only need one, and logs that are as they were after each module."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jaxserve.server.logs import _LIBRARIES, LogWriter
from tests.server.running import RunningServer, run_server

# Many tests send more at once than the default queue of 8 rows would take.
ALL_PROGRAMS = (
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-model-len", "1024"),
    *("--max-num-queued-reqs", "4096"),
)
# Compiling takes most of the time of these tests: one bucket of each kind.
FEW_PROGRAMS = ("--precompile-bs-paddings", "8", "--precompile-token-paddings", "128")
SMALL = (*ALL_PROGRAMS, *FEW_PROGRAMS)


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with run_server(*SMALL) as running:
        yield running


@contextmanager
def keep_loggers() -> Iterator[None]:
    """Puts back what `configure_logging` changes."""
    loggers = [logging.getLogger(name) for name in ("jaxserve", *_LIBRARIES)]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    yield
    logging.captureWarnings(False)
    for logger, level, propagate in before:
        for handler in [h for h in logger.handlers if isinstance(h, LogWriter)]:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture(scope="module", autouse=True)
def restore_loggers_of_a_module() -> Iterator[None]:
    """A server that runs in the test's own process has taken them, as `run-batch` does."""
    with keep_loggers():
        yield
