"""`jaxserve run-batch`: answers the requests of a file through the server's application, in process.

Answers are written as they finish, so their order differs from the input's. A killed run can be resumed: lines that
have an answer, good or bad, are not sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from jaxserve.config import EngineConfig
from jaxserve.engine.async_engine import AsyncLLM
from jaxserve.engine.progress import Report, choose_progress
from jaxserve.errors import ConfigError
from jaxserve.request import PRIORITIES
from jaxserve.server.app import make_app
from jaxserve.server.batch_files import BatchLine, BatchOutput, LineError, name_line, read_lines, scan_input
from jaxserve.server.grammar_lane import GrammarLane
from jaxserve.server.launch import make_state
from jaxserve.server.logs import configure_logging
from jaxserve.server.options import ServerConfig
from jaxserve.server.server_state import ServerState

_REQUESTS_PER_ROW = 4  # concurrent requests by default; the batch stays full while some are prepared or written
_SYNC_SECONDS = 1.0  # a loss of power may lose the answers of this time; a kill loses none
_RETRY_SECONDS = (0.05, 2.0)  # first and longest pause before a request that got 429 is sent again


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """The result of a batch."""

    num_lines: int
    num_failed: int  # including earlier runs
    num_before: int  # answered in earlier runs

    def __str__(self) -> str:
        before = f", {self.num_before:,} of them in earlier runs" if self.num_before else ""
        return f"{self.num_lines:,} lines answered{before}; {self.num_failed:,} failed"


def run_batch(
    engine: EngineConfig,
    server: ServerConfig,
    input_file: Path,
    output_file: Path,
    *,
    max_concurrent: int | None = None,
    shows_progress: bool = True,
) -> BatchSummary:
    """Answers every line of `input_file` that has no answer in `output_file` yet.

    Args:
        max_concurrent: requests at once; default: a few for each row of the batch.

    Raises:
        ConfigError: the options or files cannot be used; nothing was written.
        JaxServeError: the engine could not be built, or failed. The answers so far are kept for the next run.
    """
    if max_concurrent is not None and max_concurrent < 1:
        raise ConfigError(f"must be at least 1, got {max_concurrent}", field="max_concurrent", value=max_concurrent)
    for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
        if (value := getattr(engine.scheduler, name)) is not None:
            message = "is for servers; max_concurrent bounds a batch, and its queue refuses nothing"
            raise ConfigError(message, field=name, value=value)
    configure_logging(server.logs.log_level)
    numbers = scan_input(input_file)
    if output_file.exists() and output_file.samefile(input_file):
        raise ConfigError("is the input file; give another one", field="output_file", value=str(output_file))
    state = make_state(engine, server)
    output = BatchOutput(output_file, numbers)
    with contextlib.closing(output):
        batch = _Batch(state, output, len(numbers))
        if len(output.recorded.keys) < len(numbers):
            progress = choose_progress(shows_progress)
            llm = AsyncLLM.from_config(engine, progress=progress)
            state.open(llm)
            most = max_concurrent or _REQUESTS_PER_ROW * llm.limits.max_num_seqs
            limits = replace(
                server.limits,
                max_streams=max(most, 1),
                max_priority=PRIORITIES.start,
                max_queue_wait=0.0,
                max_grammar_time=0.0,
            )
            state.config, state.grammars = replace(server, limits=limits), GrammarLane(limits.max_grammar_time)
            state.max_sequences = limits.max_prompts * limits.max_n  # there are no other clients
            try:
                with progress("Answering", unit="lines") as report:
                    asyncio.run(batch.run(input_file, most, report))
            finally:
                llm.shutdown()
                state.end_processes()
    return BatchSummary(len(numbers), batch.num_failed, len(output.recorded.keys))


class _Batch:
    """The lines of one run."""

    def __init__(self, state: ServerState, output: BatchOutput, num_lines: int) -> None:
        self._state, self._output, self._num_lines = state, output, num_lines
        self._num_done = len(output.recorded.keys)
        self.num_failed = output.recorded.num_failed

    async def run(self, input_file: Path, max_concurrent: int, report: Report) -> None:
        """Answers all lines that have no answer yet. The first internal error ends the run."""
        lines = (line for line in read_lines(input_file) if line.key not in self._output.recorded.keys)
        transport = httpx.ASGITransport(make_app(self._state), raise_app_exceptions=False)
        syncing = asyncio.ensure_future(self._sync())
        try:
            async with (
                httpx.AsyncClient(transport=transport, base_url="http://batch") as client,
                asyncio.TaskGroup() as group,
            ):
                for _ in range(min(max_concurrent, self._num_lines - self._num_done)):
                    group.create_task(self._work(lines, client, report))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            syncing.cancel()
            await asyncio.wait((syncing,))

    async def _work(self, lines: Iterator[BatchLine], client: httpx.AsyncClient, report: Report) -> None:
        """Answers one line after another; several workers share the lines."""
        for line in lines:
            answer = await self._answer(line, client)
            llm = self._state.llm
            if llm is not None and llm.stopped is not None:
                raise llm.stopped  # this answer is not one; the next run sends the line again
            self._output.write(answer)
            self._num_done += 1
            response = answer["response"]
            self.num_failed += response is None or not 200 <= response["status_code"] < 300
            report(self._num_done, self._num_lines, f"{self.num_failed} failed" if self.num_failed else "")

    async def _answer(self, line: BatchLine, client: httpx.AsyncClient) -> dict[str, Any]:
        if line.body is None:
            assert line.error is not None
            return _make_answer(line, error=line.error)
        try:
            response = await self._ask(line, client)
            body = response.json()
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            return _make_answer(line, error=LineError("request_failed", f"the request could not be made: {error!r}"))
        found = {"status_code": response.status_code, "request_id": response.headers["x-request-id"], "body": body}
        return _make_answer(line, response=found)

    async def _ask(self, line: BatchLine, client: httpx.AsyncClient) -> httpx.Response:
        """Sends the request, and retries while it gets 429."""
        content = json.dumps(line.body).encode()
        for attempt in count():
            response = await client.post(line.url, content=content, headers={"content-type": "application/json"})
            if response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                return response
            first, longest = _RETRY_SECONDS
            await asyncio.sleep(min(longest, first * 2 ** min(attempt, 16)))
        raise AssertionError("counting ends")

    async def _sync(self) -> None:
        synced = self._num_done
        while True:
            await asyncio.sleep(_SYNC_SECONDS)
            if synced != self._num_done:
                synced = self._num_done
                await asyncio.to_thread(self._output.sync)


def _make_answer(
    line: BatchLine, *, response: dict[str, Any] | None = None, error: LineError | None = None
) -> dict[str, Any]:
    answer_id = name_line(line.number) if line.custom_id is None else f"batch_req_{secrets.token_hex(12)}"
    told = None if error is None else {"code": error.code, "message": error.message}
    return {"id": answer_id, "custom_id": line.custom_id, "response": response, "error": told}
