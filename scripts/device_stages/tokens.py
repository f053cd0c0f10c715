"""Greedy tokens of a few layers of an 8B model by the kernels, and by XLA in their place.

Random weights leave the likeliest tokens close together, so rounding may choose another one. A first difference is
rounding where its margin, between the two likeliest tokens, is no larger than what the log-probabilities of equal
tokens differ by.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from device_stages.engines import make_engine
from device_stages.items import Context, Item
from device_stages.results import Line
from jaxserve import SamplingParams

LAYERS = 4
LENGTHS, TINY_LENGTHS = (5, 63, 64, 65, 200, 517, 900, 1500), (5, 40)  # of prompts; the longest come in chunks
NEW_TOKENS, TINY_NEW_TOKENS = 64, 4
MOST_DIFFERENCE = 0.1  # nats that the same token's log-probability may differ by
LEAST_MARGIN, MARGIN_FACTOR = 0.05, 4.0


@dataclass(frozen=True)
class Answer:
    """Tokens, their log-probabilities, and how far the second likeliest token is behind the likeliest, in nats."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]


def list_items(context: Context) -> Iterator[Item]:
    yield Item(f"{LAYERS} layers", partial(compare_engines, context))


def compare_engines(context: Context) -> Line:
    """Answers the same prompts in two engines; returns how their tokens compare."""
    answers, impls = [], []
    for options in ({}, {"attention_impl": "xla"}):
        found, impl = generate(context, **options)
        answers.append(found)
        impls.append(impl)
    return {**compare(*answers), "impls": impls}


def generate(context: Context, **options: str) -> tuple[list[Answer], str]:
    """Returns the answers of an engine, and its attention."""
    lengths, new = (TINY_LENGTHS, TINY_NEW_TOKENS) if context.tiny else (LENGTHS, NEW_TOKENS)
    budget = 64 if context.tiny else 512
    llm = make_engine(
        context,
        LAYERS,
        max_num_seqs=len(lengths),
        max_num_batched_tokens=budget,
        max_model_len=256 if context.tiny else 2048,
        precompile_bs_paddings=(len(lengths),),
        precompile_token_paddings=(budget,),
        kv_cache_memory_bytes=10**9,
        **options,
    )
    rng, vocab_size = random.Random(0), llm.ready.shapes.model.vocab_size
    prompts = [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=new, logprobs=2, ignore_eos=True, detokenize=False)
    answers = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        chosen = output.outputs[0]
        ranked = [sorted((each.logprob for each in tokens.values()), reverse=True) for tokens in chosen.logprobs]
        logprobs = tuple(tokens[token].logprob for tokens, token in zip(chosen.logprobs, chosen.token_ids, strict=True))
        answers.append(Answer(tuple(chosen.token_ids), logprobs, tuple(first - second for first, second, *_ in ranked)))
    return answers, llm.ready.shapes.impl


def compare(found: Sequence[Answer], expected: Sequence[Answer]) -> Line:
    """Compares answers token by token up to the first difference of each."""
    differences, first, same, total = [0.0], {}, 0, 0
    for row, (left, right) in enumerate(zip(found, expected, strict=True)):
        total += len(right.token_ids)
        for at, token in enumerate(right.token_ids):
            if left.token_ids[at] != token:
                first[f"row {row}, token {at}"] = right.margins[at]
                break
            same += 1
            differences.append(abs(left.logprobs[at] - right.logprobs[at]))
    most = float(np.max(differences))  # NaN if one is
    bound = max(LEAST_MARGIN, MARGIN_FACTOR * most)
    faults = [f"{where} has a margin of {margin:.3g}" for where, margin in first.items() if not margin <= bound]
    if not most <= MOST_DIFFERENCE:
        faults.append(f"log-probabilities differ by {most:.3g}")
    line: Line = {"ok": not faults, "largest_logprob_difference": most, "tokens": total, "equal_before_first": same}
    line["margins_of_first_differences"] = first
    return line | {"error": "; ".join(faults)} if faults else line
