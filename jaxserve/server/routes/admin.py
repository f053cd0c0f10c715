"""Routes of the admin port: JAX profiles of the running engine, and adapters."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse

from jaxserve.server.body import read_body
from jaxserve.server.errors import ApiError
from jaxserve.server.protocol.adapters import LoadAdapter, UnloadAdapter
from jaxserve.server.server_state import get_state

_log = logging.getLogger(__name__)
MAX_PROFILE_SECONDS = 60.0  # a profile then ends by itself: in memory it grows by about 20 MB per second
MAX_PROFILE_BYTES = 2**30  # all profiles of one server together


class Profiler:
    """Takes one profile at a time."""

    def __init__(self) -> None:
        self._directory: str | None = None  # where the running trace goes; None: none runs
        self._taken: list[str] = []
        self._lock = asyncio.Lock()  # the profiler takes a while to start and to stop
        self._ending: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Starts tracing device and host; returns the trace's directory. ApiError 409 when it cannot."""
        import jax

        async with self._lock:
            if self._directory is not None:
                raise _conflict("A profile is already running.")
            if (size := sum(_measure(each) for each in self._taken)) > MAX_PROFILE_BYTES:
                names = ", ".join(self._taken)
                raise _conflict(f"The profiles hold {size} bytes, more than {MAX_PROFILE_BYTES}; remove some: {names}")
            directory = tempfile.mkdtemp(prefix="jaxserve-profile-")
            await asyncio.to_thread(jax.profiler.start_trace, directory)
            self._directory = directory
            self._ending = asyncio.ensure_future(self._end())
            return directory

    async def stop(self) -> str:
        """Stops the trace; returns its directory. ApiError 409 when none is running."""
        import jax

        async with self._lock:
            if self._directory is None:
                raise _conflict("No profile is running.")
            if self._ending is not None and self._ending is not asyncio.current_task():
                self._ending.cancel()
            directory, self._directory, self._ending = self._directory, None, None
            self._taken.append(directory)
            await asyncio.to_thread(jax.profiler.stop_trace)
            return directory

    async def _end(self) -> None:
        await asyncio.sleep(MAX_PROFILE_SECONDS)
        _log.warning("the profile is stopped after %g s: %s", MAX_PROFILE_SECONDS, self._directory)
        await self.stop()


def make_router() -> APIRouter:
    """Returns the routes of a new profiler."""
    router, profiler = APIRouter(), Profiler()

    @router.post("/start_profile")
    async def start_profile() -> JSONResponse:
        """Starts tracing device and host; the answer names the trace's directory."""
        return JSONResponse({"directory": await profiler.start()})

    @router.post("/stop_profile")
    async def stop_profile() -> JSONResponse:
        """Stops the trace, which XProf, TensorBoard and Perfetto can open."""
        return JSONResponse({"directory": await profiler.stop()})

    @router.post("/v1/load_lora_adapter")
    async def load_lora_adapter(http: Request) -> PlainTextResponse:
        """Reads an adapter below `lora_dir`, and serves it as a model."""
        state = get_state(http)
        body = await read_body(http, LoadAdapter, state)
        await state.adapters.load(body.lora_name, body.lora_path, inplace=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added successfully.")

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(http: Request) -> PlainTextResponse:
        """Serves an adapter no more; requests that run with it go on."""
        state = get_state(http)
        body = await read_body(http, UnloadAdapter, state)
        await state.adapters.unload(body.lora_name)
        state.metrics.adapter_tokens.pop(body.lora_name, None)
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")

    return router


def _measure(directory: str) -> int:
    return sum(each.stat().st_size for each in Path(directory).rglob("*") if each.is_file())


def _conflict(message: str) -> ApiError:
    """Returns the refusal of what the profiler's state does not allow."""
    return ApiError(409, message, code="profile_state")
