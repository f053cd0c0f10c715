"""Processes that can be killed. They run untrusted work, so that a hostile job costs one process and nothing else.

`Worker` is the parent's side, `child.py` the child's. The work itself is a file with a function `prepare(options)` that
returns the function to call with each job: `features/grammars/worker.py` compiles grammars, `tokenizers/template.py`
renders chat templates, `media/worker.py` decodes images. `WorkerPool` lets a few of them take turns. Host-only, with
the standard library alone.
"""

from __future__ import annotations

from jaxserve.workers.pool import WorkerPool, WorkerPoolBusyError, WorkerPoolClosedError
from jaxserve.workers.process import Worker, WorkerEndedError, WorkerStartError, WorkerTimeoutError

__all__ = [
    "Worker",
    "WorkerEndedError",
    "WorkerPool",
    "WorkerPoolBusyError",
    "WorkerPoolClosedError",
    "WorkerStartError",
    "WorkerTimeoutError",
]
