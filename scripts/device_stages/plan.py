"""The stages of a device day, in the order in which they are run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from device_stages.results import CLOSING, Line, results_of

EARLY_LAUNCHES = "--xla_gpu_enable_pdl=true --xla_gpu_enable_pdl_launch=true"  # of XLA's kernels, as of our own
NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="  # XLA then launches every kernel by itself
# Registers and spills of each kernel, to standard output. Where only values are checked, XLA's own kernels need not be
# tuned, which takes most of the time that their programs compile.
_CHECKS = {"MOSAIC_GPU_DUMP_PTXAS": "1", "XLA_FLAGS": "--xla_gpu_autotune_level=0"}


# In the format that `jaxserve.features.bundle.tuned` keeps, with the texts of computations.
_KEEP_TUNED = "--xla_gpu_use_new_autotune_cache_format=false --xla_gpu_dump_autotune_results_to={out}/tuned.txtpb"


@dataclass(frozen=True)
class Stage:
    """One stage: a module that lists its items (`list_items(context)`), in a process of its own."""

    name: str
    purpose: str
    seconds: float  # at most, for all its items
    item_seconds: float  # at most, for one: then its process is killed, and a new one continues after the item
    module: str = ""  # by default `device_stages.<name>`
    environment: Mapping[str, str] = field(default_factory=dict)  # "{out}" stands for the folder of the results
    prepares_ahead: bool = False  # items are compiled before they are begun, unless an earlier process died
    measures: bool = False  # measures kernels; the XLA path in their place after a failed smoke test

    @property
    def path(self) -> str:
        return self.module or f"device_stages.{self.name}"


# A limit of an item ends five seconds before its stage's, so that an item that hangs is named before the stage ends.
FIRST = (
    Stage("probe", "what the machine is, and its copy and matmul rates", 30, 25),
    Stage(
        "smoke",
        "steps against the XLA path, bit for bit the same when repeated, and where pages lie far apart",
        60,
        40,
        environment=_CHECKS,
    ),
    Stage("demo", "the demo model's answers, against those that a CPU gave", 75, 60),
    Stage("tokens", "greedy tokens of 4 layers of an 8B model by the kernels and by XLA", 50, 45, measures=True),
    Stage(
        "engine",
        "steps of the engine with all 32 layers of an 8B model",
        220,
        150,
        environment={"XLA_FLAGS": _KEEP_TUNED},
        measures=True,
    ),
    Stage("engine_xla", "steps of 8 layers with portable attention", 50, 45, "device_stages.engine"),
    Stage(
        "cases",
        "every case of the kernels' tests against the formula",
        75,
        30,
        environment=_CHECKS,
        prepares_ahead=True,
    ),
    Stage("timing", "seconds of a layer, by the slope between 4 and 20 layers", 110, 45, measures=True),
)
SECOND = (
    Stage(
        "kernels",
        "the same without command buffers, and kernel by kernel",
        35,
        30,
        environment={"XLA_FLAGS": NO_COMMAND_BUFFERS},
        measures=True,
    ),
    Stage(
        "ablation", "loads without compute, a persistent grid, sizes of pages, who writes keys", 60, 30, measures=True
    ),
    Stage("engine_8", "steps of 8 layers", 50, 45, "device_stages.engine", measures=True),
    Stage(
        "engine_early",
        "the same where XLA's kernels begin before the one ahead has ended",
        50,
        45,
        "device_stages.engine",
        environment={"XLA_FLAGS": EARLY_LAUNCHES},
        measures=True,
    ),
    Stage("tuning", "block sizes; the winners are in tuning.json", 150, 145, measures=True),
    Stage(
        "peers",
        "dense attention of cuDNN and torch",
        40,
        20,
        environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    ),
    Stage("sanitizer", "small steps under compute-sanitizer", 150, 60),
)
STAGES = {stage.name: stage for stage in (*FIRST, *SECOND)}
GROUPS = {"first": FIRST, "second": SECOND}


def find_smoke_fault(lines: Iterable[Line]) -> str | None:
    """Returns why the smoke test rules out measuring the kernels, or None."""
    lines = list(lines)
    for line in results_of(lines, "smoke"):
        if line["event"] == "lost":
            return f"{line['item']}: {line['how']}"
        if line["ok"] is False:
            return f"{line['item']}: {line.get('error', 'wrong')}"
    ended = [line for line in lines if line["stage"] == "smoke" and line["event"] == "end" and line["how"] != "done"]
    if ended and not any(line["stage"] == "smoke" and line["event"] in CLOSING for line in lines):
        return f"the smoke test: {ended[-1]['how']}"
    return None
