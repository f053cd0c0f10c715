"""The options of an engine on several devices, on several nodes, and of several engines on one node."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.errors import ConfigError, shorten
from jaxserve.options import check_at_least, option

LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """How devices share the model."""

    tensor_parallel_size: int = option(
        1, "devices, of all nodes together, over which heads, ffn and vocabulary are split", "tp"
    )
    enable_expert_parallel: bool = option(
        False, "give each device whole experts of a mixture of experts, not a slice of every one", "ep"
    )

    def __post_init__(self) -> None:
        check_at_least(self, tensor_parallel_size=1)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The nodes of one engine: rank 0 plans steps and answers requests, the others run the same steps."""

    nnodes: int | None = option(None, "nodes that run one engine together; default: LWS_GROUP_SIZE, else 1")
    node_rank: int | None = option(None, "this node's number, from 0; default: LWS_WORKER_INDEX, else 0")
    master_addr: str | None = option(
        None, "address of rank 0, where it listens for the others; default: LWS_LEADER_ADDRESS, else 127.0.0.1"
    )
    master_port: int = option(29501, "port of rank 0 for the calls of steps; the next one is JAX's")
    headless: bool = option(False, "answer no requests: run the steps of rank 0; implied above rank 0")
    health_port: int | None = option(
        None, "port of --host on which a node above rank 0 answers /health/live and /metrics; default: none"
    )
    init_timeout: float = option(300.0, "seconds to wait at the start for all nodes")
    step_timeout: float = option(60.0, "seconds that another node may leave a step unanswered before all nodes end")

    def __post_init__(self) -> None:
        check_at_least(self, nnodes=1, node_rank=0, master_port=1, health_port=1)
        for name, last in (("master_port", LAST_PORT - 1), ("health_port", LAST_PORT)):
            value = getattr(self, name)
            if value is not None and value > last:
                raise ConfigError(f"must be at most {last}, got {value}", field=name, value=value)
        for name in ("init_timeout", "step_timeout"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"must be above 0, got {shorten(value)}", field=name, value=value)


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Copies of the model on one host, each a server of its own."""

    data_parallel_size: int = option(
        1, "servers to start, each with a copy of the model on devices of its own; nginx and vllm-router stand in front"
    )
    data_parallel_rank: int = option(0, "this server's number among its copies, as metrics' label engine")

    def __post_init__(self) -> None:
        check_at_least(self, data_parallel_size=1, data_parallel_rank=0)
