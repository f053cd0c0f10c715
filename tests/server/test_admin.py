"""The admin port: profiles of the running engine, which the public port does not have."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import SMALL
from tests.server.running import launch, run_server


def find_free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_an_admin_port_that_is_taken_ends_the_start_with_a_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = launch("--admin-port", str(taken.getsockname()[1]))
        try:
            assert refused.process.wait(60) == 2
        finally:
            refused.process.kill()
    deadline = time.monotonic() + 5
    while not any("admin_port" in line for line in refused.lines) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(refused.lines) == 1 and "admin_port" in refused.lines[0], refused.lines


@pytest.mark.slow
def test_profiles_are_taken_on_the_admin_port_only() -> None:
    port = find_free_port()
    with run_server(*SMALL, "--admin-port", str(port)) as server:
        admin = f"http://127.0.0.1:{port}"
        assert httpx.post(f"{server.url}/start_profile").status_code == 404
        assert httpx.post(f"{admin}/v1/completions").status_code == 404
        early = httpx.post(f"{admin}/stop_profile")
        assert (early.status_code, early.json()["error"]["code"]) == (409, "profile_state")
        folder = httpx.post(f"{admin}/start_profile", timeout=60).json()["directory"]
        assert httpx.post(f"{admin}/start_profile", timeout=60).status_code == 409
        body = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        assert httpx.post(f"{admin}/stop_profile", timeout=60).json() == {"directory": folder}
        assert list(Path(folder).rglob("*.xplane.pb"))
        assert httpx.get(f"{admin}/health").json() == {"status": "ready"}
        assert server.metric("jaxserve:compiles_total") == 0
