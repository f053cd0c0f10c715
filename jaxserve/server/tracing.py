"""One OpenTelemetry span per engine request, optional.

Spans have counts and times, and no text, token ids or keys.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from jaxserve.errors import ConfigError, shorten
from jaxserve.request import FinishReason, Request, RequestMetrics, RequestOutput, Task

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_FIELD = "otlp_traces_endpoint"
_PARENT = ("traceparent", "tracestate")
_EXPORT_SECONDS = 5.0  # time limit for sending a batch of spans


class Tracer(Protocol):
    """Makes spans of requests."""

    def trace_request(
        self,
        request: Request,
        output: RequestOutput | None,
        num_tokens: int,
        *,
        operation: str,
        headers: Mapping[str, str],
    ) -> None:
        """Makes the span of a finished request.

        Args:
            output: its last output; None when its client left before that.
            num_tokens: the number of tokens of all its completions.
            operation: "chat", "text_completion" or "embeddings".
            headers: those of the HTTP request, in lower case; two of them name the span's parent.
        """
        ...

    def shutdown(self) -> None:
        """Sends the remaining spans, which may take seconds."""
        ...


class NullTracer:
    """Traces nothing."""

    def trace_request(self, *_args: Any, **_options: Any) -> None:
        """Does nothing."""

    def shutdown(self) -> None:
        """Does nothing."""


class OtelTracer:
    """Makes spans with the OpenTelemetry SDK, in its own provider."""

    def __init__(self, service_name: str, processor: SpanProcessor, *, model: str = "") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": service_name})
        self._model = model
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("jaxserve")
        self._propagator = TraceContextTextMapPropagator()

    def trace_request(
        self,
        request: Request,
        output: RequestOutput | None,
        num_tokens: int,
        *,
        operation: str,
        headers: Mapping[str, str],
    ) -> None:
        """Makes the span, from the request's arrival to its last token."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        times = output.metrics if output is not None else None
        ended = times.finished_time if times is not None and times.finished_time is not None else time.monotonic()
        to_wall = time.time_ns() - time.monotonic_ns()
        attributes = {"gen_ai.operation.name": operation, **_describe_request(request)}
        if model := self._model if request.adapter is None else request.adapter.name:
            attributes["gen_ai.request.model"] = model
        if output is not None:
            attributes |= _describe_output(output, num_tokens)
        span = self._tracer.start_span(
            f"{operation} {self._model}".rstrip(),
            context=self._propagator.extract({name: headers[name] for name in _PARENT if name in headers}),
            kind=SpanKind.SERVER,
            start_time=int(request.arrival_time * 1e9) + to_wall,
            attributes=attributes | _describe_times(request.arrival_time, times, ended),
        )
        if output is not None and output.error is not None:
            span.set_attribute("error.type", type(output.error).__name__)
            span.set_status(Status(StatusCode.ERROR))
        span.end(int(ended * 1e9) + to_wall)

    def shutdown(self) -> None:
        """Sends the remaining spans."""
        self._provider.shutdown()


def make_tracer(endpoint: str | None, service_name: str, *, model: str = "") -> Tracer:
    """Returns the tracer that sends spans to an OTLP/HTTP endpoint, or one that does nothing without an endpoint.

    `model` is the name under which clients know the model. An endpoint without a path gets the default, /v1/traces. A
    thread sends the spans and drops them when too many wait, so a collector that does not answer delays nothing.

    Raises:
        ConfigError: not an http or https address, or the extra `otel` is not installed.
    """
    if endpoint is None:
        return NullTracer()
    address = _complete(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        message = "tracing needs the extra 'otel': pip install '.[otel]' in a checkout"
        raise ConfigError(message, field=_FIELD, value=endpoint) from error
    exporter = OTLPSpanExporter(endpoint=address, timeout=_EXPORT_SECONDS)
    return OtelTracer(service_name, BatchSpanProcessor(exporter), model=model)


def _complete(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        message = f"must be an OTLP over HTTP address, such as http://localhost:4318, got {shorten(endpoint)}"
        raise ConfigError(message, field=_FIELD, value=endpoint)
    return endpoint.rstrip("/") + "/v1/traces" if parts.path in ("", "/") and not parts.query else endpoint


def _describe_request(request: Request) -> dict[str, Any]:
    """Returns the request's attributes, named by OpenTelemetry's conventions for generative models."""
    params = request.params
    asked = {
        "id": request.request_id[:128],
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "n": params.n,
        "choice.count": params.n,
        "seed": params.seed,
    }
    if request.task is Task.POOL:
        asked = {"id": asked["id"]}
    return {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None} | {
        "gen_ai.provider.name": "jaxserve",
        "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
    }


def _describe_output(output: RequestOutput, num_tokens: int) -> dict[str, Any]:
    reasons = [c.finish_reason or FinishReason.ABORT.value for c in output.outputs]
    return {
        "gen_ai.usage.completion_tokens": num_tokens,
        "gen_ai.usage.output_tokens": num_tokens,
        "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.response.id": output.request_id[:128],
    }


def _describe_times(arrival: float, times: RequestMetrics | None, ended: float) -> dict[str, float]:
    """Returns the request's latencies in seconds, as far as it came."""
    named = {"gen_ai.latency.e2e": ended - arrival}
    if times is None:
        return named
    if times.first_scheduled_time is not None:
        named["gen_ai.latency.time_in_queue"] = times.first_scheduled_time - arrival
    if times.first_token_time is not None:
        named["gen_ai.latency.time_to_first_token"] = times.first_token_time - arrival
        if times.first_scheduled_time is not None:
            named["gen_ai.latency.time_in_model_prefill"] = times.first_token_time - times.first_scheduled_time
        named["gen_ai.latency.time_in_model_decode"] = ended - times.first_token_time
    return named
