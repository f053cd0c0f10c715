"""Models without causal attention: each text is computed whole, in one step, and nothing is generated."""

from __future__ import annotations

import pytest

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.scheduler import Scheduler, SchedulerLimits, StepOutputs
from jaxserve.errors import InvalidRequestError
from jaxserve.request import Request, Task
from jaxserve.scheduler_options import SchedulerOptions

SIZES = (16, 64)


def make_scheduler(**options: int) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=4,
        max_num_batched_tokens=SIZES[-1],
        max_model_len=SIZES[-1],
        max_prefix_updates=30,
        token_sizes=SIZES,
        reads_whole=True,
        generates=False,
        options=SchedulerOptions(**options),
    )
    pages = PageManager([PageGroup(40)], page_size=8, max_chunk=SIZES[-1], enable_prefix_caching=False)
    return Scheduler(limits, pages)


def plan_all(scheduler: Scheduler) -> list[list[int]]:
    """Returns the lengths of the chunks of each step, until nothing is left to compute."""
    steps = []
    while (plan := scheduler.plan()) is not None:
        assert all(chunk.start == 0 and chunk.is_last for chunk in plan.chunks) and not plan.decode_rows
        steps.append([len(chunk.token_ids) for chunk in plan.chunks])
        scheduler.commit(plan, StepOutputs([0] * plan.num_rows))
        assert len(steps) < 10
    assert not scheduler.has_unfinished
    return steps


@pytest.mark.parametrize("options", [{}, {"long_prefill_token_threshold": 32}, {"max_num_partial_prefills": 1}])
def test_no_text_is_cut(options: dict[str, int]) -> None:
    """20 tokens are nearer to a step of 16, and 50 are more than a prompt may have while others wait."""
    scheduler = make_scheduler(**options)
    for index, length in enumerate((20, 50, 40, 24, 64)):
        scheduler.add(Request(f"r{index}", tuple(range(length)), task=Task.POOL))
    assert plan_all(scheduler) == [[20], [50], [40, 24], [64]]


def test_a_text_alone_is_computed_though_a_smaller_step_would_be_nearer() -> None:
    scheduler = make_scheduler()
    scheduler.add(Request("a", tuple(range(20)), task=Task.POOL))
    assert plan_all(scheduler) == [[20]]


@pytest.mark.parametrize("task", [Task.GENERATE, Task.READ])
def test_answers_are_refused(task: Task) -> None:
    with pytest.raises(InvalidRequestError, match=f"generates no text, and the request is to {task.value}"):
        make_scheduler().add(Request("a", (1, 2), task=task))
