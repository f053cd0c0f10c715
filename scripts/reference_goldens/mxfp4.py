"""Experts in MXFP4, as gpt-oss stores them: rounding, packing, and files with the packed tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

_BLOCK = 32


def pack(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks u8 [E, out, in / 32, 16] and scales u8 [E, out, in / 32] of values [E, in, out], each rounded."""
    blocks = values.transpose(1, 2).unflatten(-1, (-1, _BLOCK))
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2  # the largest value becomes 4 or 6
    nearest = (blocks / torch.exp2(exponents)[..., None]).unsqueeze(-1) - torch.tensor(FP4_VALUES)
    codes = nearest.abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponents + 127).to(torch.uint8)


def round_values(values: torch.Tensor) -> torch.Tensor:
    """Values [E, in, out] as they come back from a file."""
    return convert_moe_packed_tensors(*pack(values), dtype=torch.float32)


def is_packed(name: str) -> bool:
    """Whether the parameter of this name is stored in MXFP4."""
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def pack_checkpoint(folder: Path) -> None:
    """Replaces the experts' matrices of a checkpoint in one file by packed ones, and says so in config.json."""
    path, tensors = folder / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        if is_packed(name):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = pack(tensor.float())
        else:
            tensors[name] = tensor
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
