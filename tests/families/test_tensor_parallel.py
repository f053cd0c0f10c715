"""Meshes: what fits, and that four devices compute what one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.core.models.decoder import fit_devices
from jaxserve.errors import ConfigError
from jaxserve.families.registry import param_specs, parse_config
from tests.families.run_tensor_parallel import CASES, DRAFTER, TOWER
from tests.programs import QUICK_ENV

ROOT = Path(__file__).resolve().parents[2]
QUICK = [  # each way to split weights: the others mix these
    "llama",
    "one_kv_head_odd_vocabulary",
    "sinks_and_whole_experts_with_biases",
    "latents",
    "states_by_key_head",
    DRAFTER,
    TOWER,
]

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 16,
}


def test_sizes_that_do_not_fit_are_refused_with_those_that_do():
    config = parse_config(LLAMA)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: 4 .* sizes that work: \[1, 2, 3, 6, 12\]"):
        fit_devices(config, 4)
    for size in (0, -1, 24):
        with pytest.raises(ConfigError, match="tensor_parallel_size"):
            fit_devices(config, size)
    for size in (1, 2, 3, 6, 12):
        assert fit_devices(config, size).layers[0].attention.num_kv_heads % size == 0


def test_an_odd_vocabulary_is_whole_on_every_device():
    specs = param_specs(fit_devices(parse_config(LLAMA | {"vocab_size": 331}), 3))
    assert specs["embed"]["weight"].axes == specs["lm_head"]["weight"].axes == (None, None)
    assert param_specs(fit_devices(parse_config(LLAMA), 2))["embed"]["weight"].axes == ("vocab", None)


def test_one_device_changes_nothing():
    config = parse_config(LLAMA)
    assert fit_devices(config, 1) == config


@pytest.mark.timeout(900)  # two programs of a whole model are compiled for each
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="each way"),
        pytest.param([name for name in CASES if name not in QUICK], id="others", marks=pytest.mark.thorough),
    ],
)
def test_four_devices_equal_one(names: list[str]):
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"} | QUICK_ENV
    script = Path(__file__).with_name("run_tensor_parallel.py")
    done = subprocess.run(
        [sys.executable, str(script), *names],
        env=env | {"PYTHONPATH": f"{ROOT}{os.pathsep}{env.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == names
