"""Times the programs of steps that verify and make drafts, beside those of plain steps, for `bench_speculation.py`."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxserve import LLM
from jaxserve.core.runtime.buckets import Bucket
from jaxserve.core.runtime.inputs import ON_DEVICE, InputLayout
from jaxserve.core.runtime.rows import SAMPLING_FIELDS, SampleVariant
from jaxserve.core.runtime.runner import ModelRunner
from jaxserve.features.speculation.drafter import DrafterHost

POSITION = 150  # tokens that each row has computed
REPEATS = 200
_ROOM = 64  # tokens that a row may yet compute

Clock = Callable[[str, Callable[[], Any]], Any]


def time_programs(dtype: str, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """Returns median microseconds by kind of program, for each bucket: those of a lookup's widths, then a head's.

    `ratio` is the forward's over that of the plain bucket that holds as many rows. All buckets of a drafter take turns.
    """
    head = {"method": "eagle3", "model": "demo", "num_speculative_tokens": 4}
    lookup = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    found = _time_drafter(dtype, lookup, [(2, 1), (1, 4), (1, 8), (8, 1), (8, 4)], repeats)
    return found + _time_drafter(dtype, head, [(2, 1), (1, 3), (1, 5), (8, 1), (8, 3)], repeats)


def _time_drafter(
    dtype: str, config: dict[str, Any], sizes: list[tuple[int, int]], repeats: int
) -> list[dict[str, Any]]:
    llm = LLM("demo", dtype=dtype, speculative_config=config, compile="used")
    runner = llm.ready.runner
    buckets = [Bucket(rows * width, rows, width) for rows, width in sizes]
    seconds: dict[Bucket, dict[str, list[float]]] = {bucket: defaultdict(list) for bucket in buckets}
    for turn in range(repeats + 1):  # the first compiles
        for bucket in buckets:
            _run_step(runner, bucket, _make_clock(seconds[bucket] if turn else defaultdict(list)))
    rows = []
    for bucket in buckets:
        found = {kind: 1e6 * statistics.median(each) for kind, each in seconds[bucket].items()}
        plain = next(each for each in buckets if each.width == 1 and each.rows >= bucket.rows)
        ratio = found["forward"] / (1e6 * statistics.median(seconds[plain]["forward"]))
        rows.append({"bucket": f"{config['method']}: {bucket}", **found, "ratio": ratio})
    return rows


def _make_clock(seconds: dict[str, list[float]]) -> Clock:
    def clock(kind: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        out = jax.block_until_ready(run())
        seconds[kind].append(time.perf_counter() - start)
        return out

    return clock


def _run_step(runner: ModelRunner, bucket: Bucket, clock: Clock) -> None:
    """Runs the programs of a greedy step of full rows, each to its end."""
    packed = _pack(runner, bucket)
    selected, _ = clock("forward", lambda: runner._run(bucket, packed))
    sampled = clock("sample", lambda: _sample(runner, bucket, selected))
    device = runner.device
    for drafter in (feature for feature in runner.features if isinstance(feature, DrafterHost)):
        draft = partial(drafter.draft, device, runner.params, selected, sampled)
        clock("draft", lambda draft=draft: (draft().drafts, device.rows.last_token, device.cache[1]))


def _sample(runner: ModelRunner, bucket: Bucket, selected: Any) -> Any:
    device = runner.device
    program = device.programs.get("sample", (bucket.rows, bucket.width, SampleVariant.GREEDY))
    states = [feature.sample_state(bucket.width) for feature in runner.features]
    kept, read = (tuple(each) for each in zip(*states, strict=True))
    device.rows, kept, _, sampled = program(device.rows, kept, None, read, selected, None)
    for feature, own in zip(runner.features, kept, strict=True):
        feature.keep(own)
    return sampled


def _pack(runner: ModelRunner, bucket: Bucket) -> np.ndarray:
    """Returns the inputs of a step that can be repeated: they give the rows' positions. Pages are the null page."""
    layout = runner._layouts.setdefault(bucket, InputLayout(bucket, runner._state_shape))
    packed = layout.new()
    views = layout.views(packed)
    num_single = bucket.rows if bucket.width == 1 else 0
    views.row_ids[:] = np.arange(bucket.rows)
    views.starts[:] = POSITION
    views.is_sampled[:] = 1
    views.token_ids[:] = ON_DEVICE
    views.query_start_loc[:] = np.arange(bucket.rows + 1) * bucket.width
    views.distribution[:] = num_single, num_single, bucket.rows
    views.sampling[:, SAMPLING_FIELDS.index("max_num_tokens")] = POSITION + _ROOM
    return packed
