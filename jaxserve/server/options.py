"""The options of `jaxserve serve` beside the engine's: address, access, limits, serving and logs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError, shorten
from jaxserve.options import build_config, check_at_least, check_choices, option
from jaxserve.request import PRIORITIES, ServiceTier
from jaxserve.sampling_params import MAX_COMPLETIONS
from jaxserve.server.acceptance import LEVELS
from jaxserve.server.lora_modules import read_lora_modules
from jaxserve.vllm_options import drop_harmless

_LAST_PORT = 65535
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where the server listens."""

    host: str = option("127.0.0.1", "address to listen on; any but a loopback address needs an API key")
    port: int = option(8000, "port to listen on; 0: any free one")
    uds: str | None = option(None, "listen on this Unix socket instead")
    admin_port: int | None = option(None, "port of 127.0.0.1 for profiles and adapters; default: none")
    ssl_keyfile: str | None = option(None, "private key (PEM) for TLS")
    ssl_certfile: str | None = option(None, "certificate (PEM) for TLS")
    ssl_ca_certs: str | None = option(None, "CA certificates (PEM) that clients' certificates must be signed by")
    root_path: str = option("", "path under which a proxy publishes the server")
    allowed_hosts: tuple[str, ...] = option((), "Host headers to answer to; default: any")

    def __post_init__(self) -> None:
        check_at_least(self, port=0, admin_port=1)
        for name in ("port", "admin_port"):
            if (getattr(self, name) or 0) > _LAST_PORT:
                raise ConfigError(
                    f"at most {_LAST_PORT}, got {getattr(self, name)}", field=name, value=getattr(self, name)
                )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("TLS needs ssl_keyfile and ssl_certfile", field="ssl_certfile", value=self.ssl_certfile)
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            message = "needs ssl_keyfile and ssl_certfile: without TLS, clients send no certificate"
            raise ConfigError(message, field="ssl_ca_certs", value=self.ssl_ca_certs)
        if self.uds == "":
            raise ConfigError("must be a path, got ''", field="uds", value=self.uds)


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Who may use the server."""

    api_key: tuple[str, ...] = option((), "key that clients must send; repeatable; also JAXSERVE_API_KEY=key,key")
    api_key_file: str | None = option(None, "file with one key per line")
    tenants: str | None = option(None, "TOML file of tenants: API keys with a weight, tiers and limits of their own")
    allow_no_key: bool = option(False, "listen on a public address without any key")
    allow_metrics_without_key: bool = option(False, "answer GET /metrics without a key, as endpoint pickers ask for it")
    allowed_origins: tuple[str, ...] = option((), "web origins that may call from a browser (CORS); default: none")
    allowed_methods: tuple[str, ...] = option(("GET", "HEAD", "POST"), "methods that those origins may use")
    # OpenAI's JavaScript client sends a dozen headers of its own, and each release may add one.
    allowed_headers: tuple[str, ...] = option(("*",), "headers that those origins may send; *: any")


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Limits. What exceeds one is refused at once, with an error that names it."""

    max_body_bytes: int = option(32 * 2**20, "bytes of a request's body")
    max_body_bytes_total: int = option(256 * 2**20, "bytes of all bodies being read and prepared")
    max_image_bytes_total: int = option(2 * 2**30, "bytes of resized images of all unfinished requests")
    max_header_bytes: int = option(16 * 2**10, "bytes of a request's head", "h11_max_incomplete_event_size")
    max_connections: int = option(4096, "connections at once")
    max_streams: int = option(2048, "requests being answered at once; more get 429")
    max_prompts: int = option(2048, "prompts of one completion or embedding request")
    max_prompt_logprobs: int = option(2**18, "log-probabilities of prompt tokens in one answer")
    max_pooled_numbers: int = option(2**23, "numbers in one answer that has some for each token")
    max_queue_wait: float = option(
        5.0, "seconds that a request may expect to wait for its first step; more get 429 at once; 0: any, as for flex"
    )
    max_n: int = option(MAX_COMPLETIONS, "completions of one prompt")
    max_sequences_per_request: int = option(256, "prompts x n of one request; never more than 4 x max_num_seqs")
    max_priority: int = option(0, "the best priority that a request may ask for; smaller numbers run first")
    request_timeout: float | None = option(None, "seconds until a request is ended, whatever timeout it asked for")
    body_timeout: float = option(60.0, "seconds for a request's head and for its body to arrive")
    slow_reader_timeout: float = option(60.0, "seconds that a client may read nothing of its answer")
    keep_alive_timeout: float = option(
        75.0, "seconds that an idle connection stays open; longer than the pools of clients and proxies keep one"
    )
    template_timeout: float = option(30.0, "seconds for the template and the texts of one request")
    max_grammar_time: float = option(
        10.0, "seconds a minute for compiling new grammars of one key; more get 429; 0: no limit"
    )

    def __post_init__(self) -> None:
        check_at_least(self, max_body_bytes=1, max_body_bytes_total=1, max_header_bytes=1024)
        check_at_least(self, max_image_bytes_total=1)
        check_at_least(self, max_connections=1, max_streams=1, max_prompts=1, max_prompt_logprobs=1, max_n=1)
        check_at_least(self, max_pooled_numbers=1)
        check_at_least(self, max_sequences_per_request=1, max_priority=PRIORITIES.start)
        if self.max_n > MAX_COMPLETIONS:
            raise ConfigError(f"at most {MAX_COMPLETIONS}, got {self.max_n}", field="max_n", value=self.max_n)
        for name in (
            "request_timeout",
            "body_timeout",
            "slow_reader_timeout",
            "keep_alive_timeout",
            "template_timeout",
        ):
            _require_seconds(name, getattr(self, name))
        for name in ("max_queue_wait", "max_grammar_time"):
            _require_seconds(name, getattr(self, name), least=0.0)

    def find_longest_wait(self, tier: ServiceTier) -> float | None:
        """Returns the seconds that a request of this tier may wait for its turn; None: no limit."""
        return None if tier == ServiceTier.FLEX else self.max_queue_wait or None


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """How the model is served."""

    served_model_name: tuple[str, ...] = option(
        (), "the model's names for clients, one or several; answers carry the first; default: its own", takes_many=True
    )
    lora_modules: tuple[str, ...] = option(
        (),
        'adapters to serve as models: name=path, or {"name": ..., "path": ..., "base_model_name": ...}',
        takes_many=True,
    )
    lora_dir: str | None = option(
        None, "directory below which the admin port may load adapters (/v1/load_lora_adapter); default: none"
    )
    chat_template: str | None = option(None, "file with a Jinja template that replaces the tokenizer's")
    allow_request_chat_template: bool = option(False, "render chat templates that requests bring")
    default_chat_template_kwargs: str | None = option(None, "default variables of the template, as a JSON object")
    enable_auto_tool_choice: bool = option(True, "accept tool_choice auto, where the model decides")
    tool_call_parser: str = option("auto", "format of the model's tool calls; auto: detected from its template; none")
    refuse_hosted_tools: bool = option(
        False, "refuse requests with hosted tools (web_search, ...), which are left out of prompts otherwise"
    )
    reasoning_parser: str = option(
        "auto", "format of the model's reasoning; auto: detected from its template; none: it is part of the answer"
    )
    enable_force_include_usage: bool = option(False, "end every stream with its token usage")
    per_request_spec_decode_metrics: str = option(
        "none",
        "tell in each answer how many drafts were verified and accepted (speculative_config); detailed: by step, too",
        choices=LEVELS,
    )
    serve_while_warming: bool = option(False, "serve with the largest programs while the others compile")
    shutdown_timeout: float = option(30.0, "seconds for running requests to end after SIGTERM")
    watchdog_timeout: float = option(60.0, "seconds without a step, while there is work, until /health fails")

    def __post_init__(self) -> None:
        check_choices(self)
        _require_seconds("shutdown_timeout", self.shutdown_timeout, least=0.0)
        _require_seconds("watchdog_timeout", self.watchdog_timeout)
        self.template_variables()
        read_lora_modules(self.lora_modules)

    def template_variables(self) -> dict[str, Any]:
        """Returns the default variables of chat templates; ConfigError unless they are a JSON object."""
        try:
            values = json.loads(self.default_chat_template_kwargs or "{}")
        except ValueError:
            values = None
        if not isinstance(values, dict):
            name, value = "default_chat_template_kwargs", self.default_chat_template_kwargs
            raise ConfigError(f"must be a JSON object, got {shorten(value)}", field=name, value=value)
        return values


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Logs, metrics and traces. Prompts, answers and keys are never logged."""

    log_level: str = option("info", "least level that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "lines for people, or one JSON object per line", choices=("text", "json"))
    status_interval: float = option(10.0, "seconds between status lines of the engine; 0: none")
    access_log: bool = option(True, "one line per request")
    metrics_prefix: str = option("jaxserve", "prefix of metric names; 'vllm' fits dashboards made for vLLM")
    otlp_traces_endpoint: str | None = option(None, "address to send OpenTelemetry spans to (OTLP over HTTP)")
    disable_fastapi_docs: bool = option(False, "do not serve /docs and /openapi.json")

    def __post_init__(self) -> None:
        check_choices(self)
        _require_seconds("status_interval", self.status_interval, least=0.0)
        if not self.metrics_prefix.isidentifier():
            raise ConfigError(
                f"must be a plain word, got {shorten(self.metrics_prefix)}",
                field="metrics_prefix",
                value=self.metrics_prefix,
            )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All options of the server."""

    listen: ListenOptions = field(default_factory=ListenOptions)
    access: AccessOptions = field(default_factory=AccessOptions)
    limits: LimitOptions = field(default_factory=LimitOptions)
    serving: ServingOptions = field(default_factory=ServingOptions)
    logs: LogOptions = field(default_factory=LogOptions)

    def __post_init__(self) -> None:
        if self.serving.lora_dir is not None and self.listen.admin_port is None:
            message = "needs admin_port, where adapters are loaded"
            raise ConfigError(message, field="lora_dir", value=self.serving.lora_dir)

    def refuse_adapters(self, *, enable_lora: bool) -> None:
        """Raises ConfigError for options of adapters to a server whose engine has none."""
        for name in ("lora_modules", "lora_dir"):
            if (value := getattr(self.serving, name)) and not enable_lora:
                raise ConfigError("needs enable_lora", field=name, value=value)

    @classmethod
    def from_options(cls, **options: Any) -> ServerConfig:
        """Builds the config from flat options; ConfigError names what is wrong."""
        return build_config(cls, drop_harmless(options))

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return self.listen.uds is not None or self.listen.host in _LOCAL_HOSTS


def read_chat_template(path: str) -> str:
    """Returns the template in a file; ConfigError when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", field="chat_template", value=path) from error


def _require_seconds(name: str, value: float | None, least: float | None = None) -> None:
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (least or 0) <= value < math.inf or (least is None and value == 0):
        bound = f"at least {least:g}" if least is not None else "above 0"
        raise ConfigError(f"must be seconds {bound}, got {shorten(value)}", field=name, value=value)
