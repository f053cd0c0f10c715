"""Options of the compiler for a GPU that is not here, and the file that a kind of device has."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.features.bundle.tuned.__main__ import keep_results
from jaxserve.features.bundle.tuned.options import adapt_results, find_results, tuned_options
from jaxserve.features.bundle.tuned.results import read_results
from pallas_kernels.targets import TARGETS
from tests.features.bundle.tuned.test_results import DUMP, H200, PRODUCT

TARGET = TARGETS["h200"]
LOADED = "xla_gpu_load_autotune_results_from"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """With what a device of another clock has dumped."""
    dump = tmp_path / "dump.txtpb"
    dump.write_text(DUMP.replace("1.98 GHz", "1.83 GHz"))
    keep_results(dump, "NVIDIA H200", tmp_path / "data")
    return tmp_path / "data"


def test_a_target_has_the_figures_by_which_xla_finds_results() -> None:
    assert TARGET.tuning_key == H200
    assert all((target.tuning_key is not None) == (target.platform == "gpu") for target in TARGETS.values())


def test_a_file_is_found_by_its_name_alone(directory: Path, tmp_path: Path) -> None:
    assert find_results("NVIDIA H200", directory) == directory / "NVIDIA H200.txtpb"
    assert find_results("NVIDIA L4", directory) is None and find_results("NVIDIA H200", tmp_path / "none") is None


def test_results_are_written_for_the_target(directory: Path) -> None:
    with tuned_options(TARGET, directory) as options:
        results = read_results(Path(options[LOADED]).read_text())
        assert {each.hlo for each in results} == {PRODUCT}
        assert {each.device for each in results} == {H200}
        assert options["xla_gpu_use_new_autotune_cache_format"] is False
    assert not Path(options[LOADED]).exists()


def test_without_a_file_a_gpu_has_estimates_and_a_tpu_nothing(tmp_path: Path) -> None:
    with tuned_options(TARGETS["l4"], tmp_path) as options:
        assert options == {"xla_gpu_experimental_cost_model_gemm_tiling_default": True}
    with tuned_options(TARGETS["v5e"], tmp_path) as options:
        assert options == {}


def test_results_of_another_device_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of another device: CUDA: 8\.0, Cores: 108"):
        adapt_results(DUMP.replace("CUDA: 9.0, Cores: 132", "CUDA: 8.0, Cores: 108"), TARGET)


def test_newer_results_come_before_those_that_were_kept(directory: Path, tmp_path: Path) -> None:
    newer = tmp_path / "newer.txtpb"
    newer.write_text(DUMP.replace("block_m: 64", "block_m: 32").replace("4096,6144", "4096,4096"))
    for dump, count in ((newer, 2), (tmp_path / "dump.txtpb", 2)):
        path = keep_results(dump, "NVIDIA H200", directory)
        assert len(read_results(path.read_text())) == count
    newer.write_text(DUMP.replace("block_m: 64", "block_m: 16"))
    keep_results(newer, "NVIDIA H200", directory)
    kept = {each.hlo: each.choice for each in read_results(path.read_text())}
    assert "block_m: 16" in kept[PRODUCT] and len(kept) == 2
