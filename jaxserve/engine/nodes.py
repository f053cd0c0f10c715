"""Joins the nodes of one engine: equal options and versions first, then JAX's processes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig, fill_nodes, read_cluster_token
from jaxserve.errors import ClusterError, ConfigError
from jaxserve.parallel_options import NodeOptions

if TYPE_CHECKING:
    from jaxserve.core.runtime.protocol import Runner
    from jaxserve.features.multinode.group import FollowerGroup, LeaderGroup
    from jaxserve.features.multinode.leader import Followers

_log = logging.getLogger(__name__)
_DEFAULT_ADDRESS = "127.0.0.1"


def find_nodes(config: EngineConfig) -> EngineConfig:
    """Returns the config with its nodes known: by options, a LeaderWorkerSet's variables, or as JAX detects them.

    Raises:
        ConfigError: a node's number is missing or out of range.
    """
    nodes = fill_nodes(config.nodes)
    if nodes.nnodes is None:
        from jaxserve.features.multinode.detect import detect_nodes

        found = detect_nodes(nodes.init_timeout)
        nodes = nodes if found is None else dataclasses.replace(nodes, **dataclasses.asdict(found))
    return dataclasses.replace(config, nodes=resolve_nodes(nodes))


def resolve_nodes(nodes: NodeOptions) -> NodeOptions:
    """Returns the options with all defaults filled in; ConfigError if they contradict each other."""
    size, rank = nodes.nnodes or 1, nodes.node_rank or 0
    if rank >= size:
        message = f"must be below nnodes={size}, got {rank}"
        raise ConfigError(message, field="node_rank", value=rank)
    if nodes.headless and rank == 0:
        message = "rank 0 answers the requests; give node_rank 1 or above, or leave headless out"
        raise ConfigError(message, field="headless", value=True)
    if nodes.health_port is not None and rank == 0:
        message = f"rank 0 answers /health/live and /metrics on its own port; leave it out, got {nodes.health_port}"
        raise ConfigError(message, field="health_port", value=nodes.health_port)
    address = nodes.master_addr or _DEFAULT_ADDRESS
    return dataclasses.replace(nodes, nnodes=size, node_rank=rank, master_addr=address, headless=rank > 0)


def end_process(error: ClusterError, *, after: float = 0.0) -> None:
    """Ends this process with status 2 after some seconds, whatever its threads do.

    A thread that waits on the device for a lost node never returns: a collective cannot be cancelled.
    """
    _log.critical("%s", error)
    if after > 0:
        ending = threading.Timer(after, os._exit, (2,))
        ending.daemon = True
        ending.start()
    else:
        logging.shutdown()
        os._exit(2)


@contextlib.contextmanager
def lead_nodes(
    config: EngineConfig, on_loss: Callable[[ClusterError], None], *, only_largest: bool
) -> Iterator[LeaderGroup | None]:
    """Yields the group of rank 0 once all nodes have joined with equal options and versions; None for a single node.

    If the block raises, the other nodes are told why.

    Args:
        only_largest: the others compile only the largest programs at first, too.
        on_loss: called on another thread when a node is gone, fails or is silent.

    Raises:
        ClusterError: a node is missing or differs.
    """
    if config.nodes.nnodes == 1:
        yield None
        return
    from jaxserve.core.runtime.identity import list_chosen_options
    from jaxserve.features.multinode.group import LeaderGroup

    group = LeaderGroup.open(config.nodes, read_cluster_token(), on_loss=on_loss)
    with _telling(group):
        group.share({"options": list_chosen_options(config), "only_largest": only_largest})
        _join(group, config)
        yield group


def lead_steps(runner: Runner, group: LeaderGroup | None) -> tuple[Runner, Followers | None]:
    """Returns a runner whose calls all nodes make, and the others of them; for a single node the runner itself."""
    if group is None:
        return runner, None
    from jaxserve.core.runtime.tee import TeeRunner
    from jaxserve.features.multinode.leader import Followers

    followers = Followers(group)
    return TeeRunner(runner, followers), followers


@contextlib.contextmanager
def follow_leader(
    config: EngineConfig, on_loss: Callable[[ClusterError], None]
) -> Iterator[tuple[EngineConfig, bool, FollowerGroup]]:
    """Yields rank 0's config with this node's own paths, its `only_largest`, and the group; see `lead_nodes`."""
    from jaxserve.features.multinode.group import FollowerGroup

    group = FollowerGroup.join(config.nodes, read_cluster_token(), on_loss=on_loss)
    with _telling(group):
        shared = group.share(None)
        adopted = adopt_options(config, shared["options"])
        _join(group, adopted)
        yield adopted, bool(shared["only_largest"]), group


def adopt_options(own: EngineConfig, shared: Mapping[str, Any]) -> EngineConfig:
    """Returns rank 0's options with this node's own of those that may differ: paths, and the node's number.

    What was also given here must be the same; `require_equal` then tells all nodes what is not.
    """
    from jaxserve.core.runtime.identity import list_chosen_options, list_local_options

    chosen = list_chosen_options(own)
    options = {**shared, **chosen, **list_local_options(own)}
    return dataclasses.replace(EngineConfig.from_options(**options), nodes=own.nodes)


def refuse_copies(config: EngineConfig) -> None:
    """Raises ConfigError if more than one copy of the model is asked for."""
    if (count := config.replicas.data_parallel_size) > 1:
        message = "one engine holds one copy of a model; jaxserve serve starts a server for each of several"
        raise ConfigError(message, field="data_parallel_size", value=count)


def refuse_with_nodes(config: EngineConfig, *, has_processor: bool = False) -> None:
    """Raises ConfigError for what needs all devices on one node, and for a node that is not rank 0."""
    if config.nodes.nnodes == 1:
        return
    if config.nodes.headless:
        message = "an engine that takes requests is rank 0; the others are started by jaxserve serve"
        raise ConfigError(message, field="node_rank", value=config.nodes.node_rank)
    if has_processor:
        message = f"is a function, which other nodes do not have; leave it out with nnodes={config.nodes.nnodes}"
        raise ConfigError(message, field="logits_processor")
    if config.cache.kv_offloading_size is not None:
        message = f"keeps pages in the memory of one node; leave it out with nnodes={config.nodes.nnodes}"
        raise ConfigError(message, field="kv_offloading_size", value=config.cache.kv_offloading_size)


@contextlib.contextmanager
def _telling(group: LeaderGroup | FollowerGroup) -> Iterator[None]:
    """Tells the other nodes why this one fails, if it does."""
    try:
        yield
    except BaseException as error:
        group.fail(str(error) or repr(error))
        raise


def _join(group: LeaderGroup | FollowerGroup, config: EngineConfig) -> None:
    """Compares what must be equal before JAX starts, starts it, and compares the devices."""
    from jaxserve.core.runtime.identity import describe_host, describe_versions, list_chosen_options
    from jaxserve.features.multinode.processes import join_processes

    nodes = config.nodes
    options = list_chosen_options(config)
    options.pop("model", None)  # a path may be another one on each node; its files are compared before they are read
    group.require_equal({**describe_versions(), "options": options})
    assert nodes.master_addr is not None
    join_processes(
        group.rank, group.size, address=nodes.master_addr, port=nodes.master_port + 1, timeout=nodes.init_timeout
    )
    group.require_equal(describe_host())
    _log.info("%d nodes run one engine; this is rank %d", group.size, group.rank)
