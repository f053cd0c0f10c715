"""The search for a kernel's best configuration: first the formula's, then its neighbours, then those of the best.

A full product of all values would mostly be far from anything good, and every candidate costs a compilation. Values
that share a limit, such as the size of a tile and the number that fit, form one axis: alone they could not move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

WORTH = 0.02  # a gain below this share is noise

Axes = dict[tuple[str, ...], tuple[tuple[Any, ...], ...]]

AXES: dict[str, Axes] = {  # fields and their values, largest expected gain first
    "gpu_decode": {
        ("stages", "ctas_per_sm", "tile_tokens"): (
            *((4, 2, 64), (4, 1, 64), (6, 1, 64), (2, 2, 64), (3, 2, 64), (6, 2, 64)),
            *((3, 1, 128), (2, 1, 128), (2, 2, 128)),
        ),
        ("min_split_tokens",): ((256,), (512,), (128,), (1024,)),
    },
    "gpu_prefill": {
        ("keys", "stages"): ((128, 2), (64, 4), (128, 3), (64, 3), (64, 2), (128, 4)),
        ("registers",): (((232, 40),), ((240, 24),)),
        ("persistent",): ((True,),),
    },
    "ampere_decode": {
        ("stages", "ctas_per_sm", "tile_tokens"): (
            *((3, 2, 32), (4, 2, 32), (2, 2, 32), (4, 1, 32)),
            *((2, 2, 64), (3, 1, 64), (2, 1, 64), (4, 1, 64)),
        ),
        ("min_split_tokens",): ((256,), (512,), (128,)),
    },
    "ampere_prefill": {("stages", "tile_tokens"): ((2, 64), (3, 32), (2, 32), (3, 64), (4, 32), (4, 64))},
    "tpu_decode": {
        ("pages_per_block", "compute_tokens"): ((8, 512), (4, 512), (16, 512), (8, 1024), (4, 256), (16, 1024)),
        ("num_buffers",): ((4,), (2,), (3,)),
        ("rows_together",): ((8,), (4,), (2,), (1,)),
        ("short_tokens",): ((256,), (128,), (512,)),
        ("rows_per_step",): ((4,), (16,), (8,)),
    },
    "tpu_prefill": {
        ("pages_per_block", "compute_tokens"): ((4, 512), (8, 512), (8, 1024), (4, 256), (16, 1024)),
        ("tile_tokens",): ((128,), (64,), (256,)),
    },
}
PARTS = {  # the field of an implementation's configuration that holds the kernel's
    "gpu_decode": "decode",
    "gpu_prefill": "prefill",
    "ampere_decode": "decode",
    "ampere_prefill": "prefill",
    "tpu_decode": "decode",
    "tpu_prefill": "chunk",
}


def list_neighbours[Config](config: Config, formula: Config, axes: Axes) -> Iterator[Config]:
    """All configurations that differ from `config` in one axis, with the axis' values or the formula's. Values that the
    configuration refuses are left out."""
    seen = {config}
    for names, values in axes.items():
        for choice in (*values, tuple(getattr(formula, name) for name in names)):
            try:
                candidate = replace(config, **dict(zip(names, choice, strict=True)))  # type: ignore[type-var]
            except ValueError:
                continue
            if candidate not in seen:
                seen.add(candidate)
                yield candidate


def search[Config](
    formula: Config, axes: Axes, measure: Callable[[Sequence[Config]], Iterable[tuple[Config, float]]]
) -> dict[Config, float]:
    """Seconds of every configuration that was measured, infinite for one that is refused or wrong.

    `measure` takes the candidates of a round, which may be compiled together, and yields them in order. If it yields
    fewer, time is up. The formula's configuration is the first of all. Each round tries the neighbours of the best so
    far, until a round gains no more than noise.
    """
    found: dict[Config, float] = {}
    best, candidates = formula, [formula, *list_neighbours(formula, formula, axes)]
    while candidates:
        found.update(measure(candidates))
        if any(candidate not in found for candidate in candidates):
            break
        least = min(found, key=found.__getitem__)
        if not is_faster(found[least], found[best]):
            break
        best = least
        candidates = [candidate for candidate in list_neighbours(best, formula, axes) if candidate not in found]
    return found


def choose[Config](found: dict[Config, float], formula: Config) -> Config:
    """The fastest configuration, or the formula's if none is faster by more than noise."""
    least = min(found, key=found.__getitem__)
    return least if is_faster(found[least], found[formula]) else formula


def is_faster(seconds: float, other: float) -> bool:
    """Whether `seconds` is less than `other` by more than noise."""
    return seconds < (1 - WORTH) * other
