"""`/health`, `/ping`, `/version`, `/metrics` and the live view of the engine."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from jaxserve import __version__
from jaxserve.errors import JaxServeError
from jaxserve.server.generation import begin_reading
from jaxserve.server.live import stream_pictures
from jaxserve.server.metrics.exposition import render
from jaxserve.server.openapi import document
from jaxserve.server.server_state import Phase, ServerState, get_state
from jaxserve.server.stream import EventStream

_log = logging.getLogger(__name__)
router = APIRouter()
probes = APIRouter()  # health and metrics, which the admin port has, too
_NOT_READY = {"503": "The server is starting, warming, draining or has failed; /health says which."}
_NO_TOKEN = {"503": "The server accepts no requests, or no token came in time."}


def describe_health(state: ServerState) -> dict[str, Any]:
    """Returns the phase, and the progress of startup."""
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


@probes.get("/health", **document(None, refusals=("403",), states=_NOT_READY))
@probes.get("/health/ready", **document(None, refusals=("403",), states=_NOT_READY))
async def get_health(http: Request) -> JSONResponse:
    """200 when requests are accepted and every program is compiled."""
    state = get_state(http)
    return JSONResponse(describe_health(state), 200 if _is_ready(state) else 503)


@probes.get("/health/live", **document(None, refusals=("403",), states={"503": "A restart would help."}))
async def get_liveness(http: Request) -> JSONResponse:
    """503 when a restart would help: the engine has failed, or its device is stuck."""
    state = get_state(http)
    is_alive = state.phase is not Phase.FAILED and not state.is_stuck
    return JSONResponse(describe_health(state), 200 if is_alive else 503)


@probes.get("/health/generate", **document(None, refusals=("403",), states=_NO_TOKEN))
async def get_generation(http: Request) -> JSONResponse:
    """200 when the engine has just made a token. All requests within a second get the same answer."""
    state = get_state(http)
    health = describe_health(state)
    if not state.serves:
        return JSONResponse(health, 503)
    reason = await state.probe.get(lambda: _find_failure(state))
    return JSONResponse(health if reason is None else {**health, "reason": reason}, 200 if reason is None else 503)


async def _find_failure(state: ServerState) -> str | None:
    """Returns why no token came; None if one did."""
    try:
        await state.engine.check_health()
    except JaxServeError as error:
        _log.warning("/health/generate fails: %s", error)
        return "The engine has made no token."
    return None


@probes.get("/ping", response_class=Response, **document(None, refusals=("403",), states=_NOT_READY))
async def ping(http: Request) -> Response:
    """The shortest health check, as SageMaker calls it."""
    state = get_state(http)
    return Response(status_code=200 if _is_ready(state) else 503)


@router.get("/version", **document(None, refusals=("401", "403")))
async def get_version() -> dict[str, str]:
    """The versions of jaxserve and jax."""
    import jax

    return {"version": __version__, "jax": jax.__version__}


@probes.get("/metrics", response_class=PlainTextResponse, **document(None, refusals=("401", "403")))
async def get_metrics(http: Request) -> Response:
    """All metrics, for Prometheus."""
    state = get_state(http)
    stats = None if state.llm is None else state.llm.stats()
    body, kind = render(state.metrics, http.headers.get("accept"), stats, str(state.phase))
    return Response(body, headers={"content-type": kind})


@router.get("/live", response_class=Response, **document(None, streams=True, refusals=("401", "403", "429")))
async def watch_engine(http: Request) -> Response:
    """The engine's rows, pages and counters as events, four times a second. All viewers get the same."""
    state = get_state(http)
    return EventStream(await begin_reading(stream_pictures(state)), state, counts_leaving=False)


router.include_router(probes)
