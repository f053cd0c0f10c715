"""`jaxserve verify-determinism`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxserve.engine.llm import LLM
from jaxserve.engine.progress import show_progress
from jaxserve.errors import ConfigError
from jaxserve.tools.determinism import Comparison, compare_neighbourhoods


def verify(options: Mapping[str, Any], count: int) -> bool:
    """Compares requests among random others with the same requests alone; prints a table; returns if all are equal.

    Args:
        options: the engine's, which is deterministic unless they say otherwise.
        count: neighbourhoods.

    Raises:
        ConfigError: `count` is below 1.
    """
    if count < 1:
        raise ConfigError(f"must be at least 1, got {count}", field="neighbourhoods", value=count)
    llm = LLM(**{"deterministic": True} | dict(options))
    ready, comparisons = llm.ready, list[Comparison]()
    with show_progress("Comparing", unit="neighbourhoods") as report:
        report(0, count)
        for done, comparisons in enumerate(
            compare_neighbourhoods(ready, count, seed=ready.shapes.config.model.seed), 1
        ):
            different = sum(len(comparison.differences) for comparison in comparisons)
            report(done, count, f"{different} different" if different else "all equal")
    is_on = ready.shapes.config.scheduler.deterministic
    device = ready.mesh.local_devices[0]
    where = f"{ready.mesh.size} x {device.device_kind}, attention {ready.shapes.impl}"
    console = Console()
    console.print(
        _make_table(
            comparisons, f"{ready.shapes.config.model.model} on {where}, deterministic {'on' if is_on else 'off'}"
        )
    )
    different = sum(len(comparison.differences) for comparison in comparisons)
    if not different:
        console.print(f"All {count} answers have the same tokens and log-probabilities as alone, bit for bit.")
        return True
    first = next(comparison for comparison in comparisons if comparison.differences)
    console.print(f"{different} of {count} answers differ; the first, {first.probe.name}: {first.differences[0]}.")
    if not is_on:
        console.print("That is with --no-deterministic; leave it out to see the deterministic engine.")
    return False


def _make_table(comparisons: list[Comparison], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("request", no_wrap=True)
    for column in ("runs", "others", "hits", "different"):
        table.add_column(column, justify="right")
    for each in comparisons:
        different = len(each.differences)
        style = "red" if different else "green"
        counts = (str(count) for count in (each.num_runs, each.num_neighbours, each.num_hits))
        table.add_row(each.probe.name, *counts, f"[{style}]{different}[/]")
    return table
