"""The rates of a device: from its data sheet, or fitted to measured steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.core.layers.moe import MoEConfig
from jaxserve.core.models.base import DecoderConfig, KVGroup, ParamSpec
from jaxserve.core.runtime.memory import params_bytes
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.device_kinds import DeviceKind
from jaxserve.errors import ConfigError, shorten
from jaxserve.families.registry import param_specs
from jaxserve.tools.simulation.device import Attention, StepFormula
from pallas_kernels.layout import page_bytes
from pallas_kernels.spec import KVSpec

# What a large copy and a large matrix product reach of the data sheet's rates on an H200 (4.3 TB/s, 788 TFLOP/s).
_BANDWIDTH_SHARE, _FLOPS_SHARE = 0.9, 0.8
_NO_LIMIT = 1e21  # the rate where no measured step shows one
# By kind of `jaxserve plan`: bytes per second, and dense bfloat16 operations per second (T4: float16), of one device.
DATA_SHEET = {
    "h200": (4.8e12, 989e12),
    "h100": (3.35e12, 989e12),
    "a100-80g": (2.039e12, 312e12),
    "a100-40g": (1.555e12, 312e12),
    "l4": (300e9, 121e12),
    "t4": (320e9, 65e12),
    "b200": (8e12, 2250e12),
    "rtx5090": (1.792e12, 209.5e12),
    "v5e": (819e9, 197e12),
    "v5p": (2.765e12, 459e12),
    "v6e": (1.64e12, 918e12),
    "v7x": (3.69e12, 1153e12),  # half a chip
}


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the formula needs to know about a device, in SI units."""

    device: str  # as JAX calls it
    platform: str
    bytes_per_second: float  # BW
    flops_per_second: float  # P
    step_seconds: float = 0.0  # c0
    row_seconds: float = 0.0  # c1
    host_bytes_per_second: float = 25e9  # of each device's loads from the host tier
    is_measured: bool = True
    worst_error: float | None = None  # of the fit: the largest |fitted / measured - 1|

    def describe(self) -> str:
        """Returns one line for people."""
        rates = f"{_show_rate(self.bytes_per_second, 'B/s')}, {_show_rate(self.flops_per_second, 'FLOP/s')}"
        costs = f"{1e6 * self.step_seconds:.0f} us a step and {1e6 * self.row_seconds:.2f} us a row"
        if not self.is_measured:
            shares = f"{_BANDWIDTH_SHARE:.0%} and {_FLOPS_SHARE:.0%} of its data sheet"
            return f"{self.device}: {rates}, {shares}. Not calibrated: real steps take longer."
        error = "" if self.worst_error is None else f"; the fit is within {self.worst_error:.0%}"
        return f"{self.device}: {rates}, {costs}, measured{error}."


def _show_rate(rate: float, unit: str) -> str:
    if rate >= _NO_LIMIT:
        return f"no limit of {unit} found"
    return f"{rate / 1e12:.3g} T{unit}" if rate >= 1e11 else f"{rate / 1e9:.3g} G{unit}"


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one measured step had to do, and how long it took."""

    weight_bytes: float  # streamed
    operations: float  # of the matrix products, padding included
    kv_bytes: float  # read
    rows: int  # padding included
    seconds: float


def read_calibration(path: str | Path) -> Calibration:
    """Returns the calibration in a file that `jaxserve bench sweep --calibrate` wrote.

    Raises:
        ConfigError: the file cannot be read, or lacks a figure.
    """
    name = str(path)
    try:
        document = json.loads(Path(path).read_text())
        figures = {field: document[field] for field in Calibration.__slots__}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be read: {error}", field="calibration", value=name) from error
    except (KeyError, TypeError) as error:
        message = f"{name} is not a calibration ({error} is missing); write one with jaxserve bench sweep --calibrate"
        raise ConfigError(message, field="calibration", value=name) from error
    for field in ("bytes_per_second", "flops_per_second", "step_seconds", "row_seconds", "host_bytes_per_second"):
        if not isinstance(figures[field], int | float) or not figures[field] >= 0:
            raise ConfigError(
                f"{name}: {field} must be a positive number, got {shorten(figures[field])}",
                field="calibration",
                value=name,
            )
    return Calibration(**figures)


def write_calibration(path: str | Path, calibration: Calibration, **more: Any) -> None:
    """Writes a calibration; `more` says how it was made."""
    Path(path).write_text(json.dumps(asdict(calibration) | more, indent=1) + "\n")


def take_from_data_sheet(name: str, kind: DeviceKind) -> Calibration:
    """Returns the rates of a device that was not measured, with no cost of steps and rows."""
    bandwidth, flops = DATA_SHEET[name]
    return Calibration(kind.name, kind.platform, _BANDWIDTH_SHARE * bandwidth, _FLOPS_SHARE * flops, is_measured=False)


def fit(device: str, platform: str, steps: Sequence[StepWork]) -> Calibration:
    """Fits BW, P, c0 and c1 to measured steps, none below zero, by least squares of the relative errors.

    max(W / BW, F / P) makes the formula nonlinear. So each step is taken to be bound by its weights or by its
    operations, the linear rest is solved, and steps change sides until none is on the wrong one.
    """
    if len(steps) < 4:
        raise ValueError(f"steps: four figures need at least four steps, got {len(steps)}")
    seconds = np.array([step.seconds for step in steps])
    is_streaming = np.array([step.operations < np.median([each.operations for each in steps]) for step in steps])
    found = np.zeros(4)
    for _ in range(20):
        found = _solve(steps, is_streaming, seconds)
        bandwidth_time, flops_time = found[0], found[1]
        sides = np.array([step.weight_bytes * bandwidth_time >= step.operations * flops_time for step in steps])
        if (sides == is_streaming).all():
            break
        is_streaming = sides
    inverse_bandwidth, inverse_flops, step_seconds, row_seconds = found
    predicted = _features(steps, is_streaming) @ found
    return Calibration(
        device,
        platform,
        1 / inverse_bandwidth if inverse_bandwidth > 0 else _NO_LIMIT,
        1 / inverse_flops if inverse_flops > 0 else _NO_LIMIT,
        float(step_seconds),
        float(row_seconds),
        worst_error=float(np.max(np.abs(predicted / seconds - 1))),
    )


def _features(steps: Sequence[StepWork], is_streaming: np.ndarray) -> np.ndarray:
    """Returns the factors [N, 4] of 1/BW, 1/P, c0 and c1 in each step's time."""
    rows = [
        (step.kv_bytes + (step.weight_bytes if streams else 0.0), 0.0 if streams else step.operations, 1.0, step.rows)
        for step, streams in zip(steps, is_streaming, strict=True)
    ]
    return np.array(rows, dtype=np.float64)


def _solve(steps: Sequence[StepWork], is_streaming: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Returns the figures [4] that fit best, none below zero: those that would be are left out, the worst first."""
    weighted = _features(steps, is_streaming) / seconds[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    used, found = [0, 1, 2, 3], np.zeros(4)
    while used:
        solved = np.linalg.lstsq(weighted[:, used] / scale[used], np.ones(len(steps)), rcond=None)[0]
        found = np.zeros(4)
        found[used] = solved / scale[used]
        if (solved >= 0).all():
            break
        used.pop(int(np.argmin(solved)))
    return found


def make_formula(shapes: Shapes, calibration: Calibration) -> StepFormula:
    """Returns the formula of an engine's steps on one of its devices; they share weights and heads equally."""
    bandwidth, flops = calibration.bytes_per_second, calibration.flops_per_second
    layers, head = count_weights(shapes.model)
    share = shapes.num_devices
    groups = list(zip(shapes.model.kv_groups, shapes.specs, strict=True))
    return StepFormula(
        weight_seconds=streamed_bytes(shapes.model, share) / bandwidth,
        token_seconds=2 * layers / share / flops,
        logit_seconds=2 * head / share / flops,
        attention=tuple(_describe_attention(group, spec, share, calibration) for group, spec in groups),
        load_seconds=tuple(
            group.num_owners * page_bytes(spec) / share / calibration.host_bytes_per_second for group, spec in groups
        ),
        step_seconds=calibration.step_seconds,
        row_seconds=calibration.row_seconds,
    )


def _describe_attention(group: KVGroup, spec: KVSpec, share: int, calibration: Calibration) -> Attention:
    """Returns the times of a KV group's layers on one of `share` devices."""
    key_bytes = page_bytes(spec) / spec.page_size / share
    operations = 4 * group.memory.num_heads * group.memory.head_dim / share  # of a pair: scores, and sums of values
    layers = len(group.layers)
    return Attention(
        layers * key_bytes / calibration.bytes_per_second,
        layers * operations / calibration.flops_per_second,
        group.window,
    )


def streamed_bytes(model: DecoderConfig, num_devices: int) -> int:
    """Returns the bytes of weights that each device reads in every step: all but a table that is only looked up."""
    specs = param_specs(model)
    if not model.embedding.tied:
        del specs["embed"]
    if model.layer_input_size is not None:
        del specs["layer_inputs"]["embed"]
    return params_bytes(specs, num_devices)


def count_weights(model: DecoderConfig) -> tuple[int, int]:
    """Returns the parameters of the layers that each token meets, of experts its own, and of the head."""
    import jax

    specs = param_specs(model)
    head = specs[model.embedding.head]
    count = lambda tree: sum(  # noqa: E731
        int(np.prod(spec.shape)) for spec in jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))
    )
    idle = sum(
        count(specs["layers"][index]["experts"]) * (1 - kind.mlp.router.top_k / kind.mlp.router.num_experts)
        for index, kind in enumerate(model.layers)
        if isinstance(kind.mlp, MoEConfig)
    )
    return count(specs["layers"]) - round(idle), count(head)


def idle_bytes(model: DecoderConfig, num_tokens: int) -> float:
    """Returns the bytes of experts that a step of so many tokens does not read, if the router chooses evenly.

    A token leaves each expert with the chance 1 - k / E, so of E experts E * (1 - k / E) ** tokens are left by all.
    """
    specs, total = param_specs(model), 0.0
    for index, kind in enumerate(model.layers):
        if isinstance(kind.mlp, MoEConfig):
            router = kind.mlp.router
            share = (1 - router.top_k / router.num_experts) ** num_tokens
            total += share * params_bytes(specs["layers"][index]["experts"], 1)
    return total
