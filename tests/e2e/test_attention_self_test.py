"""An engine whose device has a kernel: what its self-test says decides, in the log, the metrics and the doctor."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import jax
import pytest

from jaxserve import LLM
from jaxserve.config import EngineConfig
from jaxserve.core.runtime.self_test import confirm_attention
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.engine.metrics import Gauge
from jaxserve.engine.model_files import locate_model, resolve_model
from jaxserve.errors import ConfigError, DeviceError
from jaxserve.features.choose import make_shapes
from jaxserve.tools.doctor import FindParts, list_checks, run_checks
from tests.e2e.helpers import PROGRAMS, generate_ids, greedy, write_tiny_llama
from tests.pallas_kernels.cpu_kernel import serve_kernel

PROMPTS = [[5, 9, 2], list(range(1, 41))]
OPTIONS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "page_size": 32,
    "compilation_cache_dir": str(PROGRAMS),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 16, which the kernel wants padded."""
    changes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), torch_dtype="float32", **changes)


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    return generate_ids(make_llm(tiny), PROMPTS, greedy(4))


def make_llm(folder: Path, **options: object) -> LLM:
    return LLM(str(folder), show_progress=False, **OPTIONS | options)


def make_tiny_shapes(folder: Path, **options: object) -> Shapes:
    config = EngineConfig.from_options(model=str(folder), **OPTIONS | options)
    return make_shapes(config, resolve_model(config, locate_model(config.model)), "cpu", "cpu")


def find_gauge(llm: LLM) -> Gauge:
    (gauge,) = [metric for metric in llm.get_metrics() if metric.name == "jaxserve:attention_fallback"]
    assert isinstance(gauge, Gauge)
    return gauge


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param("wrong values", "decode batch: it gave wrong values", marks=pytest.mark.thorough),
        ("does not compile", "decode batch: NotImplementedError"),
    ],
)
def test_a_kernel_that_fails_is_replaced_with_a_warning_and_a_metric(
    tiny: Path, expected: list[list[int]], fault: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serve_kernel(fault), caplog.at_level(logging.INFO, "jaxserve"):
        llm = make_llm(tiny)
        assert llm.ready.shapes.specs[0].layout == "plain" and llm.ready.runner.device.cache[0].shape[-1] == 16
        assert generate_ids(llm, PROMPTS, greedy(4)) == expected
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("attention: xla, portable attention: the gpu kernels failed their self-test: " + message)
    assert any("testing the gpu kernels on" in record.getMessage() for record in caplog.records)
    gauge = find_gauge(llm)
    assert gauge.value == 1 and gauge.labels["impl"] == "xla" and message in gauge.labels["reason"]


def test_a_kernel_that_is_right_serves(tiny: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    with serve_kernel(), caplog.at_level(logging.WARNING, "jaxserve"):
        llm = make_llm(tiny)
        assert llm.ready.runner.device.cache[0].shape[-1] == 128, "its layout"
        assert generate_ids(llm, PROMPTS, greedy(4)) == expected
    gauge = find_gauge(llm)
    assert gauge.value == 0 and gauge.labels["impl"] == "gpu" and not caplog.records


@pytest.mark.parametrize("fault", ["wrong values", "does not compile"])
def test_a_kernel_that_was_asked_for_by_name_is_not_replaced(tiny: Path, fault: str) -> None:
    with (
        serve_kernel(fault),
        pytest.raises(ConfigError, match=r"attention_impl: impl 'gpu' failed its self-test on cpu"),
    ):
        make_llm(tiny, attention_impl="gpu")


def test_nothing_is_tested_that_xla_or_an_interpreter_runs(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels.testing.self_test.run_self_test", lambda *_, **__: 1 / 0)
    for impl, dtype in (("auto", "float16"), ("xla", "float32"), ("tpu_interpret", "bfloat16")):
        shapes = make_tiny_shapes(tiny, attention_impl=impl, dtype=dtype)
        assert confirm_attention(shapes, jax.devices()[0]) is shapes and not shapes.fell_back


def test_every_kv_group_is_tested_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        "pallas_kernels.testing.self_test.run_self_test", lambda _, shape, **__: seen.append(shape.window)
    )
    with serve_kernel():
        shapes = make_tiny_shapes(tiny)
        (kind,) = shapes.model.layers
        kinds = tuple(dataclasses.replace(kind, window=window) for window in (32, None, 32))
        model = dataclasses.replace(shapes.model, layers=kinds)
        shapes = dataclasses.replace(shapes, model=model, specs=shapes.specs * 2)
        assert confirm_attention(shapes, jax.devices()[0]) is shapes
    assert seen == [None, 32]


def test_a_device_that_the_kernel_broke_is_no_fallback(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    with serve_kernel("does not compile"):
        shapes = make_tiny_shapes(tiny)
        monkeypatch.setattr(jax, "block_until_ready", fail)
        with pytest.raises(DeviceError, match=r"answers no more: decode batch: .*attention_impl='xla'"):
            confirm_attention(shapes, jax.devices()[0])


def test_the_doctor_notes_a_fallback(tiny: Path) -> None:
    config = EngineConfig.from_options(model=str(tiny), **OPTIONS)
    files, find_none = locate_model(config.model), lambda model: None
    checks = list_checks(config, FindParts(lambda kind: resolve_model(config, files), find_none, find_none))
    with serve_kernel("does not compile"):
        (finding,) = [finding for finding in run_checks(checks) if finding.title == "Attention"]
    assert finding.status == "note" and "the gpu kernels failed their self-test" in finding.text


@pytest.mark.parametrize(("impl", "fell_back"), [("auto", True), ("xla", False)])
def test_a_device_without_kernels_has_fallen_back_unless_it_was_asked_to(
    tiny: Path, impl: str, fell_back: bool
) -> None:
    config = EngineConfig.from_options(model=str(tiny), **OPTIONS | {"attention_impl": impl})
    model = resolve_model(config, locate_model(config.model))
    assert make_shapes(config, model, "gpu", "Tesla V100").fell_back == fell_back
