"""The doctor looks at everything, whatever is broken."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.models.base import DecoderConfig
from jaxserve.engine.model_files import locate_model, resolve_model
from jaxserve.engine.tower_files import locate_tower
from jaxserve.errors import ConfigError
from jaxserve.families.registry import parse_config
from jaxserve.features.speculation.drafters import DrafterModel
from jaxserve.presets import load_preset
from jaxserve.tools import doctor
from jaxserve.tools.doctor import Check, Finding, FindParts, Seen, list_checks, print_report, run_checks
from pallas_kernels import backends
from pallas_kernels.backends import find_backend
from pallas_kernels.cpu import library
from tests.families.towers import FOLDER
from tests.test_devices import break_jax

Findings = dict[str, Finding]


def find_model(device_kind: str = "") -> DecoderConfig:
    return parse_config(load_preset("qwen3-0.6b") or {})


def find_none(model: DecoderConfig) -> None:
    return None


FIND = FindParts(find_model, find_none, find_none)


def examine(cache_dir: Path | str, find: FindParts = FIND, **options: Any) -> Findings:
    config = EngineConfig.from_options(compilation_cache_dir=str(cache_dir), **options)
    return {finding.title: finding for finding in run_checks(list_checks(config, find))}


def examine_cache(cache_dir: Path) -> Finding:
    """The section that needs no other."""
    config = EngineConfig.from_options(compilation_cache_dir=str(cache_dir))
    checks = [check for check in list_checks(config, FIND) if check.title == "Compile cache"]
    (finding,) = run_checks(checks)
    return finding


def list_by_status(findings: Findings) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for title, finding in findings.items():
        found.setdefault(finding.status, []).append(title)
    return found


def test_a_sound_machine(tmp_path: Path) -> None:
    findings = examine(tmp_path / "xla")
    assert list_by_status(findings).keys() <= {"ok", "note"}, findings
    assert "x cpu, " in findings["Devices"].text
    impl = "xla" if library.find_obstacle() else "cpu"
    assert findings["Attention"].text.startswith(f"{impl}: ") and "28 layers" in findings["Model"].text
    assert "0 files" in findings["Compile cache"].text and list((tmp_path / "xla").iterdir()) == []


@pytest.mark.skipif(library.find_obstacle() is not None, reason="needs the library")
@pytest.mark.parametrize(
    ("dtype", "has_tiles", "words"),
    [
        ("bfloat16", True, ("prompts in tiles (AMX)", "bfloat16 weights packed when they are loaded, in tiles (AMX)")),
        ("float32", True, ("float32 weights packed when they are loaded, in vectors",)),
        ("bfloat16", False, ("C++ kernel for bfloat16 up to 8 rows, then XLA's",)),
    ],
)
def test_it_says_where_a_cpu_multiplies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, has_tiles: bool, words: tuple[str, ...]
) -> None:
    rows = dict.fromkeys(("float32", "bfloat16"), 8)
    monkeypatch.setattr(library, "_state", library._state | {"has_tiles": has_tiles, "product_rows": rows})
    text = examine(tmp_path, replace(FIND, model=lambda _: replace(find_model(), dtype=dtype)))["Attention"].text
    assert all(each in text for each in words) and text.count("AMX") == " ".join(words).count("AMX")


def test_a_cpu_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(library, "_state", {"obstacle": "not loaded", "product_rows": {}, "table_rows": {}})
    finding = examine(tmp_path)["Attention"]
    assert finding.status == "note" and "there is no C++ compiler (no-such-compiler)" in finding.text
    assert finding.advice.startswith("install a C++ compiler")


def test_devices_that_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_jax(monkeypatch, "cuda", AssertionError())
    found = list_by_status(findings := examine(tmp_path))
    assert found["broken"] == ["Devices"] and {"JAX", "Model"} <= {*found["ok"]}
    assert found["skipped"] == ["Accelerators", "Attention", "Forward programs", "Sample programs"]
    assert findings["Attention"].text == "needs Devices" and "pip install '.[cuda13]'" in findings["Devices"].advice
    assert not print_report(EngineConfig(), FIND)
    shown = capsys.readouterr().out
    assert "-> unset JAX_PLATFORMS" in shown and "Broken: Devices" in shown and "Traceback" not in shown


def test_a_jax_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    findings = examine(tmp_path)
    assert list_by_status(findings)["broken"] == ["JAX"] and "pip install" in findings["JAX"].advice
    assert findings["Model"].status == "skipped" and findings["Compile cache"].status in ("ok", "note")


def test_a_gpu_that_jax_does_not_use_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").touch()
    monkeypatch.setattr(doctor, "_HARDWARE", (("gpu", tmp_path / "version", "an NVIDIA GPU", "'.[cuda13]'"),))
    jax = SimpleNamespace(config=SimpleNamespace(jax_platforms=None))
    seen = {"JAX": jax, "Devices": [SimpleNamespace(platform="cpu")]}
    assert doctor._look_for_accelerators(seen) == Seen(
        "there is an NVIDIA GPU, which JAX does not use", advice="pip install '.[cuda13]' in a checkout"
    )
    seen["Devices"] = [SimpleNamespace(platform="gpu")]
    assert doctor._look_for_accelerators(seen).advice == ""


def test_a_model_that_cannot_run(tmp_path: Path) -> None:
    def refuse(device_kind: str) -> NoReturn:
        raise ConfigError("is not read here; use another", field="quantization_config")

    findings = examine(tmp_path, replace(FIND, model=refuse))
    assert list_by_status(findings)["broken"] == ["Model"] and "use another" in findings["Model"].text


def test_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.core.runtime.self_test.confirm_kernels", lambda shapes, device: shapes)

    def find(model: DecoderConfig) -> DrafterModel:
        return DrafterModel("eagle3", replace(model, layers=model.layers[:1]), (2, 14, 25), True, 1000, 1024)

    def refuse(model: DecoderConfig) -> NoReturn:
        raise ConfigError(f"is no drafter for {model.family}", field="speculative_config.model")

    assert examine(tmp_path)["Drafts"].text == "none"
    chosen = {"method": "ngram", "num_speculative_tokens": 3}
    assert examine(tmp_path, speculative_config=chosen)["Drafts"].text.startswith(
        "ngram, up to 3 tokens a step, looked"
    )
    chosen = {"method": "eagle3", "model": "head", "num_speculative_tokens": 4}
    findings = examine(tmp_path, replace(FIND, drafter=find), speculative_config=chosen)
    assert findings["Drafts"].text == "eagle3, up to 4 tokens a step; layers of the drafter: 1, bfloat16"
    assert "verify 2x5" in findings["Forward programs"].text
    findings = examine(tmp_path, replace(FIND, drafter=refuse), speculative_config=chosen)
    assert list_by_status(findings)["broken"] == ["Drafts"] and "no drafter for qwen3" in findings["Drafts"].text
    assert "Attention" in list_by_status(findings)["skipped"]


def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.core.runtime.self_test.confirm_kernels", lambda shapes, device: shapes)
    findings = examine(tmp_path, find_in("qwen3_vl"), attention_impl="xla")
    assert findings["Images"].text.startswith("images: at most 64 tokens and 256 patches each")
    assert findings["Images"].text.endswith("layers of the tower: 3")
    assert "images, xla: that of the text model" in findings["Attention"].text
    assert examine(tmp_path)["Images"].text == "none are read"


@pytest.mark.parametrize("takes_last_keys", [True, False])
def test_images_whose_tokens_see_each_other(
    takes_last_keys: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On devices whose kernel has no such mask, prompts have portable attention."""
    kernel = replace(find_backend("cpu"), takes_last_keys=takes_last_keys)
    monkeypatch.setitem(backends._BACKENDS, "cpu", kernel)
    monkeypatch.setattr("jaxserve.core.runtime.self_test.confirm_kernels", lambda shapes, device: shapes)
    for name, is_mutual in (("qwen3_vl", False), ("gemma3", True), ("gemma4", True)):
        first, *others = examine(tmp_path, find_in(name))["Attention"].text.split("\n")
        is_there = any(line.startswith("prompts, xla: portable attention: tokens of one image") for line in others)
        assert is_there == (is_mutual and not takes_last_keys and not first.startswith("xla: "))


def find_in(name: str) -> FindParts:
    """The parts of a golden that reads images."""
    config = EngineConfig.from_options(model=str(FOLDER / name))
    files = locate_model(config.model)
    return FindParts(
        lambda kind: resolve_model(config, files, kind), find_none, lambda model: locate_tower(config, files, model)
    )


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = examine_cache(tmp_path / "file" / "xla")
    assert finding.status == "broken" and "Not a directory" in finding.text and "another directory" in finding.advice


@pytest.mark.parametrize("call", ["fsync", "scandir"])
def test_a_cache_that_is_full_or_unreadable(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(doctor.os, call, fail)
    finding = examine_cache(tmp_path)
    assert finding.status == "broken" and f"{tmp_path}: No space left on device" in finding.text


def test_programs_that_belong_to_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program").write_bytes(b"x")
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: os.fspath(path) != str(tmp_path / "program"))
    finding = examine_cache(tmp_path)
    assert finding.status == "broken" and "1 of its files cannot be read" in finding.text
    assert "your own" in finding.advice


def test_what_nobody_has_thought_of_breaks_one_section_only() -> None:
    def burn(_: object) -> NoReturn:
        raise ZeroDivisionError("first\nsecond")

    findings = run_checks(
        [Check("A", burn, "do this"), Check("B", lambda _: Seen("fine")), Check("C", burn, needs=("A",))]
    )
    assert [(each.status, each.text, each.advice) for each in findings] == [
        ("broken", "ZeroDivisionError: first", "do this"),
        ("ok", "fine", ""),
        ("skipped", "needs A", ""),
    ]
