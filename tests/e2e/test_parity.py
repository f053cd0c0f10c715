"""The engine against transformers: logits and greedy tokens, through pages, chunks and batches."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.families.registry import parse_config
from tests.e2e.engines import Engines
from tests.e2e.helpers import LogitsRecorder, generate_ids, greedy, make_llm
from tests.golden_cases import CASES, list_cases_with_legacy_config, load_case

RELATIVE = 1e-4  # of the case's largest logit


# One for each path through the engine. CI shows the others to the model functions only: tests/families/test_parity.py.
QUICK = ("llama_gqa", "gemma2")
THOROUGH = [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=THOROUGH) for name in CASES])
def test_engine_equals_transformers(name: str, engines: Engines) -> None:
    case = load_case(name)
    llm = engines.get(make_llm, name) if name in QUICK else make_llm(case)
    with LogitsRecorder(llm) as recorder:
        assert generate_ids(llm, case.prompts, greedy(64)) == [list(ids) for ids in case.greedy]
    worst = 0.0
    for prompt, positions, expected in zip(case.prompts, case.logit_positions, case.logits, strict=True):
        seen = [
            (p, row) for p, row in zip(positions, expected, strict=True) if (tuple(prompt), int(p)) in recorder.logits
        ]
        assert len(seen) >= 2, "the recorder saw too few of the golden positions"
        for position, row in seen:
            worst = max(worst, float(np.abs(recorder.logits[tuple(prompt), int(position)] - row).max()))
    assert worst <= RELATIVE * case.largest_logit


@pytest.mark.parametrize("name", list_cases_with_legacy_config())
def test_older_config_spelling_is_the_same_model(name: str) -> None:
    case = load_case(name)
    assert case.legacy_config is not None
    assert parse_config(case.legacy_config) == parse_config(case.config)


def test_portable_attention_gives_the_same_tokens() -> None:
    """A CPU has it where there is no C++ compiler."""
    case = load_case("gemma2")
    llm = make_llm(case, attention_impl="xla")
    assert llm.ready.shapes.impl == "xla" and llm.ready.shapes.model.few_rows == 0
    assert generate_ids(llm, case.prompts, greedy(64)) == [list(ids) for ids in case.greedy]
