"""Shows on a device whether a request's tokens and log-probabilities depend on what runs beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from jaxserve.engine.build import ReadyEngine
from jaxserve.request import Request, RequestOutput, TokenLogprobs
from jaxserve.sampling_params import OutputKind, SamplingParams
from jaxserve.structured_params import StructuredOutputsParams

_ANSWER = 24  # tokens of a request under test
_LATEST = 12  # steps before a neighbour arrives
_FORCED = "the answer is (yes|no), and the reason for it is that"
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Probe:
    """A request under test; `make` returns it anew, with an id of its own."""

    name: str
    prompt: tuple[int, ...]
    make: Callable[[], Request]


@dataclass
class Comparison:
    """How the answers of one probe among others compare with its answer alone."""

    probe: Probe
    num_runs: int = 0
    num_neighbours: int = 0
    num_hits: int = 0  # runs with a cached prefix
    differences: list[str] = field(default_factory=list)  # of each run that differs, the first


@dataclass(frozen=True)
class _Sizes:
    longest: int  # tokens of a prompt
    rows: int
    vocab_size: int
    num_logprobs: int


def compare_neighbourhoods(ready: ReadyEngine, count: int, *, seed: int = 0) -> Iterator[list[Comparison]]:
    """Runs each probe alone, then the probes in turn among random requests, `count` times.

    Neighbours arrive in random steps, with prompts that are cut into chunks, that share a prefix with the probe or not,
    and with random parameters, grammars and `n`. The prefix cache is emptied before some runs. The engine must be idle.

    Yields:
        The comparisons so far, after each run; the same objects every time.
    """
    random, engine = Random(seed), ready.engine
    sizes = _find_sizes(ready)
    probes = _make_probes(ready, sizes, random)
    alone = {}
    for probe in probes:
        engine.scheduler.pages.drop_prefix_index()
        alone[probe.name] = _run_among(ready, probe.make(), [])
    comparisons = [Comparison(probe) for probe in probes]
    for run in range(count):
        comparison = comparisons[run % len(probes)]
        probe = comparison.probe
        if random.random() < 0.4:
            engine.scheduler.pages.drop_prefix_index()
        others = [
            (random.randrange(_LATEST), _make_neighbour(ready, sizes, probe, random))
            for _ in range(random.randint(1, sizes.rows + 2))
        ]
        output = _run_among(ready, probe.make(), others, delay=random.randrange(_LATEST))
        comparison.num_runs += 1
        comparison.num_neighbours += len(others)
        comparison.num_hits += output.num_cached_tokens > 0
        if (difference := find_difference(alone[probe.name], output)) is not None:
            comparison.differences.append(difference)
        yield comparisons


def find_difference(alone: RequestOutput, among: RequestOutput) -> str | None:
    """Returns where two outputs of a request first differ, in words; None: their bits are equal."""
    if alone.embedding != among.embedding:
        return "the embedding differs"
    pair = alone.prompt_logprobs or [], among.prompt_logprobs or []
    if (place := _find_place(*pair)) is not None:
        return f"the log-probabilities of prompt token {place} differ"
    for one, other in zip(alone.outputs, among.outputs, strict=True):
        where = f"completion {one.index}, token"
        if one.token_ids != other.token_ids:
            ids = list(zip(one.token_ids, other.token_ids, strict=False))
            place = next((index for index, (a, b) in enumerate(ids) if a != b), len(ids))
            return f"{where} {place} is another one"
        if (place := _find_place(one.logprobs or [], other.logprobs or [])) is not None:
            return f"{where} {place} has another log-probability"
    return None


def _find_place(one: Sequence[TokenLogprobs | None], other: Sequence[TokenLogprobs | None]) -> int | None:
    """Returns the first position whose log-probabilities differ; Python's floats hold the device's bits."""
    if len(one) != len(other):
        return min(len(one), len(other))
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def _find_sizes(ready: ReadyEngine) -> _Sizes:
    limits, most = ready.engine.scheduler.limits, ready.shapes.config.compile.max_logprobs
    longest = min(limits.max_model_len - _ANSWER - 1, 2 * limits.max_num_batched_tokens)
    num_logprobs = 5 if most < 0 else min(5, most)
    return _Sizes(max(1, longest), limits.max_num_seqs, ready.shapes.model.vocab_size, num_logprobs)


def _make_probes(ready: ReadyEngine, sizes: _Sizes, random: Random) -> list[Probe]:
    """Returns requests of every kind that a program of its own computes."""
    requests, logprobs = ready.requests, sizes.num_logprobs
    limits = ready.engine.scheduler.limits
    budget, edge = limits.max_num_batched_tokens, limits.chunk_edges[0]

    def make(name: str, length: int, **params: object) -> Probe:
        prompt = _draw_ids(random, sizes, length)
        options = {"max_tokens": _ANSWER, "ignore_eos": True, "seed": 7, "logprobs": logprobs} | params
        chosen = SamplingParams(**options, output_kind=OutputKind.FINAL_ONLY)
        return Probe(name, prompt, lambda: requests.make(prompt, chosen))

    probes = [
        make("greedy, in chunks", budget + edge // 2, temperature=0),
        make("n = 4, one token past the grid", 2 * edge + 1, n=4, top_p=0.9),
        make("penalties", 3 * edge, presence_penalty=0.5, repetition_penalty=1.2, top_k=50),
        make("log-probabilities of the prompt", 2 * edge - 3, prompt_logprobs=logprobs),
    ]
    embedded = _draw_ids(random, sizes, 2 * edge + 5)
    probes.append(Probe("embedding", embedded, lambda: requests.make_embedding(embedded)))
    if ready.tokenizer is not None:
        options = {"ignore_eos": False, "n": 2}
        probes.append(make("JSON", edge, structured_outputs=StructuredOutputsParams(json=_SCHEMA), **options))
        forced = StructuredOutputsParams(regex=_FORCED)
        probes.append(make("text forced by a grammar", edge + 3, structured_outputs=forced, logprobs=None, **options))
    return probes


def _make_neighbour(ready: ReadyEngine, sizes: _Sizes, probe: Probe, random: Random) -> Request:
    """Returns a random request, which may share a prefix with the probe or ask for the same."""
    shared = random.choice((0, 0, random.randint(0, len(probe.prompt)), len(probe.prompt)))
    length = max(1, int(math.exp(random.uniform(0, math.log(sizes.longest)))))
    prompt = (probe.prompt[:shared] + _draw_ids(random, sizes, length))[: sizes.longest]
    if random.random() < 0.1:
        return ready.requests.make_embedding(prompt)
    form = random.choice((None, None, {"json": _SCHEMA}, {"regex": _FORCED}, {"choice": ("yes", "no", "maybe")}))
    params = SamplingParams(
        n=random.choice((1, 1, 1, 2, 4)),
        temperature=random.choice((0, 0.7, 1.5)),
        top_p=random.choice((1.0, 0.8)),
        top_k=random.choice((0, 20)),
        frequency_penalty=random.choice((0.0, 0.0, 1.0)),
        seed=random.randrange(2**31),
        max_tokens=random.randint(1, 2 * _ANSWER),
        ignore_eos=form is None,
        logprobs=random.choice((None, sizes.num_logprobs)),
        prompt_logprobs=random.choice((None, None, None, sizes.num_logprobs)),
        structured_outputs=None if form is None or ready.tokenizer is None else StructuredOutputsParams(**form),
        output_kind=OutputKind.FINAL_ONLY,
    )
    return ready.requests.make(prompt, params)


def _draw_ids(random: Random, sizes: _Sizes, length: int) -> tuple[int, ...]:
    return tuple(random.randrange(sizes.vocab_size) for _ in range(min(length, sizes.longest)))


def _run_among(
    ready: ReadyEngine, probe: Request, others: Sequence[tuple[int, Request]], delay: int = 0
) -> RequestOutput:
    """Returns the probe's output. Every request arrives in its step, or at once while nothing runs."""
    engine = ready.engine
    arrivals = sorted([*others, (delay, probe)], key=lambda arrival: arrival[0])
    step, found = 0, None
    try:
        while found is None:
            while arrivals and (arrivals[0][0] <= step or not engine.has_unfinished):
                engine.add_request(arrivals.pop(0)[1])
            for output in engine.step():
                if output.request_id == probe.request_id:
                    found = output
            step += 1
    finally:
        engine.abort_all()
        engine.drain()
    if found.error is not None:
        raise found.error
    return found
