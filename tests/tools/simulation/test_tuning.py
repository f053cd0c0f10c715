"""Tuned sizes: the best that there are, by trying all; better than the defaults where steps are compute-bound."""

from __future__ import annotations

import itertools
import random
import tomllib
from collections import Counter

import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.runtime.buckets import Bucket, BucketTable, make_buckets
from jaxserve.errors import ConfigError
from jaxserve.tools.simulation.device import StepFormula
from jaxserve.tools.simulation.fleet import FleetRun, run_fleet
from jaxserve.tools.simulation.tuning import choose_sizes, count_programs, to_toml, tune
from tests.tools.simulation.test_replica import ask, make_spec

pytestmark = pytest.mark.thorough


FORMULA = StepFormula(token_seconds=1.0, logit_seconds=0.5, step_seconds=3.0, row_seconds=0.25)


def cost(
    formula: StepFormula, works: Counter[tuple[int, int]], rows: tuple[int, ...], tokens: tuple[int, ...]
) -> float:
    table = BucketTable(rows, tokens, rows[-1])
    return sum(count * formula.of_bucket(table.find(*work)) for work, count in works.items())


@pytest.mark.parametrize("max_programs", [4, 7, 9, 30])
def test_no_other_sizes_are_better(max_programs: int) -> None:
    rng = random.Random(max_programs)
    works = Counter((rows, rows) for rows in rng.choices(range(1, 7), [9, 1, 5, 1, 1, 2], k=50))
    works.update((tokens, rng.randint(1, 6)) for tokens in rng.choices(range(7, 193), k=50))
    chosen = choose_sizes(FORMULA, works, 6, 192, max_programs)
    assert count_programs(*map(len, chosen)) <= max_programs
    best = min(
        cost(FORMULA, works, (*rows, 6), (*tokens, 192))
        for k in range(6)
        for rows in itertools.combinations(range(1, 6), k)
        for m in range(6)
        for tokens in itertools.combinations(range(32, 192, 32), m)
        if count_programs(k + 1, m + 1) <= max_programs
    )
    assert cost(FORMULA, works, *chosen) == pytest.approx(best)


def test_sizes_that_save_nothing_are_left_out() -> None:
    works = Counter({(4, 4): 10, (100, 3): 5})
    assert choose_sizes(FORMULA, works, 4, 100, 40) == ((4,), (100,))


@pytest.mark.parametrize("least_rows", [1, 2])
def test_no_program_has_fewer_rows_than_allowed(least_rows: int) -> None:
    rows, _ = choose_sizes(FORMULA, Counter({(1, 1): 100, (8, 8): 1}), 8, 64, 40, least_rows)
    assert rows == (least_rows, 8)


def test_tuned_sizes_waste_less_and_the_options_take_them() -> None:
    spec = make_spec(StepFormula(0.0, 1e-3, 0.0, step_seconds=1e-3), rows=64, tokens=512, pages=2000)
    rng = random.Random(0)
    requests = [ask(n, 0.3 * n, prompt=rng.choice((40, 300)), tokens=rng.randint(1, 9)) for n in range(150)]

    def run(table: BucketTable) -> FleetRun:
        made = run_fleet(requests, spec.with_buckets(table))
        assert made is not None
        return made

    found, before = tune(make_buckets("gpu", 64, 512), 20, 1, run)
    assert found.num_programs <= 20 < before.num_programs
    assert 0 < found.padded_seconds < 0.6 * before.padded_seconds and found.share < before.share
    options = tomllib.loads(to_toml(found, before))
    config = EngineConfig.from_options(**options, max_num_seqs=64, max_num_batched_tokens=512).resolve("gpu")
    assert config.compile.precompile_bs_paddings == found.decode_rows


def test_the_default_sizes_stay_if_nothing_is_better() -> None:
    """Here every step takes as long as its weights, so that padding costs nothing."""

    def run(table: BucketTable) -> FleetRun:
        made = run_fleet([ask(n) for n in range(9)], make_spec(StepFormula(1.0)).with_buckets(table))
        assert made is not None
        return made

    found, before = tune(BucketTable([4], [128], 4), None, 1, run)
    assert found == before and found.padded_seconds == 0
    with pytest.raises(ConfigError, match=r"max_programs: .*at least 4.*got 3"):
        tune(BucketTable([4], [128], 4), 3, 1, run)


def test_padding_is_what_a_step_takes_longer() -> None:
    assert FORMULA.of_bucket(Bucket(8, 8)) - FORMULA.of_bucket(Bucket(5, 5)) == pytest.approx(3 * (1 + 0.5 + 0.25))
