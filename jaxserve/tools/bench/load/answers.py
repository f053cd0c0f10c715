"""Reads a streamed answer of OpenAI's API, piece by piece, into a `RequestRecord`."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.tools.bench.load.records import RequestRecord

_DATA, _DONE = b"data:", b"[DONE]"
_SHOWN = 300  # bytes of an error's body that are kept
_OUTPUT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


class AnswerReader:
    """Takes the body of one answer as it comes. A chunk counts when it brings output, not when it only brings a role,
    an end or the usage."""

    def __init__(self, record: RequestRecord, *, keeps_text: bool = False) -> None:
        self._record, self._keeps_text = record, keeps_text
        self._tail = b""  # of a line that has not arrived whole
        self._body = b""  # of an answer that is no stream of events
        self.is_done = False  # the end of the stream has arrived

    def feed(self, data: bytes, now: float) -> None:
        """Takes the next bytes, which came at `now`."""
        if self._record.status != 200:
            self._body = (self._body + data)[:_SHOWN]
            return
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        for line in lines:
            if line.startswith(_DATA):
                self._read_event(line[len(_DATA) :].strip(), now)

    def finish(self, now: float) -> None:
        """Notes the end of the body."""
        record = self._record
        record.end = now
        if record.status != 200:
            record.error = f"HTTP {record.status}: {self._body.decode('utf-8', 'replace').strip()}"
        elif record.error is None and not (self.is_done or record.finish_reason):
            record.error = "the answer ended before its end of stream"
        elif record.error is None and not record.chunk_times:
            if record.num_output_tokens:
                record.chunk_times.append(now)  # tokens without text
            else:
                record.error = "the answer has no output"

    def _read_event(self, payload: bytes, now: float) -> None:
        if payload == _DONE:
            self.is_done = True
            return
        record = self._record
        try:
            event: dict[str, Any] = json.loads(payload)
            choices = event.get("choices")
            if choices:
                self._read_choice(choices[0], now)
            if "error" in event:
                record.error = f"error in the stream: {json.dumps(event['error'])[:_SHOWN]}"
            if usage := event.get("usage"):
                self._read_usage(usage)
        except (ValueError, TypeError, AttributeError, KeyError):
            record.error = f"an event is not OpenAI's: {payload[:_SHOWN].decode('utf-8', 'replace')}"

    def _read_choice(self, choice: dict[str, Any], now: float) -> None:
        record, delta = self._record, choice.get("delta")
        text = choice.get("text") if delta is None else delta.get("content")
        if text or (delta is not None and any(delta.get(key) for key in _OUTPUT_KEYS)):
            record.chunk_times.append(now)
            if self._keeps_text and text:
                record.text += text
        if reason := choice.get("finish_reason"):
            record.finish_reason = reason

    def _read_usage(self, usage: dict[str, Any]) -> None:
        record = self._record
        record.num_prompt_tokens = usage.get("prompt_tokens")
        record.num_output_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        record.num_cached_tokens = details.get("cached_tokens")
