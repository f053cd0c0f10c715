"""The order in which configurations are tried, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from pallas_kernels import AttnShape, KVSpec, choose_layout
from pallas_kernels.backends import find_backend
from pallas_kernels.tune.search import AXES, PARTS, choose, list_neighbours, search
from pallas_kernels.tune.table import KERNELS

INFINITE = float("inf")


@dataclass(frozen=True)
class Config:
    size: int = 1
    count: int = 1
    split: int = 1

    def __post_init__(self) -> None:
        if self.size * self.count > 8:
            raise ValueError("too large")


FORMULA = Config()
SMALL_AXES = {("size", "count"): ((2, 2), (4, 2), (4, 4)), ("split",): ((2,), (4,))}


class Device:
    """Times configurations by a function, so many of them, and remembers the rounds."""

    def __init__(self, seconds: Callable[[Config], float], most: int = 1000) -> None:
        self.seconds, self.most = seconds, most
        self.rounds: list[list[Config]] = []

    def measure(self, candidates: Sequence[Config]) -> Iterator[tuple[Config, float]]:
        self.rounds.append(list(candidates))
        for candidate in candidates:
            if not self.most:
                return
            self.most -= 1
            yield candidate, self.seconds(candidate)


def test_neighbours_differ_in_one_axis() -> None:
    found = list(list_neighbours(FORMULA, FORMULA, SMALL_AXES))
    assert found == [Config(2, 2), Config(4, 2), Config(split=2), Config(split=4)]  # 4 x 4 does not go together
    back = list(list_neighbours(Config(2, 2, 4), FORMULA, SMALL_AXES))
    assert back == [Config(4, 2, 4), Config(1, 1, 4), Config(2, 2, 2), Config(2, 2, 1)], "the formula's values too"


def test_the_formula_is_first_and_nothing_is_tried_twice() -> None:
    device = Device(lambda config: 10 - config.size - config.split)
    found = search(FORMULA, SMALL_AXES, device.measure)
    tried = [config for candidates in device.rounds for config in candidates]
    assert tried[0] == FORMULA and len(tried) == len(set(tried)) == len(found)


def test_changes_add_up_without_the_full_product() -> None:
    device = Device(lambda config: 10 - config.size - config.split)
    found = search(FORMULA, SMALL_AXES, device.measure)
    assert choose(found, FORMULA) == Config(4, 2, 4)
    assert len(device.rounds) == 3 and len(found) < 9


def test_a_search_ends_where_nothing_is_better() -> None:
    device = Device(lambda config: 1.0 if config == FORMULA else 0.99)  # less than noise
    found = search(FORMULA, SMALL_AXES, device.measure)
    assert len(device.rounds) == 1 and choose(found, FORMULA) == FORMULA


def test_what_is_wrong_is_infinitely_slow() -> None:
    device = Device(lambda config: INFINITE if config.split > 1 else 5.0 - config.size)
    assert choose(search(FORMULA, SMALL_AXES, device.measure), FORMULA) == Config(4, 2)
    broken = search(FORMULA, SMALL_AXES, Device(lambda _: INFINITE).measure)
    assert broken[FORMULA] == INFINITE and choose(broken, FORMULA) == FORMULA


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_search_ends_when_time_is_up(most: int) -> None:
    device = Device(lambda config: 10 - config.size, most)
    assert len(search(FORMULA, SMALL_AXES, device.measure)) == most and len(device.rounds) == 1


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_every_kernel_has_candidates_of_its_own(kernel: str, dtype: str) -> None:
    impl = kernel.split("_", maxsplit=1)[0]
    spec = KVSpec(2, 128, 128, dtype)
    shape = AttnShape(8, replace(spec, layout=choose_layout(impl, spec)), "bfloat16")
    whole = find_backend(impl).module.default_config(shape)
    formula = getattr(whole, PARTS[kernel])
    candidates = list(list_neighbours(formula, formula, AXES[kernel]))
    assert formula not in candidates and len(candidates) == len(set(candidates)) > 3
    for candidate in candidates:
        assert replace(whole, **{PARTS[kernel]: candidate}) != whole
