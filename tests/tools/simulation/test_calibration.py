"""Calibration: the fit finds the figures that made the steps; presets on data sheets take what theory says."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.runtime.buckets import Bucket
from jaxserve.device_kinds import DEVICE_KINDS
from jaxserve.engine.model_files import locate_model, resolve_model
from jaxserve.errors import ConfigError
from jaxserve.features.choose import make_shapes
from jaxserve.tools.simulation.calibration import (
    DATA_SHEET,
    Calibration,
    StepWork,
    count_weights,
    fit,
    idle_bytes,
    read_calibration,
    write_calibration,
)
from jaxserve.tools.simulation.engine_plan import choose_device, make_spec

TRUE = Calibration("x", "gpu", 4e12, 8e14, 2e-4, 1e-6)
W = 15e9


def make_steps(true: Calibration, noise: float = 0.0) -> Iterator[StepWork]:
    rng = random.Random(0)
    for rows in (1, 8, 32, 64, 128, 256):
        for tokens, context in ((rows, 1024), (rows, 4096), (2048, 512)):
            operations, keys = 2.0 * W / 2 * tokens, rows * context * 131072.0
            seconds = max(W / true.bytes_per_second, operations / true.flops_per_second)
            seconds += keys / true.bytes_per_second + true.step_seconds + true.row_seconds * rows
            yield StepWork(W, operations, keys, rows, seconds * (1 + noise * rng.uniform(-1, 1)))


def test_the_fit_finds_what_made_the_steps() -> None:
    found = fit("x", "gpu", list(make_steps(TRUE)))
    for field in ("bytes_per_second", "flops_per_second", "step_seconds", "row_seconds"):
        assert getattr(found, field) == pytest.approx(getattr(TRUE, field), rel=1e-6), field
    assert found.worst_error is not None and found.worst_error < 1e-6


def test_the_fit_bears_noise_and_says_how_far_off_it_is() -> None:
    found = fit("x", "gpu", list(make_steps(TRUE, noise=0.05)))
    assert found.bytes_per_second == pytest.approx(4e12, rel=0.05)
    assert found.flops_per_second == pytest.approx(8e14, rel=0.05)
    assert found.worst_error is not None and 0.01 < found.worst_error < 0.1


def test_no_cost_is_negative() -> None:
    """Steps that get shorter with their rows: the cost of a row is none, and the rest still fits."""
    steps = [
        replace(step, seconds=step.seconds - 2e-7 * step.rows) for step in make_steps(replace(TRUE, row_seconds=0))
    ]
    found = fit("x", "gpu", steps)
    assert found.row_seconds == 0 and found.step_seconds > 0 and found.bytes_per_second > 0


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="at least four"):
        fit("x", "gpu", list(make_steps(TRUE))[:3])


def test_files_keep_every_figure(tmp_path: Path) -> None:
    write_calibration(tmp_path / "c.json", TRUE, model="m")
    assert read_calibration(tmp_path / "c.json") == TRUE
    assert json.loads((tmp_path / "c.json").read_text())["model"] == "m"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no", "cannot be read"),
        ("{}", "'device' is missing"),
        ("[]", "is not a calibration"),
        (json.dumps(asdict(TRUE) | {"step_seconds": -1}), "step_seconds .*got -1"),
        (json.dumps(asdict(TRUE) | {"bytes_per_second": "4e12"}), "bytes_per_second"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_calibration(tmp_path / "c.json")
    assert caught.value.field == "calibration"


def test_every_kind_of_device_has_rates() -> None:
    assert DATA_SHEET.keys() == DEVICE_KINDS.keys()


@pytest.mark.parametrize(
    ("device", "calibration", "message"),
    [
        (None, None, "say which device"),
        (None, TRUE, "say which device"),
        ("h20", None, "h200"),
        ("v5e", TRUE, "x, a gpu, .*v5e"),
    ],
)
def test_devices_that_cannot_be_simulated(device: str | None, calibration: Calibration | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_device(device, calibration)


def test_experts_are_counted_by_the_tokens_that_meet_them() -> None:
    """Qwen3-30B-A3B: 3.3B active parameters of 30.5B, embedding included; its experts have 58 GB."""
    config = EngineConfig.from_options(model="qwen3-30b-a3b")
    model = resolve_model(config, locate_model(config.model, need_weights=False))
    embedding = model.vocab_size * model.hidden_size
    assert sum(count_weights(model)) + embedding == pytest.approx(3.35e9, rel=0.01)
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    assert idle_bytes(model, 0) == experts
    assert idle_bytes(model, 1) == pytest.approx(experts * 120 / 128)
    assert idle_bytes(model, 64) == pytest.approx(experts * (120 / 128) ** 64)


def test_published_limits_of_an_8b_model_on_an_h200() -> None:
    """Milliseconds of a decode step with bf16 weights and pages at 4.3 TB/s and 788 TFLOP/s, by hand."""
    config = EngineConfig.from_options(model="llama-3.1-8b")
    model = resolve_model(config, locate_model(config.model, need_weights=False))
    assert sum(count_weights(model)) == pytest.approx(7.5e9, rel=0.01)
    kind, _ = choose_device("h200", None)
    rates = Calibration(kind.name, kind.platform, 4.3e12, 788e12)
    spec = make_spec(make_shapes(config, model, kind.platform, kind.name), kind, rates)
    (attention,) = spec.formula.attention
    for rows, context, expected in ((1, 1024, 3.52), (32, 1024, 4.49), (64, 4096, 11.5), (256, 1024, 12.9)):
        seconds = spec.formula.of_bucket(Bucket(rows, rows)) + rows * attention.of_query(context)
        assert 1e3 * seconds == pytest.approx(expected, rel=0.02)
    assert spec.groups[0].num_pages > 10_000 and spec.limits.max_num_seqs == 256


def test_devices_that_share_a_model_have_less_to_do_each() -> None:
    kind, rates = choose_device("h100", None)
    formulas = []
    for count in (1, 2):
        config = EngineConfig.from_options(model="llama-3.1-8b", tensor_parallel_size=count)
        model = resolve_model(config, locate_model(config.model, need_weights=False))
        formulas.append(make_spec(make_shapes(config, model, kind.platform, kind.name), kind, rates).formula)
    alone, shared = formulas
    assert shared.weight_seconds == pytest.approx(alone.weight_seconds / 2, rel=0.01)
    assert shared.token_seconds == pytest.approx(alone.token_seconds / 2)
    assert shared.attention[0].key_seconds == pytest.approx(alone.attention[0].key_seconds / 2)
