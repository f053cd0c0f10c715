"""One server with the demo model for all tests that only need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.running import RunningServer, run_server

# Many tests send more at once than the default queue of 8 rows would take.
SMALL = (
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-model-len", "1024"),
    *("--max-num-queued-reqs", "4096"),
)


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with run_server(*SMALL) as running:
        yield running
