"""How the server is: `/health`, `/ping`, `/version`, `/metrics` and the live view of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from jaxserve import __version__
from jaxserve.engine.stats import read_page_map, read_rows, read_stats
from jaxserve.server.documents import document
from jaxserve.server.state import Phase, ServerState
from jaxserve.server.stream import EventStream, encode_event

router = APIRouter()
_NOT_READY = {"503": "It starts, warms, drains or has failed; /health says which."}
_LIVE_INTERVAL = 0.25  # seconds between two looks at the engine
_ID_CHARACTERS = 6  # of a request's number that the live view shows


def describe_health(state: ServerState) -> dict[str, Any]:
    """Returns the phase, and how far the start is."""
    progress = state.progress
    health: dict[str, Any] = {"status": "stuck" if state.is_stuck else str(state.phase)}
    if state.phase in (Phase.STARTING, Phase.WARMING):
        health["progress"] = {
            "title": progress.title,
            "done": progress.done,
            "total": progress.total,
            "note": progress.note,
        }
    return health


def _is_ready(state: ServerState) -> bool:
    return state.phase is Phase.READY and not state.is_stuck


@router.get("/health", **document(None, refusals=("403",), states=_NOT_READY))
@router.get("/health/ready", **document(None, refusals=("403",), states=_NOT_READY))
async def get_health(http: Request) -> JSONResponse:
    """200 when requests are served and every program is compiled."""
    state: ServerState = http.app.state.server
    return JSONResponse(describe_health(state), 200 if _is_ready(state) else 503)


@router.get("/health/live", **document(None, refusals=("403",), states={"503": "A restart would help."}))
async def get_liveness(http: Request) -> JSONResponse:
    """503 when restarting the process would help: the engine has failed, or its device is stuck."""
    state: ServerState = http.app.state.server
    is_alive = state.phase is not Phase.FAILED and not state.is_stuck
    return JSONResponse(describe_health(state), 200 if is_alive else 503)


@router.get("/ping", response_class=Response, **document(None, refusals=("403",), states=_NOT_READY))
async def ping(http: Request) -> Response:
    """The shortest answer there is, as SageMaker asks for it."""
    state: ServerState = http.app.state.server
    return Response(status_code=200 if _is_ready(state) else 503)


@router.get("/version", **document(None, refusals=("401", "403")))
async def get_version() -> dict[str, str]:
    """Of jaxserve and of jax."""
    import jax

    return {"version": __version__, "jax": jax.__version__}


@router.get("/metrics", response_class=PlainTextResponse, **document(None, refusals=("401", "403")))
async def get_metrics(http: Request) -> Response:
    """Everything that is counted, for Prometheus."""
    state: ServerState = http.app.state.server
    stats = None if state.llm is None else read_stats(state.llm.ready.engine)
    body, kind = state.metrics.render(http.headers.get("accept"), stats, str(state.phase))
    return Response(body, headers={"content-type": kind})


@router.get("/live", response_class=Response, **document(None, streams=True, refusals=("401", "403")))
async def watch_engine(http: Request) -> Response:
    """The engine's rows, pages and counters, four times a second, as events."""
    state: ServerState = http.app.state.server
    return EventStream(_look_on(state), state)


async def _look_on(state: ServerState) -> AsyncGenerator[bytes]:
    while state.phase is not Phase.FAILED and not state.has_drained:
        yield encode_event(await describe_engine(state))
        await asyncio.sleep(_LIVE_INTERVAL)


def _shorten_id(request_id: str) -> str:
    """Keeps what tells the prompts of one HTTP request apart."""
    number, _, position = request_id.partition("-")
    return f"{number[:_ID_CHARACTERS]}-{position}"


async def describe_engine(state: ServerState) -> dict[str, Any]:
    """Returns one look at the engine; its numbers alone, nothing of anyone's text."""
    found: dict[str, Any] = {"time": time.monotonic(), "model": state.names[0], "state": str(state.phase)}
    if state.llm is None or state.llm.stopped is not None:
        return found
    stats = read_stats(state.llm.ready.engine)
    rows, page_map = await state.llm.call(lambda engine: (read_rows(engine), read_page_map(engine)))
    limits, options = state.llm.ready.engine.scheduler.limits, state.llm.ready.shapes.config
    largest = max(stats.pools, key=lambda pool: pool.total)
    metrics = state.metrics
    found["rows"] = {
        "max": limits.max_num_seqs,
        "waiting": stats.num_waiting,
        "running": [
            {
                "row": row.row,
                "id": _shorten_id(row.request_id),
                "prompt": row.num_prompt_tokens,
                "computed": row.num_computed_tokens,
                "tokens": row.num_tokens,
                "phase": "prefill" if row.is_prefilling else "decode",
                "priority": row.priority,
            }
            for row in rows
        ],
    }
    found["pages"] = {
        "total": largest.total,
        "used": largest.used,
        "cached": largest.cached,
        "page_size": options.cache.page_size,
        "map": page_map,
    }
    found["counters"] = {
        "prompt_tokens": metrics.prompt_tokens,
        "generation_tokens": metrics.generation_tokens,
        "requests": metrics.num_requests,
        "steps": stats.num_steps,
        "useful_tokens": stats.useful_tokens,
        "padded_tokens": stats.padded_tokens,
        "preemptions": stats.num_preemptions,
        "prefix_queries": stats.prefix_queries,
        "prefix_hits": stats.prefix_hits,
    }
    found["latency"] = metrics.latency_snapshot()
    return found
