"""4-bit floats are decoded and expanded exactly, in whole and in part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import ConfigError
from jaxserve.families.registry import parse_config
from jaxserve.features.quantization.float4 import Mxfp4Rows, list_powers, list_values
from tests.families.test_experts import change_files, check_refused
from tests.golden_cases import load_case

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; 8 to 15 are negative
SCALES = "model.layers.1.mlp.experts.down_proj_scales"


def expand(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Value by value, from the format's text: codes [n, D] and scales [n, D / 32]."""
    out = np.empty(codes.shape)
    for row, column in np.ndindex(codes.shape):
        code = int(codes[row, column])
        value = -MAGNITUDES[code - 8] if code >= 8 else MAGNITUDES[code]
        out[row, column] = value * 2.0 ** (int(scales[row, column // 32]) - 127)
    return out


def make_rows(rng: np.random.Generator, num_rows: int, num_blocks: int) -> tuple[np.ndarray, Mxfp4Rows]:
    codes = rng.integers(0, 16, (num_rows, 32 * num_blocks), dtype=np.uint8)
    scales = rng.integers(0, 253, (num_rows, num_blocks), dtype=np.uint8)  # above, 6 overflows
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return expand(codes, scales), Mxfp4Rows(packed, scales, "scales")


@given(st.integers(0, 2**32 - 1), st.data())
def test_every_part_is_the_formats_value(seed: int, data: st.DataObject) -> None:
    expected, rows = make_rows(np.random.default_rng(seed), 5, 3)
    assert rows.shape == expected.shape and len(rows) == 5
    first = data.draw(st.integers(0, 95))
    columns = slice(first, data.draw(st.integers(first, 96)))
    for part in (slice(data.draw(st.integers(0, 4)), 5), np.array(data.draw(st.lists(st.integers(0, 4), min_size=1)))):
        np.testing.assert_array_equal(rows[part, columns].astype(np.float64), expected[part, columns])
        values, powers = list_values(rows.packed)[part, columns], list_powers(rows.scales, "scales")[part, :]
        spread = np.repeat(powers.astype(np.float64), 32, axis=1)[:, columns]
        np.testing.assert_array_equal(values.astype(np.float64) * spread, expected[part, columns])
    below = rows[1:4]
    assert isinstance(below, Mxfp4Rows)
    np.testing.assert_array_equal(np.asarray(below).astype(np.float64), expected[1:4])


def test_the_least_and_the_largest_scale_are_exact() -> None:
    packed = np.full((2, 16), 0x71, np.uint8)  # 0.5 and 6
    values = Mxfp4Rows(packed, np.array([[0], [252]], np.uint8), "scales")[:, :].astype(np.float64)
    np.testing.assert_array_equal(values[:, :2], [[2.0**-128, 6 * 2.0**-127], [2.0**124, 6 * 2.0**125]])


def test_a_scale_that_is_not_a_number_is_named(tmp_path: Path) -> None:
    scales = np.full((3, 32, 2), 127, np.uint8)
    scales[1, 5, 1] = 0xFF
    folder = change_files(tmp_path, "gpt_oss_mxfp4", {SCALES: scales})
    check_refused(folder, f"{SCALES}: holds the scale 0xff, which is NaN")


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({SCALES: None}, f"lacks 1 of .*{SCALES}"),
        ({SCALES: np.zeros((3, 32, 1), np.uint8)}, rf"{SCALES}: has shape \(3, 32, 1\), .* needs \(3, 32, 2\)"),
        ({SCALES: np.zeros((3, 32, 2), np.float32)}, f"{SCALES}: is stored as F32; only U8 can be loaded"),
        ({SCALES.replace("_scales", ""): np.zeros((3, 64, 32), np.float32)}, "has no place for: .*down_proj'"),
    ],
)
def test_packed_tensors_that_are_missing_odd_or_too_much_are_named(
    tensors: dict[str, np.ndarray | None], said: str, tmp_path: Path
) -> None:
    check_refused(change_files(tmp_path, "gpt_oss_mxfp4", tensors), said)


def test_only_the_methods_that_a_family_reads_pass() -> None:
    config = load_case("gpt_oss_mxfp4").config
    with pytest.raises(ConfigError, match=r"quantized checkpoints \(quark\) are not read"):
        parse_config(config | {"quantization_config": {"quant_method": "quark"}})
    llama = load_case("llama_gqa").config
    with pytest.raises(ConfigError, match=r"quantized checkpoints \(mxfp4\) are not read"):
        parse_config(llama | {"quantization_config": config["quantization_config"]})
