"""`serve run jaxserve.tools.cluster.ray_app:build model=MODEL`: the server's own application in replicas of Ray Serve.

Requests come through Ray's proxies, straight to the application of a replica; or, with `router=prefix`, to a thin
ingress, whose handle lets Ray's `PrefixCacheAffinityRouter` choose the replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message

from jaxserve.config import EngineConfig, read_api_keys
from jaxserve.errors import JaxServeError
from jaxserve.server.app import make_app
from jaxserve.server.keys import read_keys
from jaxserve.server.launch import make_state, start_engine
from jaxserve.server.logs import configure_logging
from jaxserve.server.options import LimitOptions, ServerConfig
from jaxserve.server.server_state import Phase
from jaxserve.tools.cluster.asgi_bridge import ForwardedRequest, run_asgi
from jaxserve.tools.cluster.forwarding import ForwardingApp
from jaxserve.tools.cluster.ray_options import ReplicaSetOptions, read_arguments
from jaxserve.tools.cluster.ray_scaling import MOST_SECONDS

# By Ray's public name, the class needs vLLM or SGLang; this one is the same.
_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"
_DRAIN_SECONDS = 5.0  # between Ray's looks at the requests of a replica that ends
_LOOK_BACK_SECONDS = 5.0  # over which statistics are averaged


class Replica:
    """One engine and the server's application."""

    async def __init__(self, engine: dict[str, Any], serving: dict[str, Any]) -> None:
        """Builds the engine on a thread, as Ray's event loop must go on."""
        self._config = ServerConfig.from_options(**serving)
        logs = self._config.logs
        configure_logging(logs.log_level, json=logs.log_format == "json")
        self._state = make_state(EngineConfig.from_options(**engine), self._config)
        self._failure: JaxServeError | None = None
        self._app = make_app(self._state, read_keys(self._config.access, read_api_keys()))
        await asyncio.to_thread(start_engine, self._state, self._stop)
        self._state.finish_warming()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns the server's application; Ray calls it after the constructor, where there is no ingress."""
        return self._app

    async def forward(self, request: ForwardedRequest) -> AsyncGenerator[Message]:
        """Answers a request that came through the ingress."""
        async for message in run_asgi(self._app, request):
            yield message

    async def check_health(self) -> None:
        """Raises if a restart would help, like /health/live."""
        if self._failure is not None:
            raise self._failure
        if self._state.is_stuck:
            raise RuntimeError(f"no step has ended for {self._config.serving.watchdog_timeout:g} s")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns what `QueueTimePolicy` reads."""
        llm = self._state.engine
        stats = llm.stats()
        return {
            "waiting_sequences": float(stats.num_waiting),
            "queued_tokens": float(stats.num_queued_tokens),
            "queue_seconds": min(MOST_SECONDS, llm.view.seconds_to_admit()),
            "row_share": stats.num_running / llm.limits.max_num_seqs,
        }

    def __del__(self) -> None:
        """Ends the engine; Ray has waited for the requests."""
        state = getattr(self, "_state", None)
        if state is not None:
            state.end_processes()
            if state.llm is not None:
                state.llm.shutdown()

    def _stop(self, failure: JaxServeError) -> None:
        self._failure, self._state.phase = failure, Phase.FAILED


class Ingress:
    """Sends each request to the replica that Ray's router chooses by its prompt."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        self._app = ForwardingApp(replicas.options(method_name="forward", stream=True), max_body_bytes)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns the application."""
        return self._app


def build(arguments: dict[str, Any]) -> Application:
    """Returns the application; `read_arguments` says what it may be given, and what is refused."""
    engine, serving, scaling = read_arguments(arguments)
    config = EngineConfig.from_options(**engine)
    options: dict[str, Any] = {
        "ray_actor_options": _choose_resources(scaling, config.parallel.tensor_parallel_size),
        "max_ongoing_requests": ServerConfig.from_options(**serving).limits.max_streams,
        "graceful_shutdown_wait_loop_s": _DRAIN_SECONDS,
        "graceful_shutdown_timeout_s": ServerConfig.from_options(**serving).serving.shutdown_timeout,
        **_choose_count(scaling),
    }
    if scaling.router == "none":
        return serve.deployment(serve.ingress()(Replica), name="jaxserve", **options).bind(engine, serving)
    options["request_router_config"] = RequestRouterConfig(request_router_class=_ROUTER)
    replicas = serve.deployment(Replica, name="engine", **options).bind(engine, serving)
    ingress = serve.deployment(
        serve.ingress()(Ingress), name="ingress", max_ongoing_requests=LimitOptions().max_connections
    )
    return ingress.bind(replicas, ServerConfig.from_options(**serving).limits.max_body_bytes)


def _choose_count(scaling: ReplicaSetOptions) -> dict[str, Any]:
    if scaling.num_replicas is not None or scaling.max_replicas == 1:
        return {"num_replicas": scaling.num_replicas or 1}
    policy = AutoscalingPolicy(
        policy_function="jaxserve.tools.cluster.ray_scaling:QueueTimePolicy",
        policy_kwargs={"target_queue_s": scaling.target_queue_s},
    )
    chosen = AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        upscale_delay_s=scaling.upscale_delay_s,
        downscale_delay_s=scaling.downscale_delay_s,
        look_back_period_s=_LOOK_BACK_SECONDS,
        metrics_interval_s=1.0,
        policy=policy,
    )
    return {"autoscaling_config": chosen}


def _choose_resources(scaling: ReplicaSetOptions, num_devices: int) -> dict[str, Any]:
    kind, cluster = scaling.accelerator, ray.cluster_resources() if ray.is_initialized() else {}
    if kind == "auto":
        kind = next((name for name in ("gpu", "tpu") if cluster.get(name.upper())), "cpu")
    resources: dict[str, Any] = {"num_cpus": scaling.num_cpus}
    if kind == "gpu":
        resources["num_gpus"] = num_devices
    elif kind == "tpu":
        resources["resources"] = {"TPU": num_devices}
    return resources
