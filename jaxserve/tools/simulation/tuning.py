"""The padded sizes that waste least on a trace, for `jaxserve tune-buckets`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.core.runtime.buckets import PROGRAMS_PER_ROWS, Bucket, BucketTable
from jaxserve.errors import ConfigError
from jaxserve.scheduler_options import MIN_CHUNK
from jaxserve.tools.simulation.device import StepFormula
from jaxserve.tools.simulation.fleet import FleetRun

_ROUNDS = 3

StepWorks = Counter[tuple[int, int]]  # how many steps had so many (tokens, rows)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Padded sizes, and what they cost on the trace."""

    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    padded_seconds: float  # that padding added to the steps
    busy_seconds: float  # of the device, padding included

    @property
    def num_programs(self) -> int:
        return count_programs(len(self.decode_rows), len(self.mixed_tokens))

    @property
    def share(self) -> float:
        """The share of the device's time that padding took."""
        return self.padded_seconds / self.busy_seconds if self.busy_seconds else 0.0


def count_programs(num_rows: int, num_tokens: int) -> int:
    """Returns the programs that so many sizes of rows and of tokens are compiled to."""
    return PROGRAMS_PER_ROWS * num_rows + num_tokens


def tune(
    first: BucketTable, max_programs: int | None, least_rows: int, run: Callable[[BucketTable], FleetRun]
) -> tuple[Tuning, Tuning]:
    """Returns (the sizes that waste least, what those of `first` waste), each as its own simulation had it.

    Sizes change how long steps take, and so what later steps have to do. Therefore the trace runs again with the chosen
    sizes, and they are chosen anew from its steps, until they stay the same.

    Args:
        max_programs: the most programs; None: as many as `first` has.
        least_rows: the fewest rows of a program.
        run: simulates the trace with a table.

    Raises:
        ConfigError: fewer programs than two sizes need.
    """
    limit = count_programs(len(first.row_counts), len(first.token_counts)) if max_programs is None else max_programs
    if limit < count_programs(1, 1):
        message = f"must be at least {count_programs(1, 1)}, one size of rows and one of tokens, got {limit}"
        raise ConfigError(message, field="max_programs", value=limit)
    before, works, formula = _measure(first, run(first))
    found: list[Tuning] = []
    for _ in range(_ROUNDS):
        rows, tokens = choose_sizes(formula, works, first.row_counts[-1], first.token_counts[-1], limit, least_rows)
        if any((each.decode_rows, each.mixed_tokens) == (rows, tokens) for each in found):
            break
        table = BucketTable(rows, tokens, rows[-1])
        tuning, works, formula = _measure(table, run(table))
        found.append(tuning)
    if before.num_programs <= limit:
        found.append(before)
    return min(found, key=lambda tuning: tuning.padded_seconds), before


def _measure(table: BucketTable, run: FleetRun) -> tuple[Tuning, StepWorks, StepFormula]:
    formula, works = run.spec.formula, StepWorks()
    for replica in run.replicas:
        works.update(replica.device.works)
    padded = sum(count * _padding(formula, table, *work) for work, count in works.items())
    busy = sum(replica.device.busy_seconds for replica in run.replicas)
    return Tuning(table.row_counts, table.token_counts, padded, busy), works, formula


def _padding(formula: StepFormula, table: BucketTable, num_tokens: int, num_rows: int) -> float:
    return formula.of_bucket(table.find(num_tokens, num_rows)) - formula.of_bucket(Bucket(num_tokens, num_rows))


def choose_sizes(
    formula: StepFormula, works: StepWorks, max_rows: int, max_tokens: int, max_programs: int, least_rows: int = 1
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the sizes of rows and of tokens with which `works` take the least time, in at most `max_programs`."""
    decode, mixed = Counter[int](), Counter[int]()
    for (num_tokens, num_rows), count in works.items():
        (decode if num_tokens == num_rows else mixed)[num_tokens] += count
    rows = _choose_each(list(range(min(least_rows, max_rows), max_rows + 1)), decode, formula, None, max_programs)
    first = min(max_tokens, (max_rows // MIN_CHUNK + 1) * MIN_CHUNK)
    sizes = [*range(first, max_tokens, MIN_CHUNK), max_tokens]
    tokens = _choose_each(sizes, mixed, formula, max_rows, max_programs)
    pairs = [
        (rows[k][0] + tokens[m][0], count_programs(k, m), rows[k][1], tokens[m][1])
        for k in rows
        for m in tokens
        if count_programs(k, m) <= max_programs
    ]
    least = min(seconds for seconds, *_ in pairs)
    _, _, best_rows, best_tokens = min(
        (pair for pair in pairs if pair[0] <= least * (1 + 1e-6)), key=lambda pair: pair[1]
    )
    return best_rows, best_tokens


def _choose_each(
    sizes: Sequence[int], steps: Counter[int], formula: StepFormula, num_rows: int | None, most: int
) -> dict[int, tuple[float, tuple[int, ...]]]:
    """Returns, by number of sizes, the least seconds of all steps and the sizes; the largest is always one of them.

    By dynamic programming: with k sizes up to size j, the steps between the last two are padded to j.
    """
    counts = np.zeros(len(sizes))
    for tokens, count in steps.items():
        counts[np.searchsorted(sizes, tokens)] += count
    before = np.concatenate([[0.0], np.cumsum(counts)])
    seconds = np.array([formula.of_bucket(Bucket(size, size if num_rows is None else num_rows)) for size in sizes])
    last, total = len(sizes) - 1, before[1:] * seconds  # total[j]: one size, j, for all steps up to it
    choices: list[np.ndarray] = []
    found = {1: (float(total[last]), (sizes[last],))}
    for count in range(2, min(most, len(sizes)) + 1):
        # table[i, j]: sizes up to i as before, and j for the steps above i
        table = total[:, None] + (before[None, 1:] - before[1:, None]) * seconds[None, :]
        table[np.tril_indices(len(sizes))] = np.inf
        choices.append(table.argmin(axis=0))
        total = table.min(axis=0)
        if not np.isfinite(total[last]):
            break
        at, chosen = last, [sizes[last]]
        for choice in reversed(choices):
            at = int(choice[at])
            chosen.append(sizes[at])
        found[count] = float(total[last]), tuple(reversed(chosen))
    return found


def to_toml(tuning: Tuning, before: Tuning) -> str:
    """Returns the options as TOML, with what they save in a comment."""
    lines = [
        f"# Padding takes {tuning.share:.2%} of the device's time on this trace, with {tuning.num_programs} programs;",
        f"# with the sizes in use before: {before.share:.2%}, with {before.num_programs} programs.",
        f"precompile_bs_paddings = {list(tuning.decode_rows)}",
        f"precompile_token_paddings = {list(tuning.mixed_tokens)}",
    ]
    return "\n".join(lines) + "\n"
