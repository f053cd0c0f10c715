"""Runs requests through an `LLM` of this process against the clock, and counts what happened meanwhile."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from jaxserve.errors import JaxServeError
from jaxserve.sampling_params import OutputKind, SamplingParams
from jaxserve.tools.bench.prompts import BenchRequest

if TYPE_CHECKING:
    from jaxserve.engine.llm import LLM
    from jaxserve.request import Request, RequestOutput
    from jaxserve.tools.bench.limits import DeviceLimits, ModelCosts


@dataclass(frozen=True)
class RunOptions:
    """How requests are run.

    Attributes:
        ignores_eos: answers go on to `max_tokens`.
        detokenizes: answers become text, as users want it; without a tokenizer they never do.
        keeps_arrivals: a request is sent at its `arrival_time`; else all are sent at the beginning.
    """

    ignores_eos: bool = True
    detokenizes: bool = True
    keeps_arrivals: bool = False


@dataclass(frozen=True)
class Finished:
    """What became of one request. Times are seconds after the beginning of the run."""

    num_prompt_tokens: int
    num_output_tokens: int
    arrival: float
    first_token: float | None  # None: it has none
    end: float
    num_cached_tokens: int = 0
    failure: str | None = None

    @property
    def latency(self) -> float:
        return self.end - self.arrival

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None if there is none."""
        if self.first_token is None or self.num_output_tokens < 2:
            return None
        return (self.end - self.first_token) / (self.num_output_tokens - 1)


@dataclass(frozen=True)
class StepSize:
    """What one step computed, without padding."""

    num_tokens: int
    num_sampled: int  # tokens that the host got meanwhile: those of the step before


@dataclass(frozen=True)
class Run:
    """One run of requests."""

    seconds: float
    requests: tuple[Finished, ...]  # in the order given
    steps: dict[str, int]  # by bucket
    sizes: tuple[StepSize, ...]
    useful_tokens: int
    padded_tokens: int  # useful ones included
    num_preemptions: int
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # those found
    num_compiled: int  # programs; above 0 the clock is worth nothing

    @property
    def failures(self) -> tuple[str, ...]:
        """What failed, one line for each request, and the compilations if there were any."""
        found = [each.failure for each in self.requests if each.failure is not None]
        if self.num_compiled:
            found.append(
                f"{self.num_compiled} programs were compiled inside the clock; its time is not that of serving"
            )
        return tuple(found)

    @property
    def num_completed(self) -> int:
        return sum(each.failure is None for each in self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Of completed requests."""
        return sum(each.num_prompt_tokens for each in self.requests if each.failure is None)

    @property
    def num_output_tokens(self) -> int:
        """Of completed requests."""
        return sum(each.num_output_tokens for each in self.requests if each.failure is None)

    def limit_seconds(self, costs: ModelCosts, limits: DeviceLimits) -> float:
        """Returns the least seconds in which the device could run the steps of this run, padding left out.

        Keys of prompts are read once, and pairs in prompts are computed. Where one dispatch runs several steps, their
        weights are counted once, so the limit is lower than the true one.
        """
        streaming = sum(
            number * costs.step_seconds(limits, size.num_tokens, size.num_sampled, 0.0)
            for size, number in Counter(self.sizes).items()
        )
        read = cache(costs.key_bytes)
        key_bytes, num_pairs = 0.0, 0
        for each in self.requests:
            length = each.num_prompt_tokens
            contexts = range(length + 1, length + each.num_output_tokens)
            key_bytes += read(length) + sum(map(read, contexts))
            new = length - each.num_cached_tokens
            num_pairs += new * (length + each.num_cached_tokens + 1) // 2
        attending = key_bytes / limits.bytes_per_second
        attending += costs.pair_operations * num_pairs / limits.flops_per_second
        return streaming + attending / costs.num_devices


def run_requests(llm: LLM, requests: Sequence[BenchRequest], options: RunOptions = RunOptions()) -> Run:
    """Runs requests to their end and returns what happened.

    A request that the engine refuses is a failure in the figures. Nobody else may use the engine meanwhile.
    """
    from jaxserve.core.runtime.compile import watch_compiles
    from jaxserve.engine.stats import read_stats

    engine, count_compiles = llm.ready.engine, watch_compiles()
    before, compiled, steps_before = read_stats(engine), count_compiles(), engine.runner.counts.steps.copy()
    driver = _Driver(llm, options)
    driver.run(requests)
    after, steps = read_stats(engine), engine.runner.counts.steps - steps_before
    useful = after.useful_tokens - before.useful_tokens
    return Run(
        seconds=driver.seconds,
        requests=tuple(driver.finished[index] for index in range(len(requests))),
        steps={str(bucket): number for bucket, number in sorted(steps.items())},
        sizes=tuple(driver.sizes),
        useful_tokens=useful,
        padded_tokens=useful + after.padded_tokens - before.padded_tokens,
        num_preemptions=after.num_preemptions - before.num_preemptions,
        prefix_queries=after.prefix_queries - before.prefix_queries,
        prefix_hits=after.prefix_hits - before.prefix_hits,
        num_compiled=count_compiles() - compiled,
    )


class _Driver:
    """Sends requests when they arrive, and steps the engine."""

    def __init__(self, llm: LLM, options: RunOptions) -> None:
        self._llm, self._options = llm, options
        self._clock: Callable[[], float] = llm.ready.engine.scheduler.clock
        self._detokenizes = options.detokenizes and llm.ready.tokenizer is not None
        self._start = 0.0
        self._open: dict[str, int] = {}  # index of each unfinished request, by its id
        self.finished: dict[int, Finished] = {}
        self.sizes: list[StepSize] = []
        self.seconds = 0.0

    def run(self, requests: Sequence[BenchRequest]) -> None:
        """Runs all requests."""
        engine, keeps = self._llm.ready.engine, self._options.keeps_arrivals
        order = sorted(range(len(requests)), key=lambda index: requests[index].arrival_time if keeps else 0.0)
        queue, counts = deque(order), engine.runner.counts
        self._start = self._clock()
        while queue or engine.has_unfinished:
            now = self._clock() - self._start
            while queue and (not keeps or requests[queue[0]].arrival_time <= now):
                index = queue.popleft()
                self._send(index, requests[index])
            if not engine.has_unfinished:
                if queue:
                    time.sleep(max(0.0, requests[queue[0]].arrival_time - (self._clock() - self._start)))
                continue
            useful, generated = counts.useful_tokens, engine.counts.num_tokens
            for output in engine.step():
                if output.finished:
                    self._note(output)
            if (num_tokens := counts.useful_tokens - useful) > 0:
                self.sizes.append(StepSize(num_tokens, min(num_tokens, engine.counts.num_tokens - generated)))
        self.seconds = self._clock() - self._start

    def _send(self, index: int, each: BenchRequest) -> None:
        arrival = each.arrival_time if self._options.keeps_arrivals else 0.0
        try:
            request = replace(self._make(each), arrival_time=self._start + arrival)
            self._llm.ready.engine.add_request(request)
        except JaxServeError as error:
            now = self._clock() - self._start
            self.finished[index] = Finished(each.num_prompt_tokens, 0, arrival, None, now, failure=str(error))
            return
        self._open[request.request_id] = index

    def _make(self, each: BenchRequest) -> Request:
        params = SamplingParams(
            temperature=0,
            max_tokens=each.max_tokens,
            ignore_eos=self._options.ignores_eos,
            detokenize=self._detokenizes,
            output_kind=OutputKind.FINAL_ONLY,
        )
        ids = each.prompt_token_ids
        return self._llm.ready.requests.make(each.prompt or "" if ids is None else {"prompt_token_ids": ids}, params)

    def _note(self, output: RequestOutput) -> None:
        index, metrics = self._open.pop(output.request_id), output.metrics
        assert metrics is not None  # outputs of an engine in this process have them
        end = metrics.finished_time or self._clock()
        self.finished[index] = Finished(
            num_prompt_tokens=len(output.prompt_token_ids),
            num_output_tokens=len(output.outputs[0].token_ids),
            arrival=metrics.arrival_time - self._start,
            first_token=None if metrics.first_token_time is None else metrics.first_token_time - self._start,
            end=end - self._start,
            num_cached_tokens=output.num_cached_tokens,
            failure=None if output.error is None else str(output.error),
        )
