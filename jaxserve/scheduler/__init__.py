"""Chooses the tokens of each step: sequences in, `StepPlan`s out, sampled ids back in. Host only: no jax."""

from jaxserve.scheduler.committer import Commit
from jaxserve.scheduler.deadlines import Deadlines
from jaxserve.scheduler.limits import SchedulerLimits
from jaxserve.scheduler.plan import ChunkWork, NewRow, RowHistory, StepOutputs, StepPlan
from jaxserve.scheduler.running import Batch
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.sequence import Sequence, SequenceStatus

__all__ = [
    "Batch",
    "ChunkWork",
    "Commit",
    "Deadlines",
    "NewRow",
    "RowHistory",
    "Scheduler",
    "SchedulerLimits",
    "Sequence",
    "SequenceStatus",
    "StepOutputs",
    "StepPlan",
]
