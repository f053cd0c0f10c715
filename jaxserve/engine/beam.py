"""Beam search, on top of one-token requests.

Each step asks the engine for one token per beam, with the log-probabilities of the likeliest tokens; beams share their
common prefix in the prefix cache. A beam's score is its sum of log-probabilities / length ** length_penalty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxserve.engine.request_options import spread_options
from jaxserve.errors import InvalidRequestError, TokenizerError, shorten
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine.prompt_forms import Prompt
    from jaxserve.engine.prompts import RequestFactory
    from jaxserve.tokenizers import Tokenizer

Generate = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """The options of a beam search (vLLM's names).

    Raises:
        InvalidRequestError: a value is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0  # above 1 favours longer texts

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidRequestError(f"must be an integer of at least 1, got {shorten(value)}", field=name)
        if not isinstance(self.length_penalty, int | float) or not -10 <= self.length_penalty <= 10:
            message = f"must be a number in [-10, 10], got {shorten(self.length_penalty)}"
            raise InvalidRequestError(message, field="length_penalty", value=self.length_penalty)


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One beam."""

    token_ids: list[int]  # without the prompt; includes the EOS that ended it
    cum_logprob: float
    finish_reason: str | None = None  # stop, length; None while it grows
    text: str = ""

    def score(self, length_penalty: float) -> float:
        """Returns the sum of log-probabilities / length ** length_penalty, by which beams are ranked."""
        return self.cum_logprob / max(1, len(self.token_ids)) ** length_penalty


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def find_beams(
    requests: RequestFactory,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    run: Callable[[list[Request]], list[RequestOutput]],
    options: Mapping[str, Any],
    max_model_len: int,
) -> tuple[list[BeamSearchOutput], list[list[int]]]:
    """Returns the beams of every prompt, and the prompts' token ids; `run` runs requests to their end.

    `options` are those of `RequestFactory.make`, and so are the errors.
    """
    plain = SamplingParams(max_tokens=params.max_tokens, output_kind=OutputKind.FINAL_ONLY)
    each = spread_options(options, len(prompts))
    made = [requests.make(prompt, plain, **own) for prompt, own in zip(prompts, each, strict=True)]
    if any(request.images is not None for request in made):
        raise InvalidRequestError("is not read by a beam search; leave it out", field="multi_modal_data")
    texts, found = [list(request.prompt_token_ids) for request in made], dict[int, BeamSearchOutput]()
    by_adapter: dict[Any, list[int]] = {}
    for index, own in enumerate(each):
        by_adapter.setdefault(own.get("lora_request"), []).append(index)
    for indices in by_adapter.values():
        same = each[indices[0]]

        def generate(
            token_ids: list[list[int]], step: SamplingParams, same: Mapping[str, Any] = same
        ) -> list[RequestOutput]:
            return run([requests.make({"prompt_token_ids": ids}, step, **same) for ids in token_ids])

        prompts_of = [texts[index] for index in indices]
        ends = made[0].eos_token_ids
        outputs = search_beams(prompts_of, params, generate, ends, max_model_len=max_model_len)
        found |= zip(indices, outputs, strict=True)
    return [found[index] for index in range(len(texts))], texts


def search_beams(
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    generate: Generate,
    eos_token_ids: Sequence[int],
    *,
    max_model_len: int,
) -> list[BeamSearchOutput]:
    """Returns the `beam_width` best beams of every prompt; `generate` runs one request per list of token ids.

    Beams that fill the model's context end with "length", as at `max_tokens`. The error of an output is raised.
    """
    step = SamplingParams(
        temperature=0,
        max_tokens=1,
        ignore_eos=True,  # the search itself ends a beam at EOS
        logprobs=2 * params.beam_width,
        detokenize=False,
        output_kind=OutputKind.FINAL_ONLY,
    )
    ends = set() if params.ignore_eos else set(eos_token_ids)
    growing = [[BeamSearchSequence([], 0.0)] for _ in prompts]
    done: list[list[BeamSearchSequence]] = [[] for _ in prompts]
    for length in range(params.max_tokens):
        # The first step takes every prompt, so that too long ones are refused.
        fits = [length == 0 or len(prompt) + length < max_model_len for prompt in prompts]
        active = [index for index, beams in enumerate(growing) if beams and fits[index]]
        if not active:
            break
        texts = [[*prompts[index], *beam.token_ids] for index in active for beam in growing[index]]
        outputs = iter(generate(texts, step))
        for index in active:
            grown = [longer for beam in growing[index] for longer in _grow(beam, next(outputs), ends)]
            grown.sort(key=lambda beam: -beam.cum_logprob)
            done[index] += [beam for beam in grown[: 2 * params.beam_width] if beam.finish_reason]
            growing[index] = [beam for beam in grown if beam.finish_reason is None][: params.beam_width]
    for index, beams in enumerate(growing):
        done[index] += [replace(beam, finish_reason="length") for beam in beams]
        done[index].sort(key=lambda beam: -beam.score(params.length_penalty))
    return [BeamSearchOutput(beams[: params.beam_width]) for beams in done]


def decode_beams(
    found: Sequence[BeamSearchOutput], prompts: Sequence[list[int]], tokenizer: Tokenizer
) -> list[BeamSearchOutput]:
    """Returns the outputs with the text of each beam: what `generate` gives for the same tokens behind its prompt."""
    return [
        BeamSearchOutput([replace(beam, text=_decode(beam, prompt, tokenizer)) for beam in output.sequences])
        for output, prompt in zip(found, prompts, strict=True)
    ]


def _decode(beam: BeamSearchSequence, prompt: list[int], tokenizer: Tokenizer) -> str:
    token_ids = beam.token_ids[:-1] if beam.finish_reason == "stop" else beam.token_ids  # EOS has no text
    try:
        stream = tokenizer.new_stream(True, prompt)
    except TokenizerError:  # the decoder needs the whole text
        return tokenizer.decode(token_ids, skip_special_tokens=True)
    return stream.push_many(token_ids) + stream.flush()


def _grow(beam: BeamSearchSequence, output: RequestOutput, ends: set[int]) -> list[BeamSearchSequence]:
    """Returns the beam extended by each of its likeliest next tokens."""
    if output.error is not None:
        raise output.error
    completion = output.outputs[0]
    assert completion.logprobs  # it has made a token
    return [
        BeamSearchSequence(
            [*beam.token_ids, token_id], beam.cum_logprob + entry.logprob, "stop" if token_id in ends else None
        )
        for token_id, entry in completion.logprobs[0].items()
    ]
