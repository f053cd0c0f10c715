"""Builds tests/goldens/encoders: tiny random embedding models, and what transformers and sentence-transformers answer.

Runs in the reference environment (`make reference-env`), never in CI:

    .venv-reference/bin/python scripts/make_encoder_goldens.py

All arithmetic is f32 with eager attention. Each folder is what sentence-transformers loads, without a tokenizer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import sentence_transformers
import torch
import transformers
from reference_goldens.encoder_cases import ENCODER_CASES, SMALL, TEXT_LENGTHS, EncoderCase
from safetensors.torch import load_file, save_file
from sentence_transformers.models import Dense, LayerNorm, Normalize, Pooling
from transformers import AutoConfig, AutoModel

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "tests" / "goldens" / "encoders"
_SEED = 7
_AROUND = {"mistral": "model", "modernbert": "model", "new": "new"}  # where it is not `base_model_prefix`
_OLD_TYPES = "sentence_transformers.models"


def fill(module: torch.nn.Module) -> None:
    """Sets every parameter from its name: norms around 1, the others wide enough that no layer is lost."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            rng = np.random.default_rng([_SEED, zlib.crc32(name.encode())])
            values = rng.standard_normal(tuple(parameter.shape))
            scale = 0.3 if parameter.ndim > 1 else 0.2
            centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.copy_(torch.from_numpy((centre + scale * values).astype(np.float32)))


def make_model(case: EncoderCase) -> Any:
    """The transformers model of a case."""
    keys = {**SMALL, **(case.config or {})}
    config = AutoConfig.for_model(case.model_type, **{key: value for key, value in keys.items() if value is not None})
    model = AutoModel.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    fill(model)
    return model


def make_modules(case: EncoderCase, size: int) -> list[tuple[str, Any]]:
    """The modules behind the model, and the names of their folders."""
    modules: list[tuple[str, Any]] = [("1_Pooling", Pooling(size, pooling_mode=case.pooling))]
    size *= 1 if isinstance(case.pooling, str) else len(case.pooling)
    for index, each in enumerate(case.modules, 2):
        if isinstance(each, str):
            module = LayerNorm(size)
        else:
            activation = getattr(torch.nn, each["activation_function"])()
            module = Dense(size, **{**each, "activation_function": activation})
            size = each["out_features"]
        fill(module)
        modules.append((f"{index}_{type(module).__name__}", module))
    if case.normalize:
        modules.append((f"{len(modules) + 1}_Normalize", Normalize()))
    return modules


def save(case: EncoderCase, model: Any, modules: list[tuple[str, Any]], folder: Path) -> None:
    """Writes a checkpoint and its modules as sentence-transformers does."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    if case.written is not None:
        file = folder / "config.json"
        changed = {**json.loads(file.read_text()), **case.written}
        file.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}, indent=1))
    if not case.bare:
        kind, file = (case.written or {}).get("model_type", case.model_type), folder / "model.safetensors"
        around = _AROUND.get(kind, model.base_model_prefix)
        save_file({f"{around}.{name}": tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    entries = [("0", "", "sentence_transformers.base.modules.transformer.Transformer")]
    for index, (name, module) in enumerate(modules, 1):
        kind = type(module)
        entries.append((str(index), name, f"{kind.__module__}.{kind.__name__}"))
        (folder / name).mkdir()
        if kind is not Normalize:
            module.save(str(folder / name))
    if case.old_files:
        entries = [(index, name, f"{_OLD_TYPES}.{kind.rpartition('.')[2]}") for index, name, kind in entries]
        mode = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken", "max": "max_tokens"}
        old = {f"pooling_mode_{key}": name == case.pooling for name, key in mode.items()}
        size = model.config.hidden_size
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": size, **old}))
    listed = [{"idx": int(index), "name": index, "path": name, "type": kind} for index, name, kind in entries]
    (folder / "modules.json").write_text(json.dumps(listed, indent=1))
    for empty in folder.glob("*_Normalize"):
        empty.rmdir()


@torch.no_grad()
def record(model: Any, modules: list[tuple[str, Any]], vocab_size: int) -> dict[str, np.ndarray]:
    """Hidden states f32 [T, D] and the vector f32 [E] of random texts, each computed alone."""
    rng, arrays = np.random.default_rng(_SEED), {}
    for index, length in enumerate(TEXT_LENGTHS):
        ids = rng.integers(3, vocab_size, length)
        hidden = model(input_ids=torch.from_numpy(ids)[None]).last_hidden_state
        features = {"token_embeddings": hidden, "attention_mask": torch.ones((1, length), dtype=torch.int64)}
        for _, module in modules:
            features = module(features)
        arrays |= {
            f"text_{index}": ids.astype(np.int32),
            f"hidden_{index}": hidden[0].numpy(),
            f"embedding_{index}": features["sentence_embedding"][0].numpy(),
        }
    return arrays


def main() -> None:
    """Builds all cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the goldens")
    parser.add_argument("only", nargs="*", metavar="CASE", help="the cases to build; all without any")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for case in ENCODER_CASES:
        if arguments.only and case.name not in arguments.only:
            continue
        folder = arguments.out / case.name
        model = make_model(case)
        modules = make_modules(case, model.config.hidden_size)
        save(case, model, modules, folder)
        np.savez_compressed(folder / "golden.npz", **record(model, modules, model.config.vocab_size))
        print(case.name, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()), "bytes")
    versions = {module.__name__: module.__version__ for module in (transformers, sentence_transformers, torch)}
    (arguments.out / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
