"""One span for each request: when, how much and how long, and nothing of what."""

from __future__ import annotations

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jaxserve.errors import ConfigError, DeviceStepError
from jaxserve.request import CompletionOutput, Request, RequestMetrics, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.tracing import NullTracer, OtelTracer, make_tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "my secret prompt"


def make_request(**params: Any) -> Request:
    params = {"max_tokens": 64, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": [SECRET]} | params
    arrival = time.monotonic() - 5
    return Request("r-1", (9001, 9002, 9003), SamplingParams(**params), prompt=SECRET, arrival_time=arrival)


def make_output(request: Request, **changes: Any) -> RequestOutput:
    at = request.arrival_time
    values: dict[str, Any] = {
        "prompt_token_ids": list(request.prompt_token_ids),
        "outputs": [
            CompletionOutput(0, SECRET, [9004, 9005], finish_reason="stop", stop_reason=SECRET),
            CompletionOutput(1, SECRET, [9006], finish_reason="length"),
        ],
        "num_cached_tokens": 2,
        "metrics": RequestMetrics(at, at + 0.25, at + 1, at + 3),
    }
    return RequestOutput("r-1", SECRET, finished=True, **(values | changes))


def trace(
    request: Request, output: RequestOutput | None, num_tokens: int = 3, *, operation: str = "chat", **headers: str
) -> ReadableSpan:
    exporter = InMemorySpanExporter()
    tracer = OtelTracer("my-service", SimpleSpanProcessor(exporter), model="demo")
    tracer.trace_request(request, output, num_tokens, operation=operation, headers=headers)
    tracer.shutdown()
    (span,) = exporter.get_finished_spans()
    return span


def test_attributes_follow_the_conventions() -> None:
    request = make_request(seed=7)
    span = trace(request, make_output(request), operation="chat")
    found = dict(span.attributes or {})
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "jaxserve",
        "gen_ai.request.model": "demo",
        "gen_ai.request.id": "r-1",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.request.n": 2,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ("stop", "length"),
    }
    assert {name: found.get(name) for name in expected} == expected
    assert found["gen_ai.latency.time_in_queue"] == pytest.approx(0.25)
    assert found["gen_ai.latency.time_to_first_token"] == pytest.approx(1)
    assert found["gen_ai.latency.time_in_model_prefill"] == pytest.approx(0.75)
    assert found["gen_ai.latency.time_in_model_decode"] == pytest.approx(2)
    assert found["gen_ai.latency.e2e"] == pytest.approx(3)
    assert (span.name, span.kind, span.parent) == ("chat demo", SpanKind.SERVER, None)
    assert span.resource.attributes["service.name"] == "my-service"
    assert span.status.status_code is StatusCode.UNSET


def test_times_are_wall_clock() -> None:
    request = make_request()
    span = trace(request, make_output(request))
    assert span.start_time is not None and span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(3, abs=1e-3)
    assert (time.time_ns() - span.start_time) / 1e9 == pytest.approx(5, abs=60)


def test_no_text_and_no_token_ids() -> None:
    request = make_request()
    span = trace(request, make_output(request, error=DeviceStepError(SECRET)))
    text = span.to_json()
    assert (span.attributes or {})["error.type"] == "DeviceStepError" and span.status.status_code is StatusCode.ERROR
    assert "secret" not in text
    assert not any(str(token) in text for token in range(9001, 9007))


def test_the_clients_span_is_the_parent() -> None:
    request = make_request()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "authorization": SECRET}
    span = trace(request, make_output(request), **headers)
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
    assert span.context.trace_id == int(TRACE, 16)
    assert span.context.trace_state.get("vendor") == "1"
    assert "secret" not in span.to_json()


@pytest.mark.parametrize(
    "header", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}", "00-" * 10_000]
)
def test_a_bad_parent_is_no_parent(header: str) -> None:
    request = make_request()
    assert trace(request, make_output(request), traceparent=header).parent is None


def test_a_trace_that_the_client_does_not_record_is_not_recorded() -> None:
    exporter = InMemorySpanExporter()
    tracer = OtelTracer("s", SimpleSpanProcessor(exporter))
    request = make_request()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    tracer.trace_request(request, make_output(request), 3, operation="chat", headers=headers)
    assert exporter.get_finished_spans() == ()


def test_deltas_bring_their_own_count() -> None:
    request = make_request()
    assert (trace(request, make_output(request), 40).attributes or {})["gen_ai.usage.output_tokens"] == 40


def test_a_client_that_left_has_a_span() -> None:
    span = trace(make_request(max_tokens=None), None)
    found = dict(span.attributes or {})
    assert found["gen_ai.latency.e2e"] >= 5
    assert "gen_ai.request.max_tokens" not in found and "gen_ai.response.finish_reasons" not in found
    assert span.status.status_code is StatusCode.UNSET, "nothing failed"


def test_a_request_that_was_never_scheduled() -> None:
    request = make_request()
    ended = RequestMetrics(request.arrival_time, None, None, request.arrival_time + 1)
    aborted = [CompletionOutput(0, "", [], finish_reason="abort")]
    found = dict(trace(request, make_output(request, metrics=ended, outputs=aborted)).attributes or {})
    assert [name for name in found if name.startswith("gen_ai.latency")] == ["gen_ai.latency.e2e"]
    assert found["gen_ai.response.finish_reasons"] == ("abort",)


def test_without_endpoint_nothing_is_traced_or_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    tracer = make_tracer(None, "s")
    assert isinstance(tracer, NullTracer)
    tracer.trace_request(make_request(), None, 3, operation="chat", headers={"traceparent": "x"})
    tracer.shutdown()


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]'") as caught:
        make_tracer("http://127.0.0.1:4318", "s")
    assert caught.value.field == "otlp_traces_endpoint"


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4318", "grpc://h:4317", "http://", "http://[::1", "http://h:99999"]
)
def test_a_bad_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="OTLP over HTTP"):
        make_tracer(endpoint, "s")


class Collector(BaseHTTPRequestHandler):
    """What stands behind the endpoint."""

    received: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        self.received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize(("path", "asked"), [("", "/v1/traces"), ("/", "/v1/traces"), ("/my/traces", "/my/traces")])
def test_spans_reach_a_collector(path: str, asked: str) -> None:
    handler = type("Bound", (Collector,), {"received": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        tracer = make_tracer(f"http://127.0.0.1:{server.server_port}{path}", "my-service", model="demo")
        request = make_request()
        tracer.trace_request(request, make_output(request), 3, operation="text_completion", headers={})
        tracer.shutdown()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    ((at, body),) = handler.received
    assert at == asked
    (resource,) = ExportTraceServiceRequest.FromString(_decompress(body)).resource_spans
    assert resource.scope_spans[0].spans[0].name == "text_completion demo"
    assert SECRET.encode() not in _decompress(body)


def _decompress(body: bytes) -> bytes:
    import gzip

    return gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body
