"""One list of devices for `plan`, `simulate`, `tune-buckets` and `build`."""

from __future__ import annotations

import pytest

from jaxserve.device_kinds import DEVICE_KINDS, find_kind, find_target
from jaxserve.errors import ConfigError
from jaxserve.tools.cli import main
from jaxserve.tools.simulation.calibration import DATA_SHEET
from pallas_kernels.targets import TARGETS


def test_every_target_of_the_compiler_is_a_kind_and_the_same_device() -> None:
    targets = {kind.target: kind.name for kind in DEVICE_KINDS.values() if kind.target is not None}
    assert targets == {name: target.device_kind for name, target in TARGETS.items()}
    assert DATA_SHEET.keys() == DEVICE_KINDS.keys()


@pytest.mark.parametrize(
    ("name", "target"), [("v7x", "tpu7x"), ("a100-40g", "a100"), ("h200", "h200"), ("v5e-16", "v5e-16"), ("cpu", "cpu")]
)
def test_names_of_plans_are_names_of_builds(name: str, target: str) -> None:
    assert find_target(name) == target


@pytest.mark.parametrize("name", ["h100", "a100-80g", "t4"])
def test_what_is_compiled_on_the_device_only_is_said(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "demo", "--device", name, "-o", "unused"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"jaxserve: device: programs for {name} are compiled on one only: run build there, without")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("v5e-16", "give v5e, and tensor_parallel_size=16"),
        ("cpu", "leave it out"),
        ("a100", "did you mean a100-80g or a100-40g?"),
        ("B200", "did you mean b200?"),
        ("", "known are h200, h100"),
        ("xyz", "known are h200, h100"),
    ],
)
def test_other_names_lead_to_these(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_kind(name)
    assert caught.value.field == "device" and hint in str(caught.value)


@pytest.mark.parametrize("command", ["plan", "simulate", "tune-buckets", "build"])
def test_help_lists_every_name(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    for name, kind in DEVICE_KINDS.items():
        assert name in shown or (command == "build" and kind.target is None)


@pytest.mark.parametrize("name", ["b200", "rtx5090", "v7x"])
def test_every_kind_can_be_planned_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.2-1b", "--device", name]) == 0
    assert f"1 x {name}" in capsys.readouterr().out
