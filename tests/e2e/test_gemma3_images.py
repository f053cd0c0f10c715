"""Gemma 3 with images against transformers: tokens of an image see each other, wherever chunks and cached pages end.

`tests/e2e/test_images.py` has its logits. The answers take 15 CPU seconds, of which most compile.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxserve import LLM, SamplingParams
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.features.images.feature import Images, make_images
from jaxserve.media.processors.gemma3 import Gemma3Shape
from jaxserve.media.processors.gemma4 import Gemma4Shape
from tests.families.towers import FOLDER, read_tower

NAMES = ("text", "one", "three", "first_and_last", "two_turns")
NUM_GREEDY, IMAGE = 64, 80
OPTIONS: dict[str, Any] = {
    "model": str(FOLDER / "gemma3"),
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_patches": 64,  # of one image: each waits for the one before
}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_GREEDY, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "gemma3" / "golden.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Steps of 36 tokens: all prompts but one are cut, and edges of chunks lie in images."""
    return LLM(**OPTIONS, max_num_batched_tokens=36)


def make_prompt(golden: dict[str, np.ndarray], name: str) -> dict[str, Any]:
    images = [Image.fromarray(golden[f"pixels_{index}"]) for index in golden[f"{name}_pictures"].tolist()]
    data = {"multi_modal_data": {"image": images}} if images else {}
    return {"prompt_token_ids": golden[f"{name}_ids"].tolist(), **data}


def generate(llm: LLM, golden: dict[str, np.ndarray], *names: str) -> list[int]:
    """Returns the cached tokens of each prompt."""
    outputs = llm.generate([make_prompt(golden, name) for name in names], GREEDY)
    for name, output in zip(names, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == golden[f"{name}_greedy"].tolist(), name
    return [output.num_cached_tokens or 0 for output in outputs]


def test_answers_are_those_of_transformers(llm: LLM, golden: dict[str, np.ndarray]) -> None:
    generate(llm, golden, *NAMES)  # beside each other, and cut
    for name in NAMES:
        llm.reset_prefix_cache()
        assert generate(llm, golden, name) == [0]
        length = len(golden[f"{name}_logits"])
        assert generate(llm, golden, name) == [32 * (length > 32)]  # of three images, a part of the last one


def test_preempted_prompts_are_computed_again(golden: dict[str, np.ndarray]) -> None:
    llm = LLM(**OPTIONS, max_num_batched_tokens=36, num_kv_pages_override=7)
    generate(llm, golden, *NAMES)
    assert llm.ready.engine.scheduler.counts.num_preemptions


def test_images_need_a_token_between_them(llm: LLM, golden: dict[str, np.ndarray]) -> None:
    prompt = make_prompt(golden, "first_and_last") | {"prompt_token_ids": [5, IMAGE, IMAGE, 7]}
    with pytest.raises(InvalidRequestError, match="two images without a token between them"):
        llm.generate([prompt], GREEDY)


def test_a_step_has_room_for_an_image_beside_all_rows() -> None:
    tower = read_tower("gemma3")
    wide = replace(tower, processor=replace(tower.processor, shape=replace(tower.processor.shape, num_tokens=64)))
    with pytest.raises(ConfigError, match=r"must be at least 104, got 103: .* 64 tokens .* max_num_seqs=40") as caught:
        make_images(make_sizes(40, 103), wide)
    assert caught.value.field == "max_num_batched_tokens"
    assert make_images(make_sizes(40, 104), wide).limits["whole_image_tokens"] == 64
    assert make_images(make_sizes(40, 103), replace(wide, mutual=None)).limits["whole_image_tokens"] == 0


def make_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> Any:
    scheduler = SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    return SimpleNamespace(config=SimpleNamespace(scheduler=scheduler), impl="xla", num_devices=1, platform="cpu")


def test_no_program_is_smaller_than_an_image() -> None:
    tower = replace(read_tower("gemma3"), max_patches=4096)
    assert Images(tower, "xla").sizes == (256, 512, 1024, 2048, 4096)
    large = replace(tower, processor=replace(tower.processor, shape=Gemma3Shape(896, 14, 256)))
    assert Images(large, "xla").sizes == (4096,)
    nine = replace(tower, processor=replace(tower.processor, shape=Gemma4Shape(280, 16, 3)), merge_size=3)
    assert Images(replace(nine, max_patches=2520), "xla").sizes == (648, 1296, 2520), "vectors of nine patches"
