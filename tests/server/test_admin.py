"""The admin port: profiles of the running engine, which the public port does not have."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable
from pathlib import Path

import httpx
import jax
import pytest
from starlette.types import ASGIApp

from jaxserve.server.app import make_admin_app
from jaxserve.server.routes import admin
from tests.server.asgi import Answer, Client, make_scope, make_state
from tests.server.running import RunningServer


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What JAX's own profiler is asked to do; each profile writes a file of 100 bytes."""
    calls: list[str] = []

    def start(directory: str) -> None:
        calls.append("start")
        (Path(directory) / "trace").write_bytes(b"t" * 100)

    monkeypatch.setattr(jax.profiler, "start_trace", start)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return calls


def ask(app: ASGIApp, path: str) -> Awaitable[Answer]:
    return Client().ask(app, make_scope(path, "POST", [("Host", "127.0.0.1:9000")]))


def test_a_profile_ends_by_itself(profiler: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "MAX_PROFILE_SECONDS", 0.05)

    async def run() -> None:
        app = make_admin_app(make_state())
        for _ in range(2):
            assert (await ask(app, "/start_profile")).status == 200
            await asyncio.sleep(0.2)
            assert (await ask(app, "/stop_profile")).error["code"] == "profile_state"

    asyncio.run(run())
    assert profiler == ["start", "stop"] * 2


def test_a_profile_that_is_ended_is_not_ended_again(profiler: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "MAX_PROFILE_SECONDS", 1.0)

    async def run() -> None:
        app = make_admin_app(make_state())
        # When the first would have ended by itself, the second goes on for half a second.
        for path, seconds in (("/start_profile", 0.0), ("/stop_profile", 0.6), ("/start_profile", 0.5)):
            assert (await ask(app, path)).status == 200
            await asyncio.sleep(seconds)
        assert (await ask(app, "/start_profile")).status == 409
        assert (await ask(app, "/stop_profile")).status == 200

    asyncio.run(run())
    assert profiler == ["start", "stop"] * 2


def test_profiles_have_a_bound_together(profiler: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "MAX_PROFILE_BYTES", 150)

    async def run() -> None:
        app = make_admin_app(make_state())
        for _ in range(2):
            assert (await ask(app, "/start_profile")).status == 200
            assert (await ask(app, "/stop_profile")).status == 200
        refused = await ask(app, "/start_profile")
        assert refused.status == 409 and "jaxserve-profile-" in refused.error["message"]
        folders = list(Path(tempfile.gettempdir()).iterdir())
        assert len(folders) == 2
        shutil.rmtree(folders[0])
        assert (await ask(app, "/start_profile")).status == 200
        assert (await ask(app, "/stop_profile")).status == 200

    asyncio.run(run())


def test_profiles_are_taken_on_the_admin_port_only(narrow: RunningServer, admin_port: int) -> None:
    url = f"http://127.0.0.1:{admin_port}"
    assert httpx.post(f"{narrow.url}/start_profile").status_code == 404
    assert httpx.post(f"{url}/v1/completions").status_code == 404
    page = httpx.post(f"{url}/start_profile", headers={"origin": "https://page.example"})
    assert (page.status_code, page.json()["error"]["code"]) == (403, "origin_not_allowed")
    early = httpx.post(f"{url}/stop_profile")
    assert (early.status_code, early.json()["error"]["code"]) == (409, "profile_state")
    folder = httpx.post(f"{url}/start_profile", timeout=60).json()["directory"]
    assert httpx.post(f"{url}/start_profile", timeout=60).status_code == 409
    body = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
    assert httpx.post(f"{narrow.url}/v1/completions", json=body, timeout=60).status_code == 200
    assert httpx.post(f"{url}/stop_profile", timeout=60).json() == {"directory": folder}
    assert list(Path(folder).rglob("*.xplane.pb"))
    assert httpx.get(f"{url}/health").json() == {"status": "ready"}
    assert httpx.get(f"{url}/metrics").status_code == 200
    for path in ("/live", "/version"):  # they need a key where the server has one, and this port has none
        assert httpx.get(f"{url}{path}").status_code == 404
    assert narrow.metric("jaxserve:compiles_total") == 0
