"""What is open on the admin port only: JAX profiles of the running engine."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from jaxserve.server.errors import ApiError
from jaxserve.server.state import ServerState

router = APIRouter()


@router.post("/start_profile")
async def start_profile(http: Request) -> JSONResponse:
    """Begins to trace the device and the host; the answer says where the trace will lie."""
    import jax

    state: ServerState = http.app.state.server
    if state.profile_dir is not None:
        raise_conflict("A profile is being taken already.")
    state.profile_dir = tempfile.mkdtemp(prefix="jaxserve-profile-")
    try:
        await asyncio.to_thread(jax.profiler.start_trace, state.profile_dir)
    except Exception:
        state.profile_dir = None
        raise
    return JSONResponse({"directory": state.profile_dir})


@router.post("/stop_profile")
async def stop_profile(http: Request) -> JSONResponse:
    """Ends the trace, to be opened with XProf, TensorBoard or Perfetto."""
    import jax

    state: ServerState = http.app.state.server
    if state.profile_dir is None:
        raise_conflict("No profile is being taken.")
    directory, state.profile_dir = state.profile_dir, None
    await asyncio.to_thread(jax.profiler.stop_trace)
    return JSONResponse({"directory": directory})


def raise_conflict(message: str) -> Any:
    """Refuses what does not fit the state that the profiler is in."""
    raise ApiError(409, message, code="profile_state")
