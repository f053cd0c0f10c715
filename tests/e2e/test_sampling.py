"""Every sampling parameter through the whole engine: alone, mixed in a batch, and across preemptions."""

from __future__ import annotations

import numpy as np
import pytest
from jax.nn import log_softmax

from jaxserve import LLM, BeamSearchParams, LogitsProcessor, SamplingParams
from jaxserve.errors import InvalidRequestError, NoTokenLeftError
from jaxserve.request import RequestOutput
from tests.e2e.engines import Engines
from tests.e2e.helpers import LogitsRecorder, generate_ids, greedy, make_llm
from tests.golden_cases import load_case

CASE = "llama_gqa"
PROMPTS = [list(prompt) for prompt in load_case(CASE).prompts]
MIXED = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.4, presence_penalty=0.5),
    SamplingParams(temperature=1.1, seed=5, max_tokens=12, ignore_eos=True, frequency_penalty=1.0, top_k=40),
    SamplingParams(temperature=0.7, seed=6, max_tokens=12, ignore_eos=True, logit_bias={7: 5.0, 9: -100}),
    SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True, allowed_token_ids=list(range(50, 90))),
    SamplingParams(temperature=1.0, seed=8, max_tokens=12, min_tokens=6, stop_token_ids=list(range(100, 300))),
]


@pytest.fixture
def llm(engines: Engines) -> LLM:
    return engines.get(make_llm, CASE)


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams] | SamplingParams) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def test_a_mixed_batch_gives_each_request_what_it_gets_alone(llm: LLM) -> None:
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(MIXED))]
    together = run(llm, prompts, MIXED)
    for prompt, params, output in zip(prompts, MIXED, together, strict=True):
        (alone,) = run(llm, [prompt], [params])
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids, params


def test_constraints_hold(llm: LLM) -> None:
    plain, *_ = run(llm, PROMPTS[:1], greedy(12))
    favourite = plain.outputs[0].token_ids[0]
    (banned,) = run(llm, PROMPTS[:1], greedy(12, logit_bias={str(favourite): -100}))
    assert favourite not in banned.outputs[0].token_ids
    (only,) = run(llm, PROMPTS[:1], greedy(12, allowed_token_ids=[5, 6]))
    assert set(only.outputs[0].token_ids) <= {5, 6}
    stops = {"stop_token_ids": [favourite], "ignore_eos": True, "temperature": 0}
    (early,) = run(llm, PROMPTS[:1], SamplingParams(max_tokens=12, **stops))
    (late,) = run(llm, PROMPTS[:1], SamplingParams(max_tokens=12, min_tokens=4, **stops))
    assert len(early.outputs[0].token_ids) == 1 and early.outputs[0].stop_reason == favourite
    assert len(late.outputs[0].token_ids) >= 5 and favourite not in late.outputs[0].token_ids[:4]


def test_repetition_penalties_change_what_repeats(llm: LLM) -> None:
    plain, penalized = (
        run(llm, PROMPTS[:1], greedy(40, **options))[0].outputs[0].token_ids
        for options in ({}, {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 2.0})
    )
    assert len(set(penalized)) > len(set(plain)) or len(set(plain)) == 40


def test_contradictions_end_the_request_and_no_other(llm: LLM) -> None:
    params = greedy(4, allowed_token_ids=[5], logit_bias={5: -100})
    assert run(llm, PROMPTS[:1], params)[0].outputs[0].token_ids == [5] * 4, "a bias of -100 is no ban"
    none = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[5], min_tokens=2, stop_token_ids=[5])
    bad, good = run(llm, PROMPTS[:2], [none, greedy(4)])
    assert bad.outputs[0].finish_reason == "error" and isinstance(bad.error, NoTokenLeftError)
    assert good.outputs[0].token_ids == run(llm, PROMPTS[1:2], greedy(4))[0].outputs[0].token_ids


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    with LogitsRecorder(llm) as recorder:
        (output,) = run(llm, PROMPTS[:1], greedy(6, logprobs=3, temperature=0.8, seed=1, logit_bias={3: 2.0}))
    completion = output.outputs[0]
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids) == 6
    total = 0.0
    for index, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        exact = np.asarray(log_softmax(recorder.logits[tuple(PROMPTS[0]), len(PROMPTS[0]) - 1 + index]))
        likeliest = np.argsort(-exact, kind="stable")[:3].tolist()
        assert next(iter(found)) == token and set(found) == {token, *likeliest}
        for token_id, entry in found.items():
            assert entry.logprob == pytest.approx(exact[token_id], abs=1e-4)
            assert entry.rank == 1 + int(np.sum(exact > exact[token_id]))
        total += found[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_are_those_of_the_model_whatever_is_cached(llm: LLM) -> None:
    prompt = next(prompt for prompt in PROMPTS if len(prompt) > 40)
    params = greedy(1, prompt_logprobs=2)
    first, again = run(llm, [prompt], params)[0], run(llm, [prompt], params)[0]
    assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == len(prompt)
    for found, other, token in zip(first.prompt_logprobs[1:], again.prompt_logprobs[1:], prompt[1:], strict=True):
        assert found is not None and other is not None and token in found
        assert found[token].logprob == pytest.approx(other[token].logprob, abs=1e-5)
    # The score of a token given the text before it is that of generating it there.
    (scored,) = run(llm, [prompt[:-1]], greedy(1, logprobs=0, allowed_token_ids=[prompt[-1]]))
    generated = scored.outputs[0].logprobs[0][prompt[-1]].logprob
    assert first.prompt_logprobs[-1][prompt[-1]].logprob == pytest.approx(generated, abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, 64, 65, 129])
def test_prompts_are_scored_whatever_their_last_chunk_is(llm: LLM, length: int) -> None:
    """One token alone is a step of decoding rows, which scores no prompt: it has nothing after it to score."""
    (output,) = run(llm, [[5 + index % 60 for index in range(length)]], greedy(2, prompt_logprobs=0))
    assert output.error is None and output.prompt_logprobs is not None
    assert [found is None for found in output.prompt_logprobs] == [True] + [False] * (length - 1)


def test_all_logprobs_when_the_engine_allows_them(llm: LLM, engines: Engines) -> None:
    some, llm = llm, engines.get(make_llm, CASE, max_logprobs=-1)
    (output,) = run(llm, PROMPTS[:1], greedy(2, logprobs=-1))
    (found, _) = output.outputs[0].logprobs
    assert len(found) == llm.ready.shapes.model.vocab_size
    assert sum(np.exp(entry.logprob) for entry in found.values()) == pytest.approx(1, abs=1e-4)
    (scored,) = run(llm, PROMPTS[1:2], greedy(1, prompt_logprobs=3))
    assert scored.prompt_logprobs is not None and all(3 <= len(entry) <= 4 for entry in scored.prompt_logprobs[1:])
    with pytest.raises(InvalidRequestError, match=r"prompt_logprobs: .*at most 20.*got 21"):
        run(llm, PROMPTS[1:2], greedy(1, prompt_logprobs=21))
    with pytest.raises(InvalidRequestError, match=r"logprobs: .*at most 20.*got all"):
        run(some, PROMPTS[:1], greedy(2, logprobs=-1))


@pytest.mark.parametrize("caching", [True, False])
def test_completions_of_one_prompt_share_its_pages_and_differ(caching: bool, llm: LLM, engines: Engines) -> None:
    llm = llm if caching else engines.get(make_llm, CASE, enable_prefix_caching=False)
    prompt = (PROMPTS[0] * 20)[:100]
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=8, ignore_eos=True)
    computed_before = llm.ready.runner.counts.useful_tokens
    (output,) = run(llm, [prompt], params)
    computed = llm.ready.runner.counts.useful_tokens - computed_before
    assert [completion.index for completion in output.outputs] == [0, 1, 2] and output.finished
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert computed < 100 + 2 * (100 - 96 + 32) + 3 * 9, "all but the tail of the prompt is computed once"
    (alone,) = run(llm, [prompt], SamplingParams(temperature=1.0, seed=4, max_tokens=8, ignore_eos=True))
    assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    (repeated,) = run(llm, [prompt], params)
    assert [c.token_ids for c in repeated.outputs] == [c.token_ids for c in output.outputs]


def test_more_completions_than_rows_and_a_greedy_pair(llm: LLM) -> None:
    (output,) = run(llm, PROMPTS[:1], greedy(6, n=7))
    assert len(output.outputs) == 7 and len({tuple(c.token_ids) for c in output.outputs}) == 1


def test_preempted_rows_with_penalties_go_on_as_if_nothing_had_happened(llm: LLM, engines: Engines) -> None:
    params = greedy(90, frequency_penalty=0.7, repetition_penalty=1.2, logit_bias={11: 1.5})
    roomy = generate_ids(llm, PROMPTS[:3], params)
    tight = engines.get(make_llm, CASE, num_kv_pages_override=7, enable_prefix_caching=False)
    outputs = run(tight, PROMPTS[:3], params)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    assert [output.outputs[0].token_ids for output in outputs] == roomy


def test_truncated_prompts(llm: LLM) -> None:
    prompt = PROMPTS[0]
    (cut,) = run(llm, [prompt], greedy(4, truncate_prompt_tokens=3))
    assert cut.prompt_token_ids == prompt[-3:]
    (long,) = run(llm, [prompt * 300], greedy(1, truncate_prompt_tokens=-1))
    assert len(long.prompt_token_ids) == 159


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"logit_bias": {10**6: 1}}, "logit_bias"),
        ({"bad_words": ["x"]}, "bad_words"),
    ],
)
def test_what_this_model_cannot_do_is_refused_by_name(llm: LLM, options: dict, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        run(llm, PROMPTS[:1], greedy(1, **options))
    assert caught.value.field == field
    assert run(llm, PROMPTS[:1], greedy(2))[0].finished, "the engine is unharmed"


def test_a_processor_of_the_users_own_runs_where_it_is_asked_for(llm: LLM) -> None:
    processor = LogitsProcessor(lambda logits, given: logits.at[7].add(given["push"] - given["pull"]), ("push", "pull"))
    pushing = make_llm(CASE, logits_processor=processor)
    pushed, plain = run(pushing, PROMPTS[:2], [greedy(3, extra_args={"pull": 1.0, "push": 1e4}), greedy(3)])
    assert pushed.outputs[0].token_ids == [7, 7, 7]
    assert plain.outputs[0].token_ids == list(load_case(CASE).greedy[1][:3])
    with pytest.raises(InvalidRequestError, match=r"extra_args: must be push, pull, got \['push'\]"):
        run(pushing, PROMPTS[:1], greedy(1, extra_args={"push": 1.0}))
    with pytest.raises(InvalidRequestError, match="extra_args: this engine has no logits_processor"):
        run(llm, PROMPTS[:1], greedy(1, extra_args={"push": 1.0}))


def test_beam_search_finds_a_likelier_text_than_greedy(llm: LLM) -> None:
    prompt = {"prompt_token_ids": PROMPTS[0]}
    (found,) = llm.beam_search([prompt], BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True))
    (plain,) = run(llm, PROMPTS[:1], greedy(6, logprobs=0))
    best = found.sequences[0]
    assert len(best.token_ids) == 6 and best.cum_logprob >= plain.outputs[0].cumulative_logprob - 1e-4
    scores = [beam.cum_logprob for beam in found.sequences]
    assert scores == sorted(scores, reverse=True)
