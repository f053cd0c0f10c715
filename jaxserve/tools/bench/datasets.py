"""The requests of a benchmark: options in, `BenchRequest`s out. Equal options and seeds make equal requests."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxserve.tools.bench.dataset_options import DATASETS, DatasetOptions, add_dataset_flags, read_options
from jaxserve.tools.bench.prompts import SOURCES, BenchRequest, PromptMaker

if TYPE_CHECKING:
    from jaxserve.tokenizers import Tokenizer

__all__ = [
    "DATASETS",
    "BenchRequest",
    "DatasetOptions",
    "add_dataset_flags",
    "make_requests",
    "read_dataset_options",
]


def read_dataset_options(args: argparse.Namespace) -> DatasetOptions:
    """Returns the options of the flags. A trace is read once for its faults, before anything slow.

    Raises:
        ConfigError: a value is wrong, a flag is of another dataset, a file is missing, or a trace empty or malformed.
    """
    options = read_options(args)
    if options.name == "trace":
        make_requests(options, vocab_size=2)
    return options


def make_requests(
    options: DatasetOptions, *, vocab_size: int, tokenizer: Tokenizer | None = None, max_model_len: int | None = None
) -> list[BenchRequest]:
    """Returns the requests of a dataset, by arrival.

    Args:
        vocab_size: random token ids are below it.
        tokenizer: for datasets of texts, whose requests have no token ids without it.
        max_model_len: prompt and answer are cut to it together, and `is_cut` says so; None: nothing is cut.

    Raises:
        ConfigError: the dataset's file is missing, empty or malformed, or the dataset needs a tokenizer.
    """
    made = SOURCES[options.name](options, PromptMaker.of(options.seed, vocab_size, tokenizer))
    return [request if max_model_len is None else fit(request, max_model_len) for request in made]


def fit(request: BenchRequest, max_model_len: int) -> BenchRequest:
    """Returns a request that fits: its prompt is cut, to no less than half of the room, then its answer."""
    num_prompt, ids = request.num_prompt_tokens, request.prompt_token_ids
    if num_prompt + request.max_tokens <= max_model_len:
        return request
    kept = min(num_prompt, max(max_model_len - request.max_tokens, max_model_len // 2))
    return replace(
        request,
        prompt_token_ids=None if ids is None else ids[:kept],
        prompt=request.prompt if kept == num_prompt else None,
        num_prompt_tokens=kept,
        max_tokens=min(request.max_tokens, max_model_len - kept),
        is_cut=True,
    )
