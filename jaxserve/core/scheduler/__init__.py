"""Chooses the tokens of each step: sequences in, `StepPlan`s out, sampled ids back in. Host only: no jax."""

from jaxserve.core.scheduler.committer import Commit
from jaxserve.core.scheduler.deadlines import Deadlines
from jaxserve.core.scheduler.limits import SchedulerLimits
from jaxserve.core.scheduler.running import Batch
from jaxserve.core.scheduler.scheduler import Scheduler
from jaxserve.core.scheduler.sequence import Sequence, SequenceStatus
from jaxserve.core.scheduler.step_plan import ChunkWork, NewRow, RowHistory, StepOutputs, StepPlan

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
