"""Traces of requests: who asked when, for how many tokens. Five formats, told apart by their first line.

- Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens; Patel et al. 2024, "Splitwise"): prompts share nothing.
- Mooncake's JSON lines (timestamp in ms, input_length, output_length, hash_ids; Qin et al. 2025): prompts with equal
  leading hash_ids share these blocks of 512 tokens.
- The server's own log, `jaxserve serve --log-format json`: a request arrived when its answer ended, less its duration.
- The answers of `jaxserve run-batch`: all requests arrive at once.
- The package's own CSV (gap_seconds, prompt_tokens, output_tokens), of which it has three, each with a name.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError, shorten
from jaxserve.request import Request, ServiceTier, Tenant
from jaxserve.tools.simulation.replica import make_request

MOONCAKE_BLOCK = 512  # tokens of a hash id
_MOST_TOKENS = 2**24  # of a prompt or an answer, more than any model's context
_MOST_SECONDS = 366 * 86400.0  # between the first and the last request
_FIRST_FREE_ID = 2**40  # of prompts without blocks: above the numbers of blocks
PACKAGED_TRACES = ("azure-chat", "azure-code", "mooncake")  # 500 requests each; bench draws lengths of them
_PACKAGE = Path(__file__).parents[1] / "bench" / "lengths"
_OWN_COLUMNS = ["gap_seconds", "prompt_tokens", "output_tokens"]
_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    arrival_time: float  # seconds after the first
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...] = ()  # contents of the prompt's blocks of MOONCAKE_BLOCK tokens; (): like no other prompt
    tenant: str = ""
    service_tier: ServiceTier = ServiceTier.DEFAULT
    priority: int = 0


class _LineError(ValueError):
    """A line that the format does not allow."""


def read_trace(path: str | Path) -> list[TraceRequest]:
    """Returns the requests of a trace, a file or one of `PACKAGED_TRACES`, by arrival; the first arrives at 0.

    Raises:
        ConfigError: the file cannot be read, its format is unknown, a line is malformed, or it has no requests.
    """
    name = str(path)
    file_path = _PACKAGE / f"{name}.csv" if name in PACKAGED_TRACES and not Path(name).exists() else Path(path)
    try:
        with file_path.open(encoding="utf-8-sig", newline="") as file:
            found = list(_read_lines(name, iter(file)))
    except (OSError, UnicodeDecodeError) as error:
        message = f"{name} cannot be read: {error}; the package has {', '.join(PACKAGED_TRACES)}"
        raise ConfigError(message, field="trace", value=name) from error
    if not found:
        raise ConfigError(f"{name} has no requests", field="trace", value=name)
    first = min(request.arrival_time for request in found)
    shifted = [dataclasses.replace(each, arrival_time=each.arrival_time - first) for each in found]
    shifted.sort(key=lambda request: request.arrival_time)
    if (span := shifted[-1].arrival_time) > _MOST_SECONDS:
        message = f"{name}: its requests arrive within {span:.3g} s, and at most {_MOST_SECONDS:.3g} s can be replayed"
        raise ConfigError(message, field="trace", value=span)
    return shifted


def _read_lines(name: str, lines: Iterator[str]) -> Iterator[TraceRequest]:
    first = next(lines, "")
    if next(csv.reader([first]), None) == _OWN_COLUMNS:
        yield from _parse_all(name, csv.reader(lines), _parse_own(), 2)
        return
    if next(csv.reader([first]), None) == _AZURE_COLUMNS:
        yield from _parse_all(name, csv.reader(lines), _parse_azure, 2)
        return
    records = (line for line in chain([first], lines) if line.strip())
    try:
        parse = _PARSERS[next(kind for kind in _PARSERS if kind in json.loads(first))]
    except (ValueError, TypeError, RecursionError, StopIteration):
        message = (
            f"{name} is in no known format; known are Azure's CSV ({','.join(_AZURE_COLUMNS)}), Mooncake's JSON lines, "
            "the log of jaxserve serve --log-format json, and the answers of jaxserve run-batch"
        )
        raise ConfigError(message, field="trace", value=name) from None
    yield from _parse_all(name, records, lambda line: parse(json.loads(line)), 1)


def _parse_all(
    name: str, lines: Iterable[Any], parse: Callable[[Any], TraceRequest | None], first_number: int
) -> Iterator[TraceRequest]:
    """Yields the requests of all lines; a line without one is skipped."""
    for number, line in enumerate(lines, first_number):
        try:
            request = parse(line)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ConfigError(f"{name}, line {number}: {reason}", field="trace", value=shorten(line)) from error
        if request is not None and request.num_output_tokens:
            yield request


def _parse_own() -> Callable[[list[str]], TraceRequest]:
    """Returns a parser of the package's own lines, in order: each has the time since the one before."""
    now = 0.0

    def parse(row: list[str]) -> TraceRequest:
        nonlocal now
        gap, prompt, output = row
        now += _read_seconds(float(gap))
        return TraceRequest(now, _count_prompt(int(prompt)), _count_output(int(output)))

    return parse


def _parse_azure(row: list[str]) -> TraceRequest | None:
    if not row:
        return None
    stamp, prompt, output = row
    return TraceRequest(_read_time(stamp[:26]), _count_prompt(int(prompt)), _count_output(int(output)))


def _parse_mooncake(record: dict[str, Any]) -> TraceRequest:
    length, blocks = _count_prompt(record["input_length"]), tuple(map(_read_block, record["hash_ids"]))
    if len(blocks) * MOONCAKE_BLOCK < length:
        raise _LineError(f"{len(blocks)} hash_ids of {MOONCAKE_BLOCK} tokens do not cover input_length={length}")
    output = _count_output(record["output_length"])
    return TraceRequest(_read_seconds(record["timestamp"]) / 1000, length, output, blocks)


def _parse_log(record: dict[str, Any]) -> TraceRequest | None:
    if record.get("logger") != "jaxserve.access" or record.get("output_tokens") is None:
        return None  # an event, or a request that generated nothing
    return TraceRequest(
        _read_time(record["time"]) - _read_seconds(record["seconds"]),
        _count_prompt(record["prompt_tokens"]),
        _count_output(record["output_tokens"]),
        tenant=str(record.get("tenant", "")),
        service_tier=ServiceTier[str(record.get("service_tier", "default")).upper()],
    )


def _parse_answer(record: dict[str, Any]) -> TraceRequest | None:
    usage = ((record["response"] or {}).get("body") or {}).get("usage")
    if usage is None:
        return None  # the request failed
    prompt = usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"]
    output = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return TraceRequest(0.0, _count_prompt(prompt), _count_output(output))


_PARSERS: dict[str, Callable[[dict[str, Any]], TraceRequest | None]] = {  # by a key of the first line
    "hash_ids": _parse_mooncake,
    "logger": _parse_log,
    "response": _parse_answer,
}


def _count_prompt(tokens: object) -> int:
    return _read_integer(tokens, "a prompt's tokens", 1, _MOST_TOKENS)


def _count_output(tokens: object) -> int:
    return _read_integer(tokens, "an answer's tokens", 0, _MOST_TOKENS)


def _read_block(number: object) -> int:
    return _read_integer(number, "a hash id", 0, _FIRST_FREE_ID - 1)


def _read_integer(value: object, what: str, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _LineError(f"{what} must be an integer in [{least}, {most}], got {shorten(value)}")
    return value


def _read_seconds(value: object) -> float:
    """Returns a time since the start, or a duration; the unit is the caller's."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e18:  # not NaN either
        raise _LineError(f"a time must be a number of at least 0 and below 1e18, got {shorten(value)}")
    return float(value)


def _read_time(stamp: str) -> float:
    """Returns a date and time in seconds since 1970; without a zone it is UTC."""
    found = datetime.fromisoformat(stamp)
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def make_requests(trace: Iterable[TraceRequest], *, rate_scale: float = 1.0) -> Iterator[Request]:
    """Yields the requests of a trace, each made when it is asked for.

    A block is its number, as often as it has tokens: prompts have equal ids where the trace says that their blocks are
    equal, and nowhere else. (A page's key covers all tokens before it, so equal pages at two places are two.) All
    tenants have weight 1.

    Args:
        rate_scale: requests arrive so many times as fast.
    """
    known: dict[str, Tenant] = {}
    next_id = _FIRST_FREE_ID
    for index, each in enumerate(trace):
        length = each.num_prompt_tokens
        if each.blocks:
            ids = tuple(chain.from_iterable(repeat(block, MOONCAKE_BLOCK) for block in each.blocks))[:length]
        else:
            ids, next_id = (next_id,) * length, next_id + 1
        yield make_request(
            f"{index}",
            each.arrival_time / rate_scale,
            ids,
            each.num_output_tokens,
            tenant=known.setdefault(each.tenant, Tenant(each.tenant)),
            service_tier=each.service_tier,
            priority=each.priority,
        )
