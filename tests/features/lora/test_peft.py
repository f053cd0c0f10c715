"""Adapters that PEFT itself has written, against what PEFT answers with them (`scripts/make_lora_goldens.py`)."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve import LoRARequest
from tests.e2e.helpers import LogitsRecorder, greedy, make_llm
from tests.golden_cases import GOLDENS

FOLDERS = sorted(path.name for path in (GOLDENS / "lora").iterdir())


@pytest.mark.parametrize("name", [FOLDERS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FOLDERS[1:])])
def test_logits_and_tokens_are_those_of_peft(name: str):
    folder = GOLDENS / "lora" / name
    golden = np.load(folder / "golden.npz")
    prompt, base = golden["prompt"].tolist(), str(golden["base"])
    llm = make_llm(base, enable_lora=True)
    adapter = LoRARequest(name, 1, str(folder))
    with LogitsRecorder(llm) as recorder:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], greedy(16), lora_request=adapter, use_tqdm=False)
    logits = recorder.logits[tuple(prompt), len(prompt) - 1]
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4 * abs(golden["logits"]).max())
    assert output.outputs[0].token_ids == golden["greedy"].tolist()
    (plain,) = llm.generate([{"prompt_token_ids": prompt}], greedy(16), use_tqdm=False)
    assert plain.outputs[0].token_ids != golden["greedy"].tolist(), "the adapter changes nothing"
