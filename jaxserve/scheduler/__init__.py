"""Which tokens are computed next: sequences in, `StepPlan`s out, sampled ids back in. Host only: no jax."""

from jaxserve.scheduler.plan import ChunkWork, RowSet, StepPlan
from jaxserve.scheduler.scheduler import Commit, Scheduler, SchedulerLimits
from jaxserve.scheduler.sequence import Sequence, SequenceStatus

__all__ = [
    "ChunkWork",
    "Commit",
    "RowSet",
    "Scheduler",
    "SchedulerLimits",
    "Sequence",
    "SequenceStatus",
    "StepPlan",
]
