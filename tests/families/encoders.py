"""Embedding models of goldens: what the reference makes of their texts, and engines of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxserve import LLM
from tests.e2e.helpers import CACHE
from tests.golden_cases import GOLDENS

FOLDER = GOLDENS / "encoders"
CASES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
LIMIT, PAGE, ROWS = 62, 16, 8


def read_golden(name: str) -> tuple[list[list[int]], list[np.ndarray], list[np.ndarray]]:
    """The texts, their hidden states and their vectors."""
    with np.load(FOLDER / name / "golden.npz") as stored:
        count = sum(key.startswith("text_") for key in stored)
        read = lambda kind: [stored[f"{kind}_{index}"] for index in range(count)]  # noqa: E731
        return [text.tolist() for text in read("text")], read("hidden"), read("embedding")


def start(folder: Path, **options: Any) -> LLM:
    defaults = {"skip_tokenizer_init": True, "dtype": "float32", "page_size": PAGE, "max_num_seqs": ROWS}
    sizes = {"max_num_batched_tokens": 256, "precompile_token_paddings": [256], "precompile_bs_paddings": [ROWS]}
    return LLM(str(folder), **({"show_progress": False} | CACHE | defaults | sizes | options))


def embed(llm: LLM, texts: list[list[int]]) -> list[np.ndarray]:
    return [np.array(each.embedding, np.float32) for each in llm.embed([{"prompt_token_ids": ids} for ids in texts])]
