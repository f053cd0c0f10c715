"""Towers of goldens: their files, their pictures, and what transformers makes of these."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.core.layers.stack import StackMode, stack_params
from jaxserve.core.models.tower import TowerConfig
from jaxserve.core.runtime.tower import choose_tower_impl, fit_tower, run_tower
from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
from jaxserve.core.weights.tower import load_tower
from jaxserve.families.registry import parse_config
from jaxserve.families.towers import TOWERS, find_tower, parse_tower
from jaxserve.media.items import MediaItem
from jaxserve.media.processors import ImageProcessor, read_processor
from jaxserve.media.processors.settings import read_settings
from tests.golden_cases import GOLDENS

FOLDER = GOLDENS / "towers"
CASES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "mistral3", "llava")
NUM_IMAGES = 6  # that a program takes


def read_raw(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name / "config.json").read_text())


def find_processor(name: str) -> ImageProcessor:
    return read_processor(TOWERS[name].processor, read_settings(FOLDER / name))


def read_tower(name: str, dtype: str = "float32") -> TowerConfig:
    raw = read_raw(name)
    return parse_tower(raw, replace(parse_config(raw), dtype=dtype), find_processor(name))


@functools.cache
def read_images(name: str) -> tuple[tuple[MediaItem, ...], tuple[np.ndarray, ...]]:
    """The items of the pictures, and their vectors [M, P, D]."""
    processor = find_processor(name)
    with np.load(FOLDER / name / "golden.npz") as stored:
        count = sum(key.startswith("pixels_") for key in stored)
        items = tuple(processor.make_item(stored[f"pixels_{index}"]) for index in range(count))
        return items, tuple(stored[f"vectors_{index}"] for index in range(count))


class TowerRunner:
    """Runs batches of images through a tower, padded to `num_patches`, in one program; `mode` lays its layers out."""

    def __init__(
        self,
        config: TowerConfig,
        folder: Path,
        *,
        num_patches: int = 1152,
        mesh: Mesh | None = None,
        impl: str = "xla",
        mode: StackMode = "unrolled",
    ) -> None:
        devices = 1 if mesh is None else mesh.size
        self.config = config = fit_tower(config, devices)
        self.impl, _ = choose_tower_impl(config, impl, devices, "cpu")
        where = make_mesh(1, jax.devices()[:1]) if mesh is None else mesh
        self.params = stack_params(load_tower(config, folder, mesh=where, rules=DEFAULT_RULES), mode)
        self._inputs = find_tower(config).inputs(config, num_patches)
        self._program = jax.jit(functools.partial(run_tower, config, impl=self.impl, mesh=mesh))

    def run(self, items: Sequence[MediaItem], *, seed: int | None = None) -> list[np.ndarray]:
        """The vectors of each image. `seed`: what padding holds is drawn."""
        arranged = find_tower(self.config).arrange(self.config, items)
        lengths = np.zeros(NUM_IMAGES, np.int32)
        lengths[: len(items)] = [item.num_patches for item in items]
        found = np.asarray(self._program(self.params, self._pad(arranged, seed), lengths)).astype(np.float32)
        counts = [item.num_tokens for item in items]
        return np.split(found[: sum(counts)], np.cumsum(counts)[:-1])

    def _pad(self, arranged: Mapping[str, np.ndarray], seed: int | None) -> dict[str, np.ndarray]:
        padded = {}
        assert arranged.keys() == self._inputs.keys()
        for name, described in self._inputs.items():
            array = np.zeros(described.shape, described.dtype)
            if seed is not None:
                most = 255 if array.dtype == np.uint8 else 2**31 - 1
                array[...] = np.random.default_rng(seed).integers(0, most, array.shape)
            assert arranged[name].dtype == described.dtype
            array[: len(arranged[name])] = arranged[name]
            padded[name] = array
        return padded
