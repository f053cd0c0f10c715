"""Writes adapters from the text of PEFT's format, and checkpoints with them merged in numpy: for tests.

Nothing here is shared with what reads them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.core.weights.reader import open_checkpoint
from tests.quantized_files import write_file

# Linear modules, below their layer, that an adapter may change; Gemma 4's dense block stands beside its experts.
LINEAR = re.compile(
    r"(?P<module>.*layers?\.\d+\."
    r"(self_attn\.(q|k|v|o|qkv|q_a|q_b)_proj|self_attn\.kv_a_proj_with_mqa|linear_attn\.(in_proj_\w+|out_proj)"
    r"|attention\.(query_key_value|dense)|attention\.self\.(query|key|value)|(attention\.)?output\.dense"
    r"|intermediate\.dense|mlp\.(gate|up|down|gate_up)_proj|mlp\.(dense_h_to_4h|dense_4h_to_h|c_fc|c_proj)"
    r"|mlp\.shared_experts?\.(gate|up|down)_proj|per_layer_input_gate|per_layer_projection"
    r"|self_attn\.out_proj|linear_attn\.[qkvgabo]_proj|(conv|mamba|mixer)\.(in|out)_proj|feed_forward\.w[123]"
    r"|shared_mlp\.(input|output)_linear|mixer\.([qkvo]|(shared_experts\.)?(up|down))_proj))\.weight"
)


@dataclass(frozen=True)
class AdapterSpec:
    """An adapter to write. `alpha` and `rank` are of modules without a pattern."""

    rank: int
    seed: int
    alpha: float = 8.0
    size: float = 0.05  # standard deviation of A and B
    config: Mapping[str, Any] = field(default_factory=dict)  # more of adapter_config.json
    choose: Callable[[str], bool] = lambda module: True

    def find_rank(self, module: str) -> int:
        return _match(self.config.get("rank_pattern", {}), module, self.rank)

    def find_scale(self, module: str) -> float:
        rank = self.find_rank(module)
        alpha = _match(self.config.get("alpha_pattern", {}), module, self.alpha)
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def make(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """A [r, in] and B [out, r] of each module, by its name; `shapes` are those of the weights [out, in]."""
        rng, found = np.random.default_rng(self.seed), {}
        for module, (out, width) in sorted(shapes.items()):
            if self.choose(module):
                rank = self.find_rank(module)
                pair = rng.normal(0, self.size, (rank, width)), rng.normal(0, self.size, (out, rank))
                found[module] = tuple(each.astype(np.float32) for each in pair)
        return found


def _match(by_pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    for pattern, value in by_pattern.items():
        if re.search(rf"(^|\.)({pattern})$", module):
            return value
    return default


def list_linear(source: Path) -> dict[str, tuple[int, ...]]:
    """The weights that adapters may change in a checkpoint, by module."""
    checkpoint = open_checkpoint(source)
    found = ((match["module"], name) for name in checkpoint.names if (match := LINEAR.fullmatch(name)))
    return {module: checkpoint.shape(name) for module, name in found}


def write_adapter(source: Path, folder: Path, spec: AdapterSpec, **changes: Any) -> Path:
    """Puts an adapter of the checkpoint in `source` into a folder; `changes` are keys of adapter_config.json."""
    pairs = spec.make(list_linear(source))
    config = {
        "peft_type": "LORA",
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": sorted({module.split(".")[-1] for module in pairs}) if not spec.config.get("plain") else None,
        "bias": "none",
        "lora_dropout": 0.05,
        "inference_mode": True,
        "base_model_name_or_path": "somewhere/else",
        "use_dora": False,
        "modules_to_save": None,
        "loftq_config": {},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config | dict(spec.config) | changes))
    tensors = {}
    for module, (a, b) in pairs.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    write_file(folder / "adapter_model.safetensors", tensors)
    return folder


def write_merged(source: Path, folder: Path, spec: AdapterSpec) -> Path:
    """Writes the checkpoint with the adapter merged, W + scale * B A, in float32."""
    checkpoint, pairs = open_checkpoint(source), spec.make(list_linear(source))
    tensors = {}
    for name in sorted(checkpoint.names):
        tensor = np.array(checkpoint.read(name)).astype(np.float32)
        module = name.removesuffix(".weight")
        if module in pairs:
            a, b = (each.astype(np.float64) for each in pairs[module])
            tensor = (tensor + spec.find_scale(module) * (b @ a)).astype(np.float32)
        tensors[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*.json"):
        if file.name != "model.safetensors.index.json":
            shutil.copy(file, folder)
    write_file(folder / "model.safetensors", tensors)
    return folder
