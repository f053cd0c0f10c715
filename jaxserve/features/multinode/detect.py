"""Detection of the nodes that start together, as JAX does it on TPU pods and under Slurm."""

from __future__ import annotations

import logging
from dataclasses import dataclass

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DetectedNodes:
    """What an environment says of the processes that were started together."""

    nnodes: int
    node_rank: int
    master_addr: str


def detect_nodes(timeout: float) -> DetectedNodes | None:
    """Returns what JAX detects; None outside the environments that it knows.

    JAX has no public function for this: `jax.distributed.initialize` joins what it detects at once. A JAX without the
    private one used here detects nothing.

    Args:
        timeout: seconds to wait for the address of rank 0 to be known.
    """
    from jax._src import clusters

    detect = getattr(clusters.ClusterEnv, "auto_detect_unset_distributed_params", None)
    if detect is None:
        return None
    try:
        address, count, rank, _ = detect(None, None, None, None, None, max(1, round(timeout)))
    except Exception as error:  # a metadata server that does not answer, or variables that are only half set
        _log.warning("the nodes that start together could not be detected (%r); nnodes and the others set them", error)
        return None
    if address is None or count is None or rank is None:
        return None
    return DetectedNodes(count, rank, address.rpartition(":")[0])
