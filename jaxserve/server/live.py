"""The live view: one picture of the engine for all viewers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from jaxserve.engine.stats import RowStats, read_rows
from jaxserve.server.server_state import Phase, ServerState
from jaxserve.server.stream import encode_event

_ID_CHARACTERS = 6  # the live view shows so many of a request's id


async def stream_pictures(state: ServerState) -> AsyncGenerator[bytes]:
    """Yields the picture as events until the server ends; ApiError 429 when there are too many viewers."""

    async def take() -> bytes:
        return await take_picture(state)

    with state.count_viewer():
        while True:
            yield await state.live.get(take)
            await asyncio.sleep(state.live.seconds_left)
            if state.phase is Phase.FAILED or state.has_drained:
                return


async def take_picture(state: ServerState) -> bytes:
    """Returns the present picture of the engine as an event.

    The engine's thread only lists its rows, which must be consistent. Another thread reads the rest and encodes it.
    """
    llm, metrics = state.llm, state.metrics
    found: dict[str, Any] = {"time": time.monotonic(), "model": state.names[0], "state": str(state.phase)}
    if llm is None or llm.stopped is not None:
        return encode_event(found)
    rows = await llm.call(read_rows)
    found["latency"] = metrics.latency_snapshot()
    found["counters"] = {
        "prompt_tokens": metrics.prompt_tokens,
        "generation_tokens": metrics.generation_tokens,
        "requests": metrics.num_requests,
    }
    return await asyncio.to_thread(_draw, state, found, rows)


def _draw(state: ServerState, found: dict[str, Any], rows: Sequence[RowStats]) -> bytes:
    """Adds the rest of the picture and encodes it. It holds numbers and names of tenants, no text of requests."""
    assert state.llm is not None
    llm = state.llm
    stats = llm.stats()
    largest = max(stats.pools, key=lambda pool: pool.total)
    found["rows"] = {
        "max": llm.limits.max_num_seqs,
        "waiting": stats.num_waiting,
        "waiting_by_tenant": {name: count for name, count in stats.num_waiting_by_tenant.items() if name and count},
        "running": [
            {
                "row": row.row,
                "id": _shorten_id(row.request_id),
                "prompt": row.num_prompt_tokens,
                "computed": row.num_computed_tokens,
                "tokens": row.num_tokens,
                "phase": "prefill" if row.is_prefilling else "decode",
                "priority": row.priority,
                "service_tier": str(row.service_tier),
                "tenant": row.tenant,
            }
            for row in rows
        ],
    }
    found["pages"] = {
        "total": largest.total,
        "used": largest.used,
        "cached": largest.cached,
        "page_size": llm.view.describe_cache()["page_size"],
        "map": llm.view.draw_pages(),
    }
    found["counters"] |= {
        "steps": stats.num_steps,
        "useful_tokens": stats.useful_tokens,
        "padded_tokens": stats.padded_tokens,
        "preemptions": stats.num_preemptions,
        "prefix_queries": stats.prefix_queries,
        "prefix_hits": stats.prefix_hits,
        "drafts": stats.drafts.num_drafts,
        "draft_tokens": stats.drafts.num_tokens,
        "accepted_tokens": stats.drafts.num_accepted,
    }
    return encode_event(found)


def _shorten_id(request_id: str) -> str:
    """Shortens the HTTP request's id, and keeps the suffix that tells its prompts apart."""
    number, _, position = request_id.partition("-")
    return f"{number[:_ID_CHARACTERS]}-{position}"
