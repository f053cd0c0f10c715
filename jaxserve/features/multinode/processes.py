"""Joins JAX's processes, so that the devices of all nodes are one mesh's."""

from __future__ import annotations

import jax

from jaxserve.core.runtime.program_cache import keep_programs_of_this_host
from jaxserve.devices import first_line
from jaxserve.errors import ClusterError

_LEAVING_SECONDS = 10  # for all processes to leave; JAX aborts one that waits for longer
_HEARTBEAT_SECONDS = 100  # the group notices a lost node long before; then JAX ends the process without a word


def join_processes(rank: int, size: int, *, address: str, port: int, timeout: float) -> None:
    """Joins this process to the others; all must call it, before any device is asked for.

    JAX's coordinator is part of rank 0 and proves nobody's token, so it listens at `address` only.

    Args:
        address: rank 0's.
        port: of the coordinator there.
        timeout: seconds to wait for the others.

    Raises:
        ClusterError: the processes did not come together.
    """
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    if jax.config.jax_platforms == "cpu" or jax.config.jax_cpu_collectives_implementation is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Each node keeps its own programs: a follower would wait for rank 0's, which may have its own already.
    jax.config.update("jax_share_binary_between_hosts", False)
    if rank > 0:
        keep_programs_of_this_host()
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, which drains a server
    try:
        jax.distributed.initialize(
            coordinator_address=place,
            num_processes=size,
            process_id=rank,
            initialization_timeout=max(1, round(timeout)),
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_LEAVING_SECONDS,
            coordinator_bind_address=place if rank == 0 else None,
        )
    except Exception as error:  # JAX raises a RuntimeError of its own for each kind of failure
        message = f"JAX's processes did not come together at {place}: {first_line(error)}"
        raise ClusterError(message, field="master_port", value=port) from error


def leave_processes() -> None:
    """Leaves the other processes, which must do so, too; afterwards this one can end without them."""
    jax.distributed.shutdown()
