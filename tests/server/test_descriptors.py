"""Open files: the limit is raised, connections leave enough of it, and steps and grammars open none."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import httpx
import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.sockets import DESCRIPTOR_RESERVE, clamp_connections, raise_descriptor_limit
from tests.server.conftest import SMALL
from tests.server.pressure import COMPLETIONS, connect, get_status, probe
from tests.server.running import RunningServer, run_server

SOFT = 128


@pytest.fixture
def kept_limit() -> Iterator[tuple[int, int]]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield limits
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_soft_limit_is_raised_to_the_hard_one(kept_limit: tuple[int, int]) -> None:
    _, hard = kept_limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    assert raise_descriptor_limit() == (None if hard == resource.RLIM_INFINITY else hard)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


@pytest.mark.parametrize(
    ("wanted", "descriptors", "clamped"),
    [(4096, None, 4096), (4096, 100_000, 4096), (4096, 1024, 1024 - DESCRIPTOR_RESERVE), (5, 100_000, 5)],
)
def test_connections_leave_descriptors_for_all_else(wanted: int, descriptors: int | None, clamped: int) -> None:
    assert clamp_connections(wanted, descriptors) == clamped


def test_a_limit_that_leaves_no_connections_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"ulimit -Hn") as caught:
        clamp_connections(4096, DESCRIPTOR_RESERVE + 3)
    assert caught.value.field == "max_connections"


@pytest.fixture(scope="module")
def poor() -> Iterator[RunningServer]:
    """A server that may open few files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, limits[1]))
    try:
        with run_server(*SMALL) as server:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            yield server
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_more_idle_connections_than_files_keep_nobody_out(poor: RunningServer) -> None:
    text = probe(poor)
    idle = [connect(poor) for _ in range(2 * SOFT)]
    start = time.monotonic()
    assert probe(poor) == text
    assert get_status(poor, "/health/live") == 200
    assert time.monotonic() - start < 8, "nobody waits until the others are closed"
    for each in idle:
        each.close()


def test_steps_and_grammars_open_no_files(poor: RunningServer) -> None:
    with httpx.Client(base_url=poor.url, timeout=60) as http:
        assert http.get("/health/live").status_code == 200
        limits = resource.prlimit(poor.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(poor.process.pid, resource.RLIMIT_NOFILE, (1, limits[1]))  # as if all were open
        try:
            for extra in ({}, {"logprobs": 2, "presence_penalty": 1.0}, {"structured_outputs": {"regex": "[a-z]{9}"}}):
                answer = http.post(COMPLETIONS, json={"prompt": "Once", "max_tokens": 4, **extra})
                assert answer.status_code == 200, answer.text
        finally:
            resource.prlimit(poor.process.pid, resource.RLIMIT_NOFILE, limits)
