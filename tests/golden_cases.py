"""Reads tests/goldens: tiny checkpoints beside what Hugging Face transformers answers for them.

Made by scripts/make_reference_goldens.py; manifest.json says with which versions and what each case covers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

GOLDENS = Path(__file__).resolve().parent / "goldens"


@cache
def read_manifest() -> dict[str, Any]:
    """The whole of manifest.json; `["cases"][name]` describes one case."""
    return json.loads((GOLDENS / "manifest.json").read_text())


CASES: tuple[str, ...] = tuple(name for name in read_manifest()["cases"] if (GOLDENS / name / "golden.npz").exists())
"""Names of all cases, in the order of the manifest: one folder each."""


@dataclass(frozen=True)
class GoldenCase:
    """One checkpoint and its expected answers, all computed in f32.

    `logits[i]` is f32 [len(logit_positions[i]), V]. Position p counts in `prompts[i] + greedy[i]`, and its row scores
    the token at p + 1: positions below `len(prompts[i])` need the prompt only, those above follow greedy tokens, and
    the last one (`len(prompts[i]) + 62`) chose the last token. `greedy[i]` holds 64 token ids, end-of-sequence ignored;
    `margins[i]` is f32 [64], the best minus the second logit where each was chosen, and `min_margin` the least of all.
    `largest_logit` is the scale for relative tolerances. `weights_dtype` is the dtype of the files: 16-bit checkpoints
    are to be loaded as f32 to compare. Serve with `max_model_len`: dynamic and long rope depend on it.
    """

    name: str
    path: Path
    family: str
    prompts: list[list[int]]
    logits: list[np.ndarray]
    logit_positions: list[np.ndarray]
    greedy: list[list[int]]
    margins: list[np.ndarray]
    min_margin: float
    largest_logit: float
    weights_dtype: str
    max_model_len: int

    @property
    def config(self) -> dict[str, Any]:
        """config.json as transformers 5 writes it."""
        return json.loads((self.path / "config.json").read_text())

    @property
    def legacy_config(self) -> dict[str, Any] | None:
        """The same model in the spelling of transformers 4 (rope_theta, rope_scaling, torch_dtype), if stored."""
        path = self.path / "config_legacy.json"
        return json.loads(path.read_text()) if path.exists() else None


def load_case(name: str) -> GoldenCase:
    """Reads one case; an unknown name raises KeyError."""
    entry = read_manifest()["cases"][name]
    path = GOLDENS / name
    with np.load(path / "golden.npz") as stored:
        arrays = dict(stored)
    rows = range(len(arrays["greedy"]))
    return GoldenCase(
        name=name,
        path=path,
        family=entry["family"],
        prompts=[arrays[f"prompt_{i}"].tolist() for i in rows],
        logits=[arrays[f"logits_{i}"] for i in rows],
        logit_positions=[arrays[f"positions_{i}"] for i in rows],
        greedy=arrays["greedy"].tolist(),
        margins=list(arrays["margins"]),
        min_margin=float(arrays["margins"].min()),
        largest_logit=float(entry["largest_logit"]),
        weights_dtype=str(arrays["weights_dtype"]),
        max_model_len=entry["max_model_len"],
    )


def list_cases_with_legacy_config() -> tuple[str, ...]:
    """Names of the cases that also have config_legacy.json."""
    return tuple(name for name in CASES if read_manifest()["cases"][name]["legacy_config"])
