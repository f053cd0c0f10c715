"""Drafters with weights change no token of any answer, and their drafts are as good as their states are true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.core.runtime.arguments import make_compiler
from jaxserve.core.sharding import make_mesh
from jaxserve.families.registry import parse_config
from jaxserve.request import RequestOutput
from pallas_kernels import gather_logical
from tests.e2e.drafters import Counter, Tally, compare
from tests.e2e.engines import Engines
from tests.e2e.helpers import greedy, make_demo, make_llm, run_on_devices
from tests.e2e.test_decode_steps import PROMPTS
from tests.e2e.test_fast_equals_slow import PARAMS
from tests.e2e.test_speculation import FEW_PAGES
from tests.e2e.test_speculation_text import ALWAYS, DEMO_HEAD, FORMS, list_prompts
from tests.families.naive import make_tensors
from tests.features.speculation.drafters import HEAD, MIMO, TARGET, make_head, make_mtp, write_files
from tests.golden_cases import load_case

QUESTIONS = [
    "What is a KV cache?",
    "Tell me a story about a king.",
    "What is 30 plus 80?",
    "Who are you?",
    "What is paged attention?",
    "Can you add 193 and 124?",
]
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]
TEXT_PARAMS = [
    SamplingParams(temperature=0, max_tokens=50, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=40, top_p=0.9, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=45, repetition_penalty=1.2, logprobs=2, ignore_eos=True),
    SamplingParams(seed=2, temperature=0.7, max_tokens=40, frequency_penalty=0.5, bad_words=["the"]),
    SamplingParams(temperature=0, max_tokens=60),
    SamplingParams(n=2, seed=3, max_tokens=30, prompt_logprobs=1),
]


@pytest.fixture
def plain(engines: Engines) -> LLM:
    return engines.get(make_demo)


@pytest.fixture(params=["greedy", pytest.param("probabilistic", marks=pytest.mark.thorough)])
def drafting(request: pytest.FixtureRequest, engines: Engines) -> LLM:
    """The demo model with its head, which drafts for every step without chunks."""
    return engines.get(make_demo, speculative_config={**DEMO_HEAD, **ALWAYS, "draft_sample_method": request.param})


def run(llm: LLM, inputs: Any, params: Any) -> tuple[list[RequestOutput], Tally]:
    """Answers prompts, or conversations."""
    counter = Counter(llm)
    outputs = ask(llm, inputs, params)
    llm.ready.engine.scheduler.pages.check()
    return outputs, counter.read()


def ask(llm: LLM, inputs: Any, params: Any) -> list[RequestOutput]:
    answer = llm.chat if isinstance(inputs[0], list) else llm.generate
    return answer(inputs, params, use_tqdm=False)


def test_the_demo_head(plain: LLM, drafting: LLM) -> None:
    found, tally = run(drafting, CHATS, TEXT_PARAMS)
    compare(found, ask(plain, CHATS, TEXT_PARAMS))
    assert tally.accepted > 0.5 * tally.drafts > 40
    prompts = list_prompts(len(FORMS))
    found, tally = run(drafting, prompts, FORMS)
    compare(found, ask(plain, prompts, FORMS))
    assert tally.accepted > 10


@pytest.mark.thorough
def test_few_pages(plain: LLM) -> None:
    """Preempted rows come back with the drafter's pages computed anew."""
    tight = make_demo(speculative_config={**DEMO_HEAD, **ALWAYS}, page_size=8, num_kv_pages_override=26)
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    found, tally = run(tight, CHATS, params)
    compare(found, ask(plain, CHATS, params))
    assert sum(output.metrics.num_preemptions for output in found if output.metrics) > 1
    assert tally.accepted > 0.5 * tally.drafts > 40


def test_a_prefix_hit_keeps_acceptance(drafting: LLM) -> None:
    """The second time most of a prompt is cached, in the drafter's layers, too."""
    turns = [{"role": "user", "content": "What is 30 plus 80?"}, {"role": "assistant", "content": "The sum = 110"}]
    chats = [[*turns * 3, *chat] for chat in CHATS]
    params = SamplingParams(temperature=0, max_tokens=60)
    shares, hits = [], []
    for _ in range(2):
        rounds = [run(drafting, [chat], params) for chat in chats]
        tallies = [tally for _, tally in rounds]
        shares.append(sum(each.accepted for each in tallies) / sum(each.drafts for each in tallies))
        hits.append([output.num_cached_tokens for (output,), _ in rounds])
        drafting.ready.engine.scheduler.pages.check()
    assert hits[0][0] == 0 and min(hits[1]) >= 64
    assert shares[1] >= 0.95 * shares[0] > 0.5


@pytest.mark.thorough
def test_a_head_follows_steps_of_every_kind(plain: LLM, drafting: LLM) -> None:
    """Chunks, plain steps and verify steps leave what one chunk of the whole text leaves: nothing missing, no guess."""
    prompt = plain.get_tokenizer().encode("Once upon a time there was a king who had three sons. " * 4)[:70]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (output,) = plain.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    text = [*prompt, *output.outputs[0].token_ids]
    whole = make_demo(speculative_config=DEMO_HEAD, max_num_batched_tokens=128, precompile_token_paddings=[128])
    expected = run_and_read(whole, text, 1)
    resting = make_demo(speculative_config=DEMO_HEAD | {"num_speculative_tokens_per_batch_size": [[1, 64, 0]]})
    for llm in (resting, drafting):
        found = run_and_read(llm, prompt, 40)
        for part, whole_part in zip(found, expected, strict=True):
            count = len(text) - 2  # the last token is not computed, and the entry before wants it
            np.testing.assert_allclose(part[:count], whole_part[:count], atol=1e-4)
            assert np.abs(part[:count]).max(axis=(1, 2)).min() > 0.1


def run_and_read(llm: LLM, prompt: list[int], max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a head's keys and values [L, K, H] of the only row that an empty engine has computed."""
    ready, params = llm.ready, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm.reset_prefix_cache()
    ready.runner.reset()
    llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    (head,) = [each.passes for each in make_compiler(ready.shapes, ready.plan, make_mesh(1)).programs.model.features]
    rows, cache = ready.runner.device.rows, ready.runner.device.cache
    row = int(np.argmax(rows.num_computed[: ready.shapes.state.padding_row]))
    pages, length = np.asarray(rows.page_table[head.groups[0], row]), int(rows.num_computed[row])
    return gather_logical(cache[-1], pages, length, head.shapes[0].spec, page_offset=head.layout.offsets[0])


@pytest.mark.parametrize("name", ["llama_gqa", pytest.param("gemma2", marks=pytest.mark.thorough)])
def test_a_model_that_drafts_for_itself_is_always_right(name: str, engines: Engines) -> None:
    """Greedily. Its pages are those of all layers, windows included."""
    config = {"method": "draft_model", "model": str(load_case(name).path), "num_speculative_tokens": 4, **ALWAYS}
    drafting, plain = make_llm(name, speculative_config=config, **FEW_PAGES), engines.get(make_llm, name)
    inputs = [{"prompt_token_ids": [token % 80 for token in prompt]} for prompt in PROMPTS]
    found, tally = run(drafting, inputs, greedy(41))
    compare(found, plain.generate(inputs, greedy(41), use_tqdm=False))
    assert tally.accepted == tally.drafts > 200
    alone, tally = run(drafting, inputs[:1], greedy(41))
    assert (tally.chains, tally.accepted) == (8, 32), "after the first token every run has five"
    compare(alone, found[:1])
    found, tally = run(drafting, inputs, PARAMS)
    compare(found, plain.generate(inputs, PARAMS, use_tqdm=False))
    assert 0 < tally.accepted < tally.drafts


def write_random(folder: Path, method: str) -> tuple[str, dict[str, Any]]:
    """Writes a target of random weights and its drafter; returns the former's folder and the options."""
    raw = (TARGET | {"num_hidden_layers": 4} if method == "eagle3" else MIMO) | {"max_position_embeddings": 160}
    tensors = make_tensors(parse_config(raw), seed=3) | (make_mtp() if method == "mtp" else {})
    config = {"method": method, "num_speculative_tokens": 4, **ALWAYS}
    if method == "eagle3":
        config["model"] = str(
            write_files(folder / "head", HEAD | {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, make_head())
        )
    return str(write_files(folder / "target", raw, tensors)), config


def make_random(target: str, **options: Any) -> LLM:
    return make_demo(target, skip_tokenizer_init=True, max_model_len=160, **FEW_PAGES, **options)


@pytest.mark.parametrize(
    ("method", "draws"),
    [
        ("eagle3", "greedy"),
        ("eagle3", "probabilistic"),
        ("mtp", "greedy"),
        ("mtp", "probabilistic"),
    ],
)
@pytest.mark.thorough
def test_random_heads(method: str, draws: str, tmp_path: Path) -> None:
    """Of 40 tokens the draft vocabulary has 24."""
    target, config = write_random(tmp_path, method)
    inputs = [{"prompt_token_ids": [token % 40 for token in prompt]} for prompt in PROMPTS]
    drafting = make_random(target, speculative_config=config | {"draft_sample_method": draws})
    found, tally = run(drafting, inputs, PARAMS)
    compare(found, ask(make_random(target), inputs, PARAMS))
    assert 0 < tally.accepted < tally.drafts and tally.chains > 30


_TP_SCRIPT = """
import json, sys
from tests.e2e.test_speculation_heads import *
target, config = json.loads(sys.argv[1])
drafting = make_random(target, speculative_config=config, tensor_parallel_size=4)
inputs = [{"prompt_token_ids": [token % 40 for token in prompt]} for prompt in PROMPTS]
found, tally = run(drafting, inputs, PARAMS)
print(json.dumps([[output.outputs[0].token_ids for output in found], [tally.chains, tally.accepted]]))
"""


@pytest.mark.thorough
def test_four_devices(tmp_path: Path) -> None:
    target, config = write_random(tmp_path, "eagle3")
    inputs = [{"prompt_token_ids": [token % 40 for token in prompt]} for prompt in PROMPTS]
    expected, tally = run(make_random(target, speculative_config=config), inputs, PARAMS)
    found, counts = run_on_devices(4, _TP_SCRIPT, json.dumps([target, config]))
    assert found == [output.outputs[0].token_ids for output in expected]
    assert counts == [tally.chains, tally.accepted]
