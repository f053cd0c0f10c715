"""What is open on the admin port only: JAX profiles of the running engine."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import JSONResponse

from jaxserve.server.errors import ApiError

_log = logging.getLogger(__name__)
MAX_PROFILE_SECONDS = 60.0  # after which a profile ends by itself: it grows by some 20 MB a second, in memory
MAX_PROFILE_BYTES = 2**30  # of the profiles of one server together


class Profiler:
    """Takes one profile at a time."""

    def __init__(self) -> None:
        self._directory: str | None = None  # of the trace that is being taken
        self._taken: list[str] = []
        self._lock = asyncio.Lock()  # the profiler itself takes a while to begin and to end
        self._ending: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Begins to trace the device and the host; returns where the trace will lie. ApiError 409 when it cannot."""
        import jax

        async with self._lock:
            if self._directory is not None:
                raise _conflict("A profile is being taken already.")
            if (size := sum(_measure(each) for each in self._taken)) > MAX_PROFILE_BYTES:
                names = ", ".join(self._taken)
                raise _conflict(f"The profiles hold {size} bytes, of {MAX_PROFILE_BYTES}; remove some: {names}")
            directory = tempfile.mkdtemp(prefix="jaxserve-profile-")
            await asyncio.to_thread(jax.profiler.start_trace, directory)
            self._directory = directory
            self._ending = asyncio.ensure_future(self._end())
            return directory

    async def stop(self) -> str:
        """Ends the trace; returns where it lies. ApiError 409 when none is being taken."""
        import jax

        async with self._lock:
            if self._directory is None:
                raise _conflict("No profile is being taken.")
            if self._ending is not None and self._ending is not asyncio.current_task():
                self._ending.cancel()
            directory, self._directory, self._ending = self._directory, None, None
            self._taken.append(directory)
            await asyncio.to_thread(jax.profiler.stop_trace)
            return directory

    async def _end(self) -> None:
        await asyncio.sleep(MAX_PROFILE_SECONDS)
        _log.warning("the profile ends after %g s: %s", MAX_PROFILE_SECONDS, self._directory)
        await self.stop()


def make_router() -> APIRouter:
    """Returns the routes of a new profiler."""
    router, profiler = APIRouter(), Profiler()

    @router.post("/start_profile")
    async def start_profile() -> JSONResponse:
        """Begins to trace the device and the host; the answer says where the trace will lie."""
        return JSONResponse({"directory": await profiler.start()})

    @router.post("/stop_profile")
    async def stop_profile() -> JSONResponse:
        """Ends the trace, to be opened with XProf, TensorBoard or Perfetto."""
        return JSONResponse({"directory": await profiler.stop()})

    return router


def _measure(directory: str) -> int:
    return sum(each.stat().st_size for each in Path(directory).rglob("*") if each.is_file())


def _conflict(message: str) -> ApiError:
    """What does not fit the state that the profiler is in."""
    return ApiError(409, message, code="profile_state")
