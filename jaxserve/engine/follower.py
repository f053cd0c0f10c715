"""A node above rank 0: the same weights, programs and steps; no tokenizer, scheduler or requests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from jaxserve.config import EngineConfig
from jaxserve.engine.build import build_runner
from jaxserve.engine.built import BuiltRunner
from jaxserve.engine.cache_dir import make_cache_dir
from jaxserve.engine.model_files import locate_model, open_update
from jaxserve.engine.nodes import end_process, follow_leader
from jaxserve.engine.progress import ShowProgress, hide_progress
from jaxserve.errors import ClusterError

if TYPE_CHECKING:
    from jaxserve.features.lora.store import AdapterStore
    from jaxserve.features.multinode.follower import Follower


def run_follower(
    config: EngineConfig,
    *,
    progress: ShowProgress = hide_progress,
    on_ready: Callable[[Follower], None] = lambda follower: None,
    on_loss: Callable[[ClusterError], None] = end_process,
) -> None:
    """Joins rank 0, builds what it builds, and makes its calls until it stops.

    Args:
        config: with its nodes known (`find_nodes`).
        on_ready: called once steps can be run.
        on_loss: called on another thread when another node is gone, fails or is silent.

    Raises:
        ConfigError, DeviceError, WeightsError, CapacityError, ClusterError: name what to change; rank 0 is told.
    """
    from jaxserve.core.runtime.identity import digest_params
    from jaxserve.features.choose import find_adapters
    from jaxserve.features.multinode.follower import Follower
    from jaxserve.features.multinode.processes import leave_processes

    with follow_leader(make_cache_dir(config), on_loss) as (adopted, only_largest, group):
        files = locate_model(adopted.model)
        built = build_runner(adopted, files, progress=progress, only_largest=only_largest, nodes=group)
        follower = Follower(
            group,
            built.runner,
            num_mask_words=built.runner.num_mask_words,
            open_update=lambda path: open_update(path, built.shapes, built.mesh),
            digest_params=lambda: digest_params(built.runner.all_params),
            load_adapter=partial(_load_adapter, find_adapters(built.shapes)),
            drop_adapter=partial(_drop_adapter, find_adapters(built.shapes)),
            additions=_compile_rest(built) if only_largest else queue.SimpleQueue(),
        )
        on_ready(follower)
        follower.run()
        leave_processes()


def _load_adapter(store: AdapterStore | None, generation: int, path: str) -> str:
    """Reads an adapter for rank 0's plans, and returns its digest; WeightsError, ConfigError: it cannot be read."""
    from jaxserve.features.lora.store import digest_copy

    assert store is not None
    copy = store.read(path)
    store.keep(generation, copy)
    return digest_copy(copy)


def _drop_adapter(store: AdapterStore | None, generation: int) -> None:
    assert store is not None
    store.drop(generation)


def _compile_rest(built: BuiltRunner) -> queue.SimpleQueue[Callable[[], None]]:
    """Compiles the programs that were left out on a thread; returns the changes to make when rank 0 says so."""
    from jaxserve.core.runtime.startup import compile_rest

    changes: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def compile_all() -> None:
        for change in compile_rest(built.shapes, built.mesh, built.plan, built.runner):
            changes.put(change)

    threading.Thread(target=compile_all, name="jaxserve-compile", daemon=True).start()
    return changes
