"""Two servers: one that answers from the scenario's script, and one with the demo model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scripted.running import run_script
from tests.scripted.scenario import SCRIPT
from tests.server.conftest import SMALL
from tests.server.running import RunningServer, run_server


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_script(tmp_path_factory.mktemp("script"), SCRIPT) as server:
        yield server


@pytest.fixture(scope="session")
def demo() -> Iterator[RunningServer]:
    with run_server(*SMALL) as server:
        yield server
