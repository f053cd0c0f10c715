"""Orbax checkpoints: the same parameters back, or an error that names what is wrong."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.core.sharding import DEFAULT_RULES
from jaxserve.core.weights import checkpoint_format, make_dummy_params, read_hf_config, restore_params, save_params
from jaxserve.errors import WeightsError
from tests.core.weights.checkpoints import BF16, flatten_arrays, make_specs, one_device

CONFIG = {"model_type": "made-up", "rope_scaling": None, "name": "Ä"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("orbax") / "new" / "model"
    save_params(path, make_params(), CONFIG)
    return path


def make_params(dtype: str = "float32") -> Any:
    return make_dummy_params(make_specs(dtype), mesh=one_device(), rules=DEFAULT_RULES, seed=3)


def restore(path: Path, specs: Any = None) -> Any:
    return restore_params(path, specs or make_specs(), mesh=one_device(), rules=DEFAULT_RULES)


def test_round_trip(saved: Path) -> None:
    params = restore(saved)
    assert jax.tree.structure(params) == jax.tree.structure(make_specs())
    jax.tree.map(np.testing.assert_array_equal, params, make_params())
    assert read_hf_config(saved) == CONFIG
    assert checkpoint_format(saved) == "orbax" and checkpoint_format(saved.parent) == "safetensors"


def test_bfloat16_round_trip_and_casts(saved: Path, tmp_path: Path) -> None:
    save_params(tmp_path, make_params("bfloat16"), CONFIG)  # an existing directory is fine
    jax.tree.map(np.testing.assert_array_equal, restore(tmp_path, make_specs("bfloat16")), make_params("bfloat16"))
    narrowed = flatten_arrays(restore(saved, make_specs("bfloat16")))
    for name, value in flatten_arrays(make_params()).items():
        assert narrowed[name].dtype == BF16
        np.testing.assert_array_equal(narrowed[name], value.astype(BF16), err_msg=name)


def test_never_overwrites(saved: Path) -> None:
    with pytest.raises(WeightsError, match="already exists"):
        save_params(saved, make_params(), CONFIG)


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="cannot be written"):
        save_params(tmp_path / "file" / "model", make_params(), CONFIG)


def test_absent(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no Orbax checkpoint here"):
        restore(tmp_path)
    (tmp_path / "params").mkdir()  # what an interrupted copy may leave
    with pytest.raises(WeightsError, match="no Orbax checkpoint here"):
        restore(tmp_path)


def test_other_parameters(saved: Path) -> None:
    specs = make_specs()
    specs["lm_head"] = specs.pop("final_norm")
    with pytest.raises(WeightsError, match="lacks 'lm_head', and holds 'final_norm'"):
        restore(saved, specs)
    with pytest.raises(WeightsError, match=r"lacks 'layers\.2\."):
        restore(saved, make_specs() | {"layers": [*make_specs()["layers"], make_specs()["layers"][0]]})


def test_other_shape(saved: Path) -> None:
    specs = make_specs()
    specs["embed"] = dataclasses.replace(specs["embed"], shape=(32, 8))
    with pytest.raises(WeightsError, match=r"embed: .*\(16, 8\).*\(32, 8\)"):
        restore(saved, specs)


def test_other_kind_of_numbers(tmp_path: Path) -> None:
    params = make_params()
    params["embed"] = params["embed"].astype("int32")
    save_params(tmp_path, params, CONFIG)
    with pytest.raises(WeightsError, match=r"embed: .*int32"):
        restore(tmp_path)


@pytest.mark.parametrize("damage", ["metadata", "manifest", "index", "data"])
def test_damaged(tmp_path: Path, damage: str) -> None:
    # one parameter, because reads of others would outlive the error; large enough for a file of its own
    specs = {"embed": dataclasses.replace(make_specs()["embed"], shape=(512, 512))}
    save_params(tmp_path, make_dummy_params(specs, mesh=one_device(), rules=DEFAULT_RULES, seed=0), CONFIG)
    params = tmp_path / "params"
    files = {
        "metadata": [params / "_METADATA"],
        "manifest": list(params.rglob("manifest.ocdbt")),
        "index": list((params / "d").iterdir()),
        "data": [file for file in params.rglob("*") if file.is_file() and file.stat().st_size > 2**18],
    }
    assert files[damage]
    for file in files[damage]:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(WeightsError, match="damaged checkpoint") as caught:
        restore(tmp_path, specs)
    assert caught.value.field == str(params) and len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt", "d/extra"])
def test_what_is_no_regular_file_is_refused(saved: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "params" / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    with pytest.raises(WeightsError, match="FIFO") as caught:
        restore(tmp_path)
    assert caught.value.field == str(file)


def test_links_to_directories_are_refused_and_links_to_files_are_read(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    params = tmp_path / "params"
    manifest = (params / "manifest.ocdbt").rename(tmp_path / "blob")
    (params / "manifest.ocdbt").symlink_to(manifest)
    jax.tree.map(np.testing.assert_array_equal, restore(tmp_path), make_params())
    data = (params / "d").rename(tmp_path / "data")
    (params / "d").symlink_to(data)
    with pytest.raises(WeightsError, match="link to a directory"):
        restore(tmp_path)
