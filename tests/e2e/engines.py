"""Engines that the tests of a process share: one for each set of options, idle again after each test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import jax
import numpy as np

from jaxserve import LLM

Key = tuple[Any, ...]


@dataclass(frozen=True)
class SharedEngine:
    """An engine, and the leaves of its weights when it was made."""

    llm: LLM
    leaves: tuple[Any, ...]


class Engines:
    """Makes each engine once. Tests of starting, of what is compiled and of engines that stay broken make their own."""

    def __init__(self) -> None:
        self._made: dict[Key, SharedEngine] = {}

    def get(self, make: Callable[..., LLM], *args: Any, **options: Any) -> LLM:
        """Returns the engine that `make` gives for these arguments; the first call makes it."""
        key = make, args, tuple(sorted((name, repr(value)) for name, value in options.items()))
        if key not in self._made:
            llm = make(*args, **options)
            self._made[key] = SharedEngine(llm, _list_leaves(llm))
        return self._made[key].llm

    def clear(self) -> None:
        """Forgets all engines; the next test that wants one makes it anew."""
        self._made.clear()

    def reset_prefix_caches(self) -> None:
        """Empties the prefix cache of each engine, so that a test's hits are those of its own prompts."""
        for shared in self._made.values():
            shared.llm.reset_prefix_cache()

    def check_rest(self) -> None:
        """Raises AssertionError if an engine is not as it was made, and forgets it: the next test has another."""
        found = {key: faults for key, shared in self._made.items() if (faults := find_unrest(shared))}
        for key in found:
            del self._made[key]
        assert not found, f"the test left shared engines at work: {found}"


def find_unrest(shared: SharedEngine) -> list[str]:
    """Returns what a test has left in an engine, in words; an idle engine may keep cached pages without an owner."""
    ready, faults = shared.llm.ready, []
    engine, scheduler, runner = ready.engine, ready.engine.scheduler, ready.runner
    if engine.has_unfinished:
        faults.append(f"{len(scheduler.batch)} sequences have rows and {len(scheduler.waiting)} wait")
    if held := [pool.num_referenced for pool in scheduler.pages.pools if pool.num_referenced]:
        faults.append(f"pages with an owner: {held}")
    for part in (engine, scheduler, scheduler.planner, runner):
        methods = ((name, getattr(type(part), name, None), value) for name, value in vars(part).items())
        replaced = [name for name, own, value in methods if callable(own) and value != MethodType(own, part)]
        faults += [f"{type(part).__name__}.{name} is replaced" for name in replaced]
    pairs = zip(_list_leaves(shared.llm), shared.leaves, strict=True)
    if any(now is not then and not np.array_equal(now, then) for now, then in pairs):
        faults.append("other weights")
    scheduler.pages.check()
    return faults


def _list_leaves(llm: LLM) -> tuple[Any, ...]:
    return tuple(jax.tree.leaves(llm.ready.runner.params))
