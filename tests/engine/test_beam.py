"""Beam search against exhaustive search over a toy model of a few tokens."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from jaxserve.engine.beam import BeamSearchOutput, BeamSearchParams, BeamSearchSequence, decode_beams, search_beams
from jaxserve.errors import InvalidRequestError
from jaxserve.request import CompletionOutput, Logprob, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizers import load_tokenizer
from tests.tokenizers.builders import make_llama2

VOCAB, EOS = 4, 3


def next_logprobs(token_ids: list[int]) -> list[float]:
    """Any distribution that depends on the whole text."""
    weights = [1 + (7 * sum(token_ids) + 3 * len(token_ids) + 5 * token * token) % 11 for token in range(VOCAB)]
    return [math.log(weight / sum(weights)) for weight in weights]


def generate(prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    outputs = []
    for prompt in prompts:
        scores = next_logprobs(prompt)
        order = sorted(range(VOCAB), key=lambda token: -scores[token])[: params.logprobs]
        found = {token: Logprob(scores[token]) for token in order}
        outputs.append(RequestOutput("r", None, prompt, [CompletionOutput(0, "", order[:1], logprobs=[found])], True))
    return outputs


def search(prompts: list[list[int]], params: BeamSearchParams) -> list[BeamSearchOutput]:
    return search_beams(prompts, params, generate, [EOS], max_model_len=99)


def score_all(prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    """Every text of up to `length` tokens that ends at EOS or at the length, with its log-probability."""
    found = {}
    for size in range(1, length + 1):
        for text in itertools.product(range(VOCAB), repeat=size):
            if EOS in text[:-1] or (size < length and text[-1] != EOS):
                continue
            found[text] = sum(next_logprobs([*prompt, *text[:at]])[token] for at, token in enumerate(text))
    return found


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_wide_beam_finds_what_exhaustive_search_finds(penalty: float) -> None:
    exact = score_all([1, 2], 3)
    best = sorted(exact, key=lambda text: -exact[text] / len(text) ** penalty)
    (output,) = search([[1, 2]], BeamSearchParams(64, 3, length_penalty=penalty))
    found = [tuple(beam.token_ids) for beam in output.sequences]
    assert [exact[text] for text in found] == pytest.approx([exact[text] for text in best])
    for beam in output.sequences:
        assert beam.cum_logprob == pytest.approx(exact[tuple(beam.token_ids)])
        assert beam.finish_reason == ("stop" if beam.token_ids[-1] == EOS else "length")


def test_several_prompts_do_not_mix() -> None:
    params = BeamSearchParams(2, 4)
    together = search([[0], [1, 1], [2]], params)
    assert together == [search([prompt], params)[0] for prompt in ([0], [1, 1], [2])]
    assert all(len(output.sequences) == 2 for output in together)


def test_eos_may_be_ignored() -> None:
    (output,) = search([[0]], BeamSearchParams(3, 4, ignore_eos=True))
    assert all(len(beam.token_ids) == 4 and beam.finish_reason == "length" for beam in output.sequences)


def test_beams_end_where_the_context_does() -> None:
    def refuse(prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        assert all(len(prompt) < 6 for prompt in prompts)
        return generate(prompts, params)

    prompts, params = [[0], [1, 1, 1, 1], [1, 1, 1, 1, 1]], BeamSearchParams(3, 4, ignore_eos=True)
    found = search_beams(prompts, params, refuse, [EOS], max_model_len=6)
    assert [{len(beam.token_ids) for beam in output.sequences} for output in found] == [{4}, {2}, {1}]
    assert all(beam.finish_reason == "length" for output in found for beam in output.sequences)
    assert found[0] == search(prompts[:1], params)[0]


def test_texts_are_those_of_an_answer(tmp_path: Path) -> None:
    """Behind a prompt the first word keeps its space; the token that ends a beam has no text."""
    make_llama2(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids, end = tokenizer.encode("cat", False), tokenizer.encode("mat", False)[-1]
    beams = [BeamSearchSequence(ids, 0.0, "length"), BeamSearchSequence([*ids, end], 0.0, "stop")]
    for prompt in ("the", ""):
        before = tokenizer.encode(prompt)
        (found,) = decode_beams([BeamSearchOutput(beams)], [before], tokenizer)
        stream = tokenizer.new_stream(True, before)
        assert [beam.text for beam in found.sequences] == [stream.push_many(ids)] * 2
        assert found.sequences[0].text.startswith(" ") == bool(prompt)


@pytest.mark.parametrize("options", [{"beam_width": 0}, {"max_tokens": 1.5}, {"length_penalty": math.nan}])
def test_bad_values_name_the_field(options: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 2} | options))
    assert caught.value.field in options
