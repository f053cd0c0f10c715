"""Counters of the runtime, and how limits of the queue reach the scheduler."""

from __future__ import annotations

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.core.runtime.buckets import Bucket
from jaxserve.core.runtime.compile import watch_compiles
from jaxserve.core.runtime.step_counts import STEP_TOKEN_BOUNDS, StepCounts
from jaxserve.families.registry import parse_config
from jaxserve.features.choose import make_shapes
from tests.golden_cases import load_case


def test_bounds_belong_to_the_count_that_they_close() -> None:
    counts = StepCounts()
    for tokens in (1, 2, 8, 9, 8192, 8193):
        counts.count(Bucket(tokens + 3, 3), tokens)
    assert [counts.num_by_tokens[i] for i in (0, 1, 2, -2, -1)] == [1, 2, 1, 1, 1]
    assert len(counts.num_by_tokens) == len(STEP_TOKEN_BOUNDS) + 1
    assert (counts.useful_tokens, counts.padded_tokens) == (16405, 16405 + 6 * 3)


def test_compilations_are_counted_once_each() -> None:
    watch_compiles.cache_clear()  # another test may have cleared all listeners of the process
    count = watch_compiles()
    assert watch_compiles() is count, "one listener a process"
    before = count()
    double = jax.jit(lambda x: 2 * x + 0.125)
    double(np.float32(1))
    assert count() == before + 1
    double(np.float32(2))
    assert count() == before + 1


def test_limits_of_the_queue_reach_the_scheduler() -> None:
    model = parse_config(load_case("llama_gqa").config).with_max_model_len(160)
    config = EngineConfig.from_options(max_num_queued_reqs=7, max_num_queued_tokens=900)
    options = make_shapes(config, model, "cpu", "cpu").limits.options
    assert (options.max_num_queued_reqs, options.max_num_queued_tokens) == (7, 900)
    options = make_shapes(EngineConfig(), model, "cpu", "cpu").limits.options
    assert (options.max_num_queued_reqs, options.max_num_queued_tokens) == (None, None)
