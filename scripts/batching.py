"""The same requests, programs and kernels, batched in different ways.

- one-at-a-time: each request alone.
- static: a batch is closed when it is full. Its prompts are padded to the longest, all its rows run to its longest
  answer, and all answers are there when that is.
- dynamic: the same, but a batch is also closed some time after its first request arrived.
- continuous: what the engine does for users.

Only requested tokens count as output.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.prompts import BenchRequest
from jaxserve.tools.bench.runs import Run, RunOptions, run_requests

if TYPE_CHECKING:
    from jaxserve.engine.llm import LLM

WAYS = ("one-at-a-time", "static", "dynamic", "continuous")
_PAD = 9  # token id in front of shorter prompts
_OPTIONS = RunOptions(ignores_eos=True, detokenizes=False)


@dataclass(frozen=True)
class Served:
    """One workload, served in one way. Times are seconds after its beginning; requests are in the order given."""

    way: str
    seconds: float
    num_tokens: int  # asked for
    num_computed: int  # answers' tokens that rows computed, those nobody asked for included
    ends: tuple[float, ...]
    latencies: tuple[float, ...]  # from arrival
    failures: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Requested tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def useful_share(self) -> float:
        """Of the answers' tokens that rows computed."""
        return self.num_tokens / max(1, self.num_computed)


def serve(llm: LLM, requests: Sequence[BenchRequest], way: str, *, rows: int, timeout: float = 0.05) -> Served:
    """Serves requests, which arrive at their `arrival_time`, in one of `WAYS`, with an empty prefix cache.

    Args:
        rows: of a batch; continuous batching has those of the engine.
        timeout: seconds after its first request's arrival at which a dynamic batch is closed.

    Raises:
        ConfigError: the longest prompt and answer of a batch together exceed the model's length.
    """
    llm.reset_prefix_cache()
    if way == "continuous":
        run = run_requests(llm, requests, replace(_OPTIONS, keeps_arrivals=True))
        ends, computed = [each.end for each in run.requests], sum(each.max_tokens for each in requests)
        return _conclude(way, requests, ends, run.seconds, computed, run.failures)
    size = 1 if way == "one-at-a-time" else rows
    return _serve_batches(llm, requests, way, size, timeout if way == "dynamic" else None)


def _serve_batches(llm: LLM, requests: Sequence[BenchRequest], way: str, size: int, timeout: float | None) -> Served:
    clock = llm.ready.engine.scheduler.clock
    waiting = sorted(range(len(requests)), key=lambda index: requests[index].arrival_time)
    ends, failures, computed, start = [0.0] * len(requests), list[str](), 0, clock()
    while waiting:
        closes = find_closing([requests[index].arrival_time for index in waiting], size, timeout)
        if (left := closes - (clock() - start)) > 0:
            time.sleep(left)
        now = max(closes, clock() - start)
        batch = [index for index in waiting[:size] if requests[index].arrival_time <= now]
        padded = pad([requests[index] for index in batch], llm.ready.shapes.model.max_model_len)
        run: Run = run_requests(llm, padded, _OPTIONS)
        failures += run.failures
        computed += sum(each.max_tokens for each in padded)
        waiting, end = waiting[len(batch) :], clock() - start
        for index in batch:
            ends[index] = end
    return _conclude(way, requests, ends, clock() - start, computed, failures)


def _conclude(
    way: str,
    requests: Sequence[BenchRequest],
    ends: Sequence[float],
    seconds: float,
    computed: int,
    failures: Sequence[str],
) -> Served:
    latencies = tuple(end - each.arrival_time for end, each in zip(ends, requests, strict=True))
    num_tokens = sum(each.max_tokens for each in requests)
    return Served(way, seconds, num_tokens, computed, tuple(ends), latencies, tuple(failures))


def find_closing(arrivals: Sequence[float], size: int, timeout: float | None) -> float:
    """Returns when the next batch of those that wait is closed, in seconds of their arrivals, which ascend.

    It is closed when it is full, or after `timeout` seconds. Without a timeout the last one is closed when nobody
    else comes.
    """
    full = arrivals[size - 1] if len(arrivals) >= size else float("inf")
    late = arrivals[-1] if timeout is None else arrivals[0] + timeout
    return min(full, late)


def pad(batch: Sequence[BenchRequest], max_model_len: int) -> list[BenchRequest]:
    """Returns a batch with prompts as long as its longest, and answers too."""
    width, longest = max(each.num_prompt_tokens for each in batch), max(each.max_tokens for each in batch)
    if width + longest > max_model_len:
        message = f"a padded batch has prompts of {width} and answers of {longest} tokens, above {max_model_len}"
        raise ConfigError(message, field="max_model_len", value=max_model_len)
    found = []
    for each in batch:
        assert each.prompt_token_ids is not None  # workloads of this module are made of token ids
        ids = (_PAD,) * (width - each.num_prompt_tokens) + each.prompt_token_ids
        found.append(replace(each, prompt_token_ids=ids, num_prompt_tokens=width, max_tokens=longest))
    return found
