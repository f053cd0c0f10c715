"""A trace, the options of an engine, and what is asked of them: the work behind `jaxserve simulate`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.core.runtime.buckets import BucketTable
from jaxserve.engine.model_files import locate_model, resolve_model
from jaxserve.engine.progress import ShowProgress, hide_progress
from jaxserve.errors import ConfigError, shorten
from jaxserve.options import list_options
from jaxserve.tools.simulation.calibration import Calibration
from jaxserve.tools.simulation.engine_plan import choose_device, plan_engine
from jaxserve.tools.simulation.fleet import FleetRun, run_fleet
from jaxserve.tools.simulation.replica import EngineSpec, Timeline
from jaxserve.tools.simulation.report import Summary, Targets, summarize
from jaxserve.tools.simulation.router import ROUTERS
from jaxserve.tools.simulation.traces import TraceRequest, make_requests
from jaxserve.tools.simulation.tuning import Tuning, tune

_MOST_REPLICAS = 1024  # in the search for the devices needed
_STUDY_FIELDS = {  # by the flag's name: the field and its type
    "replicas": ("num_replicas", "int"),
    "router": ("router", "str"),
    "rate_scale": ("rate_scale", "float"),
}


@dataclass(frozen=True)
class Study:
    """One run to make."""

    trace: list[TraceRequest]
    options: dict[str, Any]  # the engine's, as for EngineConfig.from_options
    device: str | None = None  # a kind of `jaxserve plan`; None: the calibrated CPU
    calibration: Calibration | None = None
    num_replicas: int = 1
    router: str = "prefix"
    rate_scale: float = 1.0
    targets: Targets = field(default_factory=Targets)
    slo_share: float = 0.99  # of requests that must be answered in time
    label: str = ""

    def __post_init__(self) -> None:
        for name, value in (("replicas", self.num_replicas), ("rate_scale", self.rate_scale)):
            if not value > 0:
                raise ConfigError(f"must be above 0, got {value}", field=name, value=value)
        if self.router not in ROUTERS:
            message = f"must be one of {', '.join(ROUTERS)}, got {shorten(self.router)}"
            raise ConfigError(message, field="router", value=self.router)
        if not 0 < self.slo_share <= 1:
            raise ConfigError(f"must be in (0, 1], got {self.slo_share}", field="slo_share", value=self.slo_share)

    def plan(self) -> tuple[EngineSpec, Calibration, int]:
        """Returns the engine, the rates of its device, and the devices of each replica.

        Raises:
            ConfigError, CapacityError: as `jaxserve plan`.
        """
        config = EngineConfig.from_options(**self.options)
        if (path := config.observability.record_steps) is not None:
            raise ConfigError("a simulation has no steps to replay; leave it out", field="record_steps", value=path)
        if (drafts := config.speculation.speculative_config) is not None:
            message = "a simulation knows no text, so not which drafts are right; leave it out"
            raise ConfigError(message, field="speculative_config", value=drafts)
        kind, calibration = choose_device(self.device, self.calibration)
        model = resolve_model(config, locate_model(config.model, need_weights=False), kind.name)
        return plan_engine(config, model, kind, calibration), calibration, config.parallel.tensor_parallel_size

    def run(self, progress: ShowProgress = hide_progress) -> tuple[Summary, FleetRun]:
        """Simulates, and with an SLO finds how many devices it needs."""
        spec, _, devices = self.plan()
        with progress(f"Simulating {self.label}".strip(), unit="requests") as report:
            note = lambda done: report(done, len(self.trace), "")  # noqa: E731
            run = self._simulate(spec, self.num_replicas, note)
        assert run is not None  # nothing told it to give up
        needed = None
        if self.targets:
            with progress("Searching for the devices needed", unit="requests") as report:
                note = lambda done: report(done, len(self.trace), "")  # noqa: E731
                needed = self._find_replicas(spec, run, note)
        return summarize(
            run,
            self.targets,
            label=self.label,
            devices_per_replica=devices,
            num_devices_needed=None if needed is None else needed * devices,
        ), run

    def tune_buckets(self, max_programs: int | None, progress: ShowProgress = hide_progress) -> tuple[Tuning, Tuning]:
        """Returns the padded sizes that waste least on the trace, and those of the options; see `tuning.tune`."""
        spec, calibration, _ = self.plan()
        if spec.limits.options.deterministic:
            message = "has one size of rows and one of tokens, so that there is nothing to choose"
            raise ConfigError(message, field="deterministic", value=True)

        def run(table: BucketTable) -> FleetRun:
            with progress("Simulating", unit="requests") as report:
                made = self._simulate(
                    spec.with_buckets(table), self.num_replicas, lambda done: report(done, len(self.trace))
                )
            assert made is not None  # nothing told it to give up
            return made

        return tune(spec.buckets, max_programs, 2 if calibration.platform == "cpu" else 1, run)

    def _simulate(
        self,
        spec: EngineSpec,
        num_replicas: int,
        note: Callable[[int], None],
        give_up: Callable[[Timeline], bool] | None = None,
    ) -> FleetRun | None:
        requests = make_requests(self.trace, rate_scale=self.rate_scale)
        return run_fleet(requests, spec, num_replicas=num_replicas, router=self.router, report=note, give_up=give_up)

    def _find_replicas(self, spec: EngineSpec, run: FleetRun, note: Callable[[int], None]) -> int | None:
        """Returns the fewest replicas with which `slo_share` of the requests meet the SLO; None: none found.

        It doubles the number until one suffices, then bisects. A run ends as soon as too many requests were late.
        """
        most_late = math.floor((1 - self.slo_share) * len(self.trace) + 1e-9)
        known = {self.num_replicas: sum(not self.targets.are_met(each) for each in run.timelines) <= most_late}

        def suffices(count: int) -> bool:
            if count not in known:
                late = 0

                def give_up(timeline: Timeline) -> bool:
                    nonlocal late
                    late += not self.targets.are_met(timeline)
                    return late > most_late

                made = self._simulate(spec, count, note, give_up)
                known[count] = made is not None and (
                    sum(not self.targets.are_met(each) for each in made.timelines) <= most_late
                )
            return known[count]

        enough = self.num_replicas
        while not suffices(enough):
            enough *= 2
            if enough > _MOST_REPLICAS or enough > 2 * len(self.trace):
                return None
        short = max((count for count, is_enough in known.items() if not is_enough and count < enough), default=0)
        while enough - short > 1:
            middle = (enough + short) // 2
            enough, short = (middle, short) if suffices(middle) else (enough, middle)
        return enough


def sweep(study: Study, text: str) -> list[Study]:
    """Returns a study for each value of `option=a,b,c`, which is an option of the engine or of the simulation.

    Raises:
        ConfigError: the text has another form, the option is unknown, or a value is not of its type.
    """
    name, _, values = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if not values:
        raise ConfigError("must be option=value,value,...", field="sweep", value=text)
    labels = [value.strip() for value in values.split(",")]
    studies = []
    for label in labels:
        named = dataclasses.replace(study, label=f"{name}={label}")
        if name in _STUDY_FIELDS:
            attribute, kind = _STUDY_FIELDS[name]
            studies.append(dataclasses.replace(named, **{attribute: _read_value(name, label, kind)}))
        else:
            value = _read_value(name, label, _find_type(name))
            studies.append(dataclasses.replace(named, options=study.options | {name: value}))
    return studies


def _find_type(name: str) -> str:
    for _, option in list_options(EngineConfig):
        if name in (option.name, *option.metadata["aliases"]):
            return str(option.type).removesuffix(" | None")
    known = ", ".join(sorted((*_STUDY_FIELDS, *(option.name for _, option in list_options(EngineConfig)))))
    raise ConfigError(f"{shorten(name)} is not an option; known: {known}", field="sweep", value=name)


def _read_value(name: str, text: str, kind: str) -> Any:
    if kind.startswith("tuple"):
        raise ConfigError(f"{name} is a list, which a sweep cannot vary", field="sweep", value=text)
    try:
        if kind == "bool":
            return {"true": True, "false": False, "on": True, "off": False}[text.lower()]
        return {"int": int, "float": float, "str": str}[kind](text)
    except (KeyError, ValueError):
        raise ConfigError(f"{name} cannot be {shorten(text)}", field="sweep", value=text) from None
