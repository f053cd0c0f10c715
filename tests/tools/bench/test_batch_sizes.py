"""Batch sizes are measured at their context, and the end of the curve is named with its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.batch_sizes import Point, SweepSizes, find_end, find_misfit, measure_point
from jaxserve.tools.bench.report import Spread
from jaxserve.tools.bench.setup import Bench
from tests.tools.bench.small_bench import make_bench

pytestmark = pytest.mark.thorough


POINT = Point(
    batch=1,
    context=64.0,
    wanted_context=64,
    num_padded_rows=2,
    seconds=Spread.of([0.01, 0.012, 0.011]),
    streaming_seconds=0.004,
    computing_seconds=0.001,
    reading_seconds=0.002,
    weight_bytes=10,
    kv_bytes=5,
)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return make_bench(enable_prefix_caching=False)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_point_lies_around_its_context(bench: Bench, batch: int) -> None:
    sizes = SweepSizes((1, 4), (100,), num_steps=3, num_iters=2)
    point = measure_point(bench, sizes, batch, 100)
    assert point.batch == batch and len(point.seconds.values) == 2
    assert point.context == pytest.approx(100, abs=12)
    assert point.kv_bytes == pytest.approx(batch * bench.costs.key_bytes(128))
    assert not bench.llm.ready.engine.has_unfinished


def test_what_does_not_fit_is_named(bench: Bench) -> None:
    sizes = SweepSizes((1,), (100,), num_steps=3, num_iters=2)
    assert find_misfit(bench, sizes, 4, 100) is None
    assert "more than max_num_seqs=4" in str(find_misfit(bench, sizes, 5, 100))
    assert "do not fit max_model_len=256" in str(find_misfit(bench, sizes, 1, 300))
    small = Bench(bench.llm, bench.limits, bench.costs)
    pages = bench.llm.ready.plan.num_pages
    object.__setattr__(bench.llm.ready.plan, "num_pages", (3,))
    try:
        assert "pages of KV memory, and there are 2" in str(find_misfit(small, sizes, 4, 100))
    finally:
        object.__setattr__(bench.llm.ready.plan, "num_pages", pages)


def test_options_hold_every_point() -> None:
    sizes = SweepSizes((1, 64), (128, 512), num_steps=8, num_iters=3)
    options = sizes.engine_options({})
    assert options["max_num_seqs"] == 64 and "max_num_batched_tokens" not in options
    assert options["max_model_len"] > sum(sizes.plan(64, 512, 512))
    assert SweepSizes((600,), (8,)).engine_options({})["max_num_batched_tokens"] == 1200
    assert sizes.engine_options({}, fills_steps=True)["max_model_len"] > 2048
    with pytest.raises(ConfigError, match=r"batch_sizes: .*at least 1, got 0"):
        SweepSizes((0, 1), (64,))


def test_the_limit_of_a_point() -> None:
    assert POINT.limit == pytest.approx(0.006) and POINT.bound == "reading the weights (memory)"
    assert POINT.tokens_per_second == pytest.approx(1 / 0.011)
    found = POINT.asdict()
    assert found["limit_share"].median == pytest.approx(0.006 / 0.011) and found["context"] == 64
    assert replace(POINT, computing_seconds=0.005).bound == "products with the weights (compute)"


def make_curve(*rates: float) -> list[Point]:
    return [
        replace(POINT, batch=2**place, seconds=Spread.of([2**place / rate]), computing_seconds=0.001 * 2**place)
        for place, rate in enumerate(rates)
    ]


def test_the_end_of_the_curve_has_a_reason() -> None:
    flat = find_end(make_curve(100, 190, 300, 310, 305), {}, 64)
    assert (flat.batch, flat.reason) == (4, "compute")
    assert "4 rows reach 97% of the most, 310 tokens/s at 8 rows" in flat.text
    growing = find_end(make_curve(100, 190, 300), {}, 64)
    assert (growing.batch, growing.reason) == (4, "none") and "no end up to 4 rows" in growing.text
    full = find_end(make_curve(100, 190, 300), {8: "8 rows need more", 16: "16 rows need more"}, 64)
    assert (full.batch, full.reason) == (4, "memory")
    assert full.text == "memory ends it after 4 rows: 8 rows need more"
