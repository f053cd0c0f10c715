"""Questions to a server before any clock runs: whether it is there, its models, its limits."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ConfigError, shorten
from jaxserve.tools.bench.load.client import Client
from jaxserve.tools.bench.load.records import RequestRecord
from jaxserve.tools.bench.load.target import Target
from jaxserve.tools.bench.load.worker import run_loop

_TIMEOUT = 10.0  # seconds


@dataclass(frozen=True)
class ServedModel:
    """The model that is asked for."""

    name: str
    root: str  # where the server has it from, or the name
    max_model_len: int | None  # None: the server does not say


def find_model(base_url: str, target: Target, name: str | None) -> ServedModel:
    """Returns the model of that name, or the server's first.

    Raises:
        ConfigError: nobody answers, the key is refused, or there is no such model.
    """
    import httpx

    url = f"{base_url.rstrip('/') if '//' in base_url else f'http://{base_url}'}/v1/models"
    try:
        answer = httpx.get(url, headers=dict(target.headers), timeout=_TIMEOUT)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        message = f"no server answers at {base_url}: {error or type(error).__name__}; start one with jaxserve serve"
        raise ConfigError(message, field="base_url", value=base_url) from error
    if answer.status_code in (401, 403):
        message = f"the server refuses it (HTTP {answer.status_code}); give --api-key, or set OPENAI_API_KEY"
        raise ConfigError(message, field="api_key")
    models = _read_models(answer)
    if not models and name is None:
        message = f"{url} lists none (HTTP {answer.status_code}); name the model to ask for"
        raise ConfigError(message, field="model")
    found = next((each for each in models if name in (None, each["id"])), None)
    if models and found is None:
        names = ", ".join(str(each["id"]) for each in models)
        raise ConfigError(f"the server has no {shorten(name)}; it has {names}", field="model", value=name)
    found = found or {"id": name}
    longest = found.get("max_model_len")
    return ServedModel(str(found["id"]), str(found.get("root") or found["id"]), longest and int(longest))


def _read_models(answer: Any) -> list[dict[str, Any]]:
    try:
        return [each for each in answer.json()["data"] if "id" in each] if answer.status_code == 200 else []
    except (ValueError, TypeError, KeyError):
        return []


def find_rows(target: Target) -> int | None:
    """Returns the rows of the server's batch, from its live view; None where it has none that says so."""
    import httpx

    url = httpx.URL(scheme="https" if target.is_tls else "http", host=target.host, port=target.port, path="/live")
    try:
        with httpx.stream("GET", url, headers=dict(target.headers), timeout=_TIMEOUT) as answer:
            lines = answer.iter_lines() if answer.status_code == 200 else iter(())
            event = next((line.removeprefix("data:") for line in lines if line.startswith("data:")), "{}")
            return int(json.loads(event)["rows"]["max"])
    except (httpx.HTTPError, ValueError, TypeError, KeyError):
        return None


def probe(target: Target, request: bytes, timeout: float) -> None:
    """Sends one request and waits for its end.

    Raises:
        ConfigError: it failed, so all would.
    """

    async def ask() -> RequestRecord:
        record, client = RequestRecord(), Client(target)
        try:
            async with asyncio.timeout(timeout):
                await client.send(request, record)
        except TimeoutError:
            record.error = f"no end within {timeout:g} s"
        client.close()
        return record

    record = run_loop(ask())
    if record.error is not None and not record.is_refused:
        field = "api_key" if record.status in (401, 403) else "endpoint"
        raise ConfigError(f"the first request to {target.path} failed: {record.error}", field=field, value=target.path)
