"""`jaxserve` in a process that ends at any collective of its node code: only programs may speak to other nodes.

JAX compares values across processes where one places them on all devices (`device_put`); that would hold up a step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[2]))

from jax.experimental import multihost_utils

from jaxserve.tools import cli


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("a collective of the node's code")


def refuse_collectives() -> None:
    """Makes each collective of JAX's node code an error in this process."""
    for name in ("process_allgather", "broadcast_one_to_all", "sync_global_devices", "assert_equal"):
        setattr(multihost_utils, name, refuse)


if __name__ == "__main__":
    refuse_collectives()
    sys.exit(cli.main(sys.argv[1:]))
