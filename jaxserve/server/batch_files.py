"""The two files of a batch: the requests, and the answers, written so that a killed run can be resumed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jaxserve.errors import ConfigError, shorten

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"),
    *("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/pooling", "/v2/embed"),
)
MAX_LINE = 64 * 2**20  # bytes; longer input lines are errors
_HEAD = b'{"id":"batch_req_'  # begins every output line
_BOM = b"\xef\xbb\xbf"


class LineError(Exception):
    """A line that is not a valid request; `code` says why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of the input: a request, or what is wrong with it."""

    number: int  # from 1
    custom_id: str | None  # None when the line has none
    url: str = ""
    body: dict[str, Any] | None = None
    error: LineError | None = None

    @property
    def key(self) -> str:
        """Identifies the line in the input and the output."""
        return _make_key(self.custom_id, name_line(self.number))


def name_line(number: int) -> str:
    """Returns the id of the answer to a line that has no custom_id."""
    return f"batch_req_line_{number}"


def _make_key(custom_id: str | None, answer_id: str) -> str:
    return f"line:{answer_id}" if custom_id is None else f"id:{custom_id}"


def read_lines(path: Path) -> Iterator[BatchLine]:
    """Yields the non-blank lines of an input file, valid or not, and holds one at a time.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE):
                number += 1
                is_whole = len(raw) < MAX_LINE or raw.endswith(b"\n")
                while not is_whole and (rest := file.readline(MAX_LINE)):
                    is_whole = rest.endswith(b"\n")
                    raw = b""
                if number == 1:
                    raw = raw.removeprefix(_BOM)
                if not raw:
                    message = f"line {number} is longer than {MAX_LINE} bytes"
                    yield BatchLine(number, None, error=LineError("line_too_long", message))
                elif not raw.isspace():
                    yield _read_line(number, raw)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error}", field="input_file", value=str(path)) from error


def _read_line(number: int, raw: bytes) -> BatchLine:
    try:
        found = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        message = f"line {number} is not valid JSON: {error}"
        return BatchLine(number, None, error=LineError("invalid_json", message))
    custom_id = found.get("custom_id") if isinstance(found, dict) else None
    if not isinstance(custom_id, str) or not custom_id:
        message = f"line {number} must be an object with a custom_id, which is a text"
        return BatchLine(number, None, error=LineError("missing_custom_id", message))
    try:
        return BatchLine(number, custom_id, *_read_request(found))
    except LineError as error:
        return BatchLine(number, custom_id, error=error)


def _read_request(found: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    method, url, body = found.get("method"), found.get("url"), found.get("body")
    if method != "POST":
        raise LineError("invalid_method", f"method must be 'POST', got {shorten(method)}")
    if url not in URLS:
        raise LineError("invalid_url", f"url must be one of {', '.join(URLS)}, got {shorten(url)}")
    if not isinstance(body, dict):
        raise LineError("invalid_body", f"body must be an object, got {shorten(body)}")
    if body.get("stream"):
        raise LineError("streaming_unsupported", "batches are not streamed: leave out 'stream'")
    return url, body


def scan_input(path: Path) -> dict[str, int]:
    """Returns the number of every line by its key.

    Raises:
        ConfigError: the file cannot be read, or two lines have the same custom_id.
    """
    numbers: dict[str, int] = {}
    for line in read_lines(path):
        first = numbers.setdefault(line.key, line.number)
        if first != line.number:
            message = f"lines {first} and {line.number} have the same custom_id {shorten(line.custom_id)}"
            raise ConfigError(message, field="input_file", value=str(path))
    return numbers


@dataclass
class Recorded:
    """What earlier runs have written."""

    keys: set[str]
    num_failed: int = 0
    size: int = 0  # bytes of whole lines


class BatchOutput:
    """The output file. One process at a time appends to it, whole lines only.

    A line that a kill cut short is removed when the file is opened again. Raises ConfigError when the file cannot be
    written, another run is writing it, or it holds anything but answers to the lines in `expected`.
    """

    def __init__(self, path: Path, expected: dict[str, int]) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise self._refuse(f"cannot be written: {error}") from error
        try:
            self._lock()
            with open(self._file, "rb", closefd=False) as file:
                self.recorded = self._scan(file, expected)
            os.ftruncate(self._file, self.recorded.size)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, answer: dict[str, Any]) -> None:
        """Appends one line; ConfigError when the disk is full. The next run removes an incomplete line."""
        rest = memoryview(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise self._refuse(f"cannot be written: {error}") from error

    def sync(self) -> None:
        """Flushes all lines to the disk."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise self._refuse(f"cannot be written: {error}") from error

    def close(self) -> None:
        """Flushes, and releases the file's lock."""
        try:
            self.sync()
        finally:
            os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise self._refuse("another run is writing it") from error

    def _scan(self, file: BinaryIO, expected: dict[str, int]) -> Recorded:
        found = Recorded(set())
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                if not (raw.startswith(_HEAD) or _HEAD.startswith(raw)):
                    raise self._refuse(f"its line {number} is not a batch answer; give another file")
                break
            key, failed = self._read_answer(number, raw)
            if key not in expected:
                name = key.partition(":")[2]
                message = f"its line {number} answers {shorten(name)}, which is not in the input; give another file"
                raise self._refuse(message)
            if key in found.keys:
                raise self._refuse(f"its line {number} answers {shorten(key.partition(':')[2])} a second time")
            found.keys.add(key)
            found.num_failed += failed
            found.size += len(raw)
        return found

    def _read_answer(self, number: int, raw: bytes) -> tuple[str, bool]:
        """Returns the key of the answered line, and whether the answer is a failure."""
        try:
            answer = json.loads(raw)
            response = answer["response"]
            failed = response is None or not 200 <= response["status_code"] < 300
            custom_id, answer_id = answer["custom_id"], answer["id"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._refuse(f"its line {number} is not a batch answer; give another file") from error
        return _make_key(custom_id, answer_id), failed

    def _refuse(self, message: str) -> ConfigError:
        return ConfigError(message, field="output_file", value=str(self._path))
