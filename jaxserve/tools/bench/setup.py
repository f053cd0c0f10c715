"""The setup of every benchmark whose engine runs in this process."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.environment import read_cpu_model
from jaxserve.tools.bench.limits import DeviceLimits, ModelCosts, measure_limits

if TYPE_CHECKING:
    from jaxserve.engine.llm import LLM


@dataclass(frozen=True)
class Bench:
    """A loaded engine, the rates of its device and the costs of its model."""

    llm: LLM
    limits: DeviceLimits
    costs: ModelCosts
    name: str | None = None  # of the model, where that is not what the engine was given

    @classmethod
    def open(cls, options: Mapping[str, Any], name: str | None = None) -> Bench:
        """Builds the engine of these options and measures its device.

        Raises:
            ConfigError, DeviceError, WeightsError, TokenizerError, CapacityError: name what to change.
        """
        from jaxserve import LLM

        llm = LLM(**options)
        return cls(llm, measure_limits(llm.ready.shapes.model.dtype), ModelCosts.of(llm), name)

    def describe(self) -> dict[str, Any]:
        """Returns the figures `engine` and `limits` of a report: the choices made at the start, and rates."""
        ready = self.llm.ready
        shapes, plan = ready.shapes, ready.plan
        engine = {
            "model": self.model_name,
            "family": shapes.model.family,
            "dtype": shapes.model.dtype,
            "kv_cache_dtype": plan.specs[0].dtype,
            "attention": shapes.impl,
            "num_devices": shapes.num_devices,
            "max_num_seqs": shapes.limits.max_num_seqs,
            "max_num_batched_tokens": shapes.limits.max_num_batched_tokens,
            "max_model_len": shapes.model.max_model_len,
            "num_programs": ready.runner.num_programs,
            "num_pages": list(plan.num_pages),
            "page_size": plan.page_size,
            "weight_bytes": count_weight_bytes(self.llm),
            "kv_bytes": plan.bytes_per_device * plan.num_devices,
        }
        return {"engine": engine, "limits": self.limits.asdict()}

    @property
    def model_name(self) -> str:
        return self.name or self.llm.ready.shapes.config.model.model

    @property
    def title(self) -> str:
        """What is measured, for the title of a table."""
        shapes = self.llm.ready.shapes
        devices = f"{shapes.num_devices} x " if shapes.num_devices > 1 else ""
        device = read_cpu_model() if self.limits.device == "cpu" else self.limits.device
        return f"{self.model_name}, {shapes.model.dtype}, {shapes.impl} attention on {devices}{device}"


def count_weight_bytes(llm: LLM) -> int:
    """Returns the bytes of all parameters, on all devices together."""
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(llm.ready.runner.params))


def repeat[T](run: Callable[[], T], *, num_iters: int, num_warmup: int) -> list[T]:
    """Calls a function some times unheard, to warm up, then `num_iters` times; returns what these gave."""
    from jaxserve.engine.progress import show_progress

    with show_progress("Measuring", unit="runs") as report:
        for turn in range(num_warmup):
            report(0, num_iters, f"warming up, {turn + 1} of {num_warmup}")
            run()
        found = []
        for turn in range(num_iters):
            report(turn, num_iters)
            found.append(run())
        report(num_iters, num_iters)
    return found


def add_iteration_flags(command: argparse.ArgumentParser, *, num_iters: int, num_warmup: int | None = None) -> Any:
    """Adds the flags that say how often a benchmark is run; returns their group.

    Args:
        num_warmup: default of the runs to warm up; None: the command warms up in a way of its own.
    """
    group = command.add_argument_group("runs")
    text = "measured runs; the report has their median, least and most (default: %(default)s)"
    group.add_argument("--num-iters", type=int, default=num_iters, metavar="INT", help=text)
    if num_warmup is not None:
        text = "runs before them, outside the clock (default: %(default)s)"
        group.add_argument("--num-iters-warmup", type=int, default=num_warmup, metavar="INT", help=text)
    text = "tiny sizes in place of the flags' defaults: seconds with the demo model, to try the command"
    group.add_argument("--dry-run", action="store_true", help=text)
    return group


def fill_dry_run(
    args: argparse.Namespace, command: argparse.ArgumentParser, sizes: Mapping[str, Any]
) -> argparse.Namespace:
    """Returns the flags with the sizes of a dry run, if it is one, where the user left the command's defaults."""
    changed = {name: value for name, value in sizes.items() if getattr(args, name) == command.get_default(name)}
    return argparse.Namespace(**(vars(args) | (changed if args.dry_run else {})))


def check_counts(args: argparse.Namespace, **least: int) -> None:
    """Raises ConfigError where a flag is below its least value."""
    for field, bound in least.items():
        if (value := getattr(args, field)) < bound:
            raise ConfigError(f"must be at least {bound}, got {value}", field=field, value=value)
