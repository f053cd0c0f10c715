"""Records of a request that has ended, and of a whole run: plain values, whoever sent the requests."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise


def _make_times() -> array[float]:
    return array("d")


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds of the monotonic clock, which all processes of a machine share."""

    scheduled: float = 0.0  # when it should have been sent
    due: float = 0.0  # when the client was free to send it: `scheduled`, or later at the limit of concurrency
    sent: float = 0.0
    end: float = 0.0
    chunk_times: array[float] = field(default_factory=_make_times)  # of chunks with output
    status: int = 0  # of HTTP; 0: no answer
    num_prompt_tokens: int | None = None  # None: the server did not say
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None  # None: the whole answer has arrived
    text: str = ""  # only where it was asked for

    @property
    def is_refused(self) -> bool:
        """Whether the server had no room for it."""
        return self.status == 429

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer has arrived, with output."""
        return self.error is None and len(self.chunk_times) > 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer; chunks where the server counts no tokens."""
        return len(self.chunk_times) if self.num_output_tokens is None else self.num_output_tokens

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first chunk with output."""
        return self.chunk_times[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds from sending to the end of the answer."""
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first: (E2EL - TTFT) / (tokens - 1); None for a single token."""
        return (self.e2el - self.ttft) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        """Seconds between two chunks."""
        times = self.chunk_times
        return [after - before for before, after in pairwise(times)]


@dataclass(frozen=True)
class LoadOutcome:
    """The records of all requests, in the order in which they were given, and what the client itself used."""

    records: list[RequestRecord]
    start: float  # a time of the monotonic clock
    seconds: float  # from there to the end of the last request
    worker_cores: tuple[float, ...]  # the share of a core that each process used
    cpu_seconds: float  # of all processes

    @property
    def num_chunks(self) -> int:
        """Chunks with output."""
        return sum(len(record.chunk_times) for record in self.records)

    @property
    def lags(self) -> list[float]:
        """Seconds by which the client sent requests late; of those that were not due at the start."""
        return [max(0.0, record.sent - record.due) for record in self.records if record.end and record.due > self.start]
