"""Writes tests/goldens/lora: adapters of golden checkpoints as PEFT itself saves them, and what PEFT answers with them.

Run it in the environment of `make_reference_goldens.py`, with peft: `python scripts/make_lora_goldens.py`. Each case is
a folder with adapter_config.json, adapter_model.safetensors and golden.npz: `prompt` [P], `greedy` [16] token ids and
`logits` [V] f32 after the prompt. The README of an adapter is not kept.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

GOLDENS = Path(__file__).parents[1] / "tests" / "goldens"
NUM_TOKENS, PROMPT = 16, [5, 9, 17, 33, 2, 7]
# By folder: the golden checkpoint, and what is said of the adapter.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_patterns": (
        "llama_gqa",
        {
            "r": 4,
            "lora_alpha": 16,
            "use_rslora": True,
            "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
            "rank_pattern": {"down_proj": 8, r"layers\.1\.self_attn\.q_proj": 2},
            "alpha_pattern": {r"^model\.layers\.0\.mlp\.gate_proj": 40},
        },
    ),
    "phi3_all_linear": ("phi3", {"r": 8, "lora_alpha": 24, "target_modules": "all-linear"}),
    "gpt_neox_one_layer": (
        "gpt_neox",
        {
            "r": 4,
            "lora_alpha": 32,
            "target_modules": r".*\.(query_key_value|dense_h_to_4h)",
            "exclude_modules": r".*layers\.0\..*dense_h_to_4h",
        },
    ),
    "qwen2_layers": (
        "qwen2",
        {"r": 4, "lora_alpha": 32, "target_modules": ["k_proj", "up_proj"], "layers_to_transform": [1]},
    ),
}


def write_case(name: str, base: str, settings: dict[str, Any]) -> None:
    """Writes one case."""
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_pretrained(GOLDENS / base, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.1, **settings)).eval()
    with torch.no_grad():
        for key, value in adapted.named_parameters():
            if ".lora_" in key:
                value.copy_(torch.randn_like(value) * 0.15)
        ids = list(PROMPT)
        first = adapted(torch.tensor([ids])).logits[0, -1]
        for _ in range(NUM_TOKENS):
            ids.append(int(adapted(torch.tensor([ids])).logits[0, -1].argmax()))
    folder = GOLDENS / "lora" / name
    shutil.rmtree(folder, ignore_errors=True)
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.save_pretrained(folder)
    (folder / "adapter_model.safetensors").chmod(0o644)
    (folder / "README.md").unlink(missing_ok=True)
    np.savez(folder / "golden.npz", prompt=PROMPT, greedy=ids[len(PROMPT) :], logits=first.numpy(), base=base)


if __name__ == "__main__":
    for case, (checkpoint, chosen) in CASES.items():
        write_case(case, checkpoint, chosen)
