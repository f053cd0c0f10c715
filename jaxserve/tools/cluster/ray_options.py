"""The arguments of `ray_app:build`: the options of `jaxserve serve`, and those of Ray Serve."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, shorten
from jaxserve.options import build_config, check_at_least, check_choices, list_options, option
from jaxserve.server.options import ListenOptions, ServerConfig

ROUTERS = ("none", "prefix")
ACCELERATORS = ("auto", "cpu", "gpu", "tpu")
# Ray's proxy listens, so its options say these.
_PROXY_LIMITS = ("max_header_bytes", "max_connections", "body_timeout", "slow_reader_timeout", "keep_alive_timeout")
_OWN_LISTEN = ("root_path", "allowed_hosts")


@dataclass(frozen=True, slots=True)
class ReplicaSetOptions:
    """How many replicas Ray Serve runs, where, and how requests come to them."""

    num_replicas: int | None = option(None, "replicas; default: as many as target_queue_s needs")
    min_replicas: int = option(1, "replicas that are always kept")
    max_replicas: int = option(1, "replicas at most")
    target_queue_s: float = option(1.0, "seconds that a prompt should wait at most; more replicas are started above it")
    upscale_delay_s: float = option(30.0, "seconds that more replicas must be needed before they are started")
    downscale_delay_s: float = option(600.0, "seconds that fewer must be enough before some are stopped")
    router: str = option("none", "prefix: send a prompt where its prefix is cached", choices=ROUTERS)
    accelerator: str = option(
        "auto", "what each replica takes tensor_parallel_size of; auto: what the cluster has", choices=ACCELERATORS
    )
    num_cpus: float = option(1.0, "cores that Ray counts for each replica")

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, num_replicas=1, min_replicas=1, max_replicas=self.min_replicas)
        for name in ("target_queue_s", "upscale_delay_s", "downscale_delay_s", "num_cpus"):
            value = getattr(self, name)
            if not 0 <= value < math.inf or (name == "target_queue_s" and value == 0):
                raise ConfigError(f"must be above 0, got {shorten(value)}", field=name, value=value)
        if self.num_replicas is not None and self.max_replicas > 1:
            message = "the number is either fixed by num_replicas or chosen up to max_replicas; leave one out"
            raise ConfigError(message, field="max_replicas", value=self.max_replicas)


@dataclass(frozen=True, slots=True)
class RayConfig:
    """The options of Ray Serve, as a config."""

    replicas: ReplicaSetOptions = field(default_factory=ReplicaSetOptions)


def read_arguments(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], ReplicaSetOptions]:
    """Returns the engine's and the server's options by name, and those of Ray Serve.

    Args:
        arguments: by name, of any of the three; the command line gives texts, which are read as JSON where they are it.

    Raises:
        ConfigError: an option is unknown or wrong, or is one of Ray's own proxy.
    """
    given = {name: _read(value) for name, value in arguments.items()}
    ours, server = ({option.name for _, option in list_options(each)} for each in (RayConfig, ServerConfig))
    scaling = build_config(RayConfig, {name: value for name, value in given.items() if name in ours}).replicas
    serving = {name: value for name, value in given.items() if name in server}
    engine = {name: value for name, value in given.items() if name not in ours | server}
    _refuse_others(engine, serving)
    return engine, serving, scaling


def _refuse_others(engine: Mapping[str, Any], serving: Mapping[str, Any]) -> None:
    """Raises ConfigError for what cannot be honoured here, and whatever the two configs refuse."""
    config = EngineConfig.from_options(**engine)
    ServerConfig.from_options(**serving)
    proxied = {each.name for each in fields(ListenOptions)} - set(_OWN_LISTEN) | set(_PROXY_LIMITS)
    for name in serving:
        if name in proxied:
            message = "Ray Serve's proxy listens; set it in http_options of its own configuration"
            raise ConfigError(message, field=name, value=serving[name])
    if (config.nodes.nnodes or 1) > 1:
        raise ConfigError("a replica is an engine of one node", field="nnodes", value=config.nodes.nnodes)
    if config.replicas.data_parallel_size > 1:
        message = "Ray Serve starts the copies; use num_replicas or max_replicas"
        raise ConfigError(message, field="data_parallel_size", value=config.replicas.data_parallel_size)
    if serving.get("serve_while_warming"):
        message = "Ray Serve sends requests once a replica is ready"
        raise ConfigError(message, field="serve_while_warming", value=True)


def _read(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
