"""The whole engine with the accelerators' kernels, interpreted on CPU: a tiny model, a few steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxserve import LLM
from jaxserve.errors import ConfigError
from tests.e2e.helpers import LogitsRecorder, generate_ids, greedy, write_tiny_llama

PROMPTS = [[5, 9, 2], list(range(1, 41))]  # one within a chunk's tile, one over a page's edge


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two query heads of 64 on one KV head: what every kernel can do."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


def make_tiny(folder: Path, **options: object) -> LLM:
    return LLM(
        str(folder),
        **{
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 64,
            "page_size": 32,
            "num_kv_pages_override": 9,
            "compilation_cache_dir": "",
            "show_progress": False,
        }
        | options,
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_tpu_kernels_serve_the_same_tokens(tmp_path: Path) -> None:
    two_layers = write_tiny_llama(tmp_path)
    expected = generate_ids(make_tiny(two_layers, dtype="float32"), PROMPTS, greedy(4))
    llm = make_tiny(two_layers, dtype="float32", attention_impl="tpu_interpret")
    assert llm.ready.runner.device.cache[0].shape[1:] == (1, 32, 128), "keys and values side by side"
    assert generate_ids(llm, PROMPTS, greedy(4)) == expected


def compute_logits(folder: Path, impl: str) -> np.ndarray:
    """[prompts, V], of the first new token, in 16 bits."""
    llm = make_tiny(folder, dtype="bfloat16", attention_impl=impl)
    with LogitsRecorder(llm) as recorder:
        generate_ids(llm, PROMPTS, greedy(2))  # a step of prompts and one that decodes
    return np.array([recorder.logits[tuple(prompt), len(prompt) - 1] for prompt in PROMPTS])


@pytest.fixture(scope="module")
def expected(tiny: Path) -> np.ndarray:
    return compute_logits(tiny, "xla")


@pytest.mark.slow
@pytest.mark.parametrize(
    "impl",
    [
        "gpu_interpret",
        pytest.param("tpu_interpret", marks=pytest.mark.thorough),
        pytest.param("ampere_interpret", marks=pytest.mark.thorough),
    ],
)
def test_kernels_compute_the_same_logits_in_sixteen_bits(tiny: Path, expected: np.ndarray, impl: str) -> None:
    logits = compute_logits(tiny, impl)
    assert np.abs(logits - expected).max() < 0.02 * np.abs(expected).max()


def test_a_kernel_that_cannot_run_here_is_refused_by_name(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"attention_impl: impl 'gpu' cannot run: it runs on gpu, this is cpu"):
        make_tiny(tiny, attention_impl="gpu")
    with pytest.raises(ConfigError, match=r"attention_impl: impl 'gpu_interpret' cannot run: .*float32"):
        make_tiny(tiny, dtype="float32", attention_impl="gpu_interpret")
