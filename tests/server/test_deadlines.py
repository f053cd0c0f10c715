"""The server's own deadline holds for requests with a later one and for those without."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from jaxserve.server.app import make_app
from jaxserve.server.options import ServerConfig
from tests.server.asgi import Answer, Client, make_scope
from tests.server.test_live import serve


@pytest.mark.parametrize("fields", [{}, {"timeout": 60.0}])
def test_a_request_ends_at_the_servers_deadline(fields: dict[str, Any]) -> None:
    async def ask() -> Answer:
        with serve() as served:
            served.state.config = ServerConfig.from_options(request_timeout=1e-6, access_log=False)
            client = Client()
            client._body[0]["body"] = json.dumps({"prompt": [1, 2, 3], "max_tokens": 5, **fields}).encode()
            scope = make_scope("/v1/completions", headers=[("content-type", "application/json")])
            return await client.ask(make_app(served.state), scope)

    answer = asyncio.run(asyncio.wait_for(ask(), timeout=20))
    assert (answer.status, answer.error["code"], answer.headers["x-should-retry"]) == (504, "timeout", "false")
