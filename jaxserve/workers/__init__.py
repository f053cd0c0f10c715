"""Processes that can be killed: foreign code runs in them, so that it costs such a process and nothing else.

`Worker` is the parent's side, `child.py` the program that runs. What a worker does is a file with a function
`prepare(options)` that returns the function to call with each job: `structured/worker.py` compiles grammars,
`tokenizers/template.py` renders chat templates. Host-only, with the standard library alone.
"""

from __future__ import annotations

from jaxserve.workers.process import Worker, WorkerEndedError, WorkerStartError, WorkerTimeoutError

__all__ = ["Worker", "WorkerEndedError", "WorkerStartError", "WorkerTimeoutError"]
