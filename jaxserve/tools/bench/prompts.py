"""The requests of each dataset, before they are cut to the model's length."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.dataset_options import DatasetOptions
from jaxserve.tools.bench.demo_questions import MAX_TOKENS, make_questions

if TYPE_CHECKING:
    from jaxserve.tokenizers import Tokenizer

_SHARED_IDS = 2**20  # the largest vocabulary whose ids are kept as a list
_FIRST_ID = 10  # the ids below are those of special tokens in most vocabularies


@dataclass(frozen=True)
class BenchRequest:
    """One request of a benchmark. It has a text, token ids, or both."""

    prompt_token_ids: tuple[int, ...] | None
    prompt: str | None
    num_prompt_tokens: int  # 0: a text, and nobody gave a tokenizer
    max_tokens: int
    arrival_time: float = 0.0  # seconds after the first; 0 in datasets without arrivals
    is_cut: bool = False  # its lengths did not fit the model


@dataclass(frozen=True)
class PromptMaker:
    """What datasets make prompts of: random token ids, or texts and a tokenizer."""

    rng: random.Random
    ids: Sequence[int]
    tokenizer: Tokenizer | None

    @classmethod
    def of(cls, seed: int, vocab_size: int, tokenizer: Tokenizer | None) -> PromptMaker:
        """Returns a maker of prompts in a vocabulary of so many ids."""
        ids: Sequence[int] = range(min(_FIRST_ID, vocab_size - 1), vocab_size)
        if vocab_size <= _SHARED_IDS:
            ids = list(ids)  # one object per id: long prompts share them
        return cls(random.Random(seed), ids, tokenizer)

    def draw(self, count: int) -> tuple[int, ...]:
        """Returns so many random token ids."""
        return tuple(self.rng.choices(self.ids, k=count))

    def of_ids(self, ids: tuple[int, ...], max_tokens: int, arrival_time: float = 0.0) -> BenchRequest:
        """Returns the request with these token ids."""
        return BenchRequest(ids, None, len(ids), max_tokens, arrival_time)

    def of_text(self, text: str, max_tokens: int) -> BenchRequest:
        """Returns the request with this text."""
        ids = None if self.tokenizer is None else tuple(self.tokenizer.encode(text))
        return BenchRequest(ids, text, len(ids or ()), max_tokens)


def make_random(options: DatasetOptions, make: PromptMaker) -> Iterator[BenchRequest]:
    """Yields random prompts with lengths around the given ones, behind one prefix."""
    prefix, ratio = make.draw(options.random_prefix_len), options.random_range_ratio

    def vary(length: int) -> int:
        return make.rng.randint(max(1, int(length * (1 - ratio))), int(length * (1 + ratio)))

    for _ in range(options.num_prompts):
        num_prompt, num_output = vary(options.random_input_len), vary(options.random_output_len)
        yield make.of_ids(prefix + make.draw(num_prompt), num_output)


def make_shared_prefixes(options: DatasetOptions, make: PromptMaker) -> Iterator[BenchRequest]:
    """Yields random prompts that begin with one of a few prefixes, in turn."""
    count = options.prefix_repetition_num_prefixes
    prefixes = [make.draw(options.prefix_repetition_prefix_len) for _ in range(count)]
    for index in range(options.num_prompts):
        suffix = make.draw(options.prefix_repetition_suffix_len)
        yield make.of_ids(prefixes[index % count] + suffix, options.prefix_repetition_output_len)


def make_excerpt(options: DatasetOptions, make: PromptMaker) -> Iterator[BenchRequest]:
    """Yields random prompts with the lengths and gaps of a public trace's excerpt, again and again if need be."""
    with files("jaxserve.tools.bench").joinpath("lengths", f"{options.name}.csv").open(encoding="utf-8") as file:
        rows = [(float(gap), int(prompt), int(output)) for gap, prompt, output in list(csv.reader(file))[1:]]
    found: list[tuple[float, int, int]] = []
    while len(found) < options.num_prompts:
        if not options.disable_shuffle:
            make.rng.shuffle(rows)
        found += rows
    found = found[: options.num_prompts]
    arrivals = accumulate((gap for gap, _, _ in found[1:]), initial=0.0)
    for arrival, (_, num_prompt, num_output) in zip(arrivals, found, strict=True):
        yield make.of_ids(make.draw(num_prompt), num_output, arrival)


def make_trace(options: DatasetOptions, make: PromptMaker) -> Iterator[BenchRequest]:
    """Yields the first requests of a trace. Prompts have equal ids where it says that their blocks are equal."""
    from jaxserve.tools.simulation.traces import MOONCAKE_BLOCK, read_trace

    try:
        trace = read_trace(str(options.dataset_path))
    except ConfigError as error:
        message = str(error).removeprefix(f"{error.field}: ")
        raise ConfigError(message, field="dataset_path", value=options.dataset_path) from error
    blocks: dict[int, tuple[int, ...]] = {}
    for each in trace[: options.num_prompts]:
        for block in each.blocks:
            if block not in blocks:
                blocks[block] = make.draw(MOONCAKE_BLOCK)
        shared = chain.from_iterable(blocks[block] for block in each.blocks)
        ids = tuple(islice(shared, each.num_prompt_tokens)) if each.blocks else make.draw(each.num_prompt_tokens)
        yield make.of_ids(ids, each.num_output_tokens, each.arrival_time)


def make_demo(options: DatasetOptions, make: PromptMaker) -> Iterator[BenchRequest]:
    """Yields questions for the demo model, as a conversation if the tokenizer has a template for it."""
    for question in make_questions(options.num_prompts, make.rng):
        if make.tokenizer is None or make.tokenizer.chat_template is None:
            yield make.of_text(question.text, MAX_TOKENS)
            continue
        from jaxserve.tokenizers.chat import encode_chat

        text, ids = encode_chat(make.tokenizer, [{"role": "user", "content": question.text}])
        yield BenchRequest(tuple(ids), text, len(ids), MAX_TOKENS)


def make_custom(options: DatasetOptions, make: PromptMaker) -> Iterator[BenchRequest]:
    """Yields the prompts of a file of JSON lines; at most as many as it has."""
    lines = [line for line in _read_file(options).splitlines() if line.strip()]
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            text = json.loads(line)["prompt"]
        except (ValueError, TypeError, KeyError):
            text = None
        if not isinstance(text, str) or not text:
            message = f'{options.dataset_path}, line {number}: needs a JSON object like {{"prompt": "text"}}'
            raise ConfigError(message, field="dataset_path", value=options.dataset_path)
        texts.append(text)
    for text in _choose(options, make, texts):
        yield make.of_text(text, options.custom_output_len)


def make_sharegpt(options: DatasetOptions, make: PromptMaker) -> Iterator[BenchRequest]:
    """Yields the first turns of conversations; answers may be as long as those in the file."""
    if make.tokenizer is None:
        message = "sharegpt's lengths are those of its texts, so it needs a tokenizer"
        raise ConfigError(message, field="dataset_name", value=options.name)
    try:
        turns = [each["conversations"][:2] for each in json.loads(_read_file(options)) if "conversations" in each]
        pairs = [(first["value"], second["value"]) for first, second in (turn for turn in turns if len(turn) > 1)]
    except (ValueError, TypeError, KeyError) as error:
        message = f"{options.dataset_path} is not ShareGPT's JSON: a list of objects with `conversations` ({error})"
        raise ConfigError(message, field="dataset_path", value=options.dataset_path) from error
    for question, answer in _choose(options, make, [pair for pair in pairs if all(pair)]):
        yield make.of_text(question, max(1, len(make.tokenizer.encode(answer, add_special_tokens=False))))


def _read_file(options: DatasetOptions) -> str:
    try:
        return Path(str(options.dataset_path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"{options.dataset_path} cannot be read: {error}"
        raise ConfigError(message, field="dataset_path", value=options.dataset_path) from error


def _choose[T](options: DatasetOptions, make: PromptMaker, found: list[T]) -> list[T]:
    """Returns as many as wanted, or all, in random order unless the user wants the file's."""
    if not found:
        message = f"{options.dataset_path} has no requests"
        raise ConfigError(message, field="dataset_path", value=options.dataset_path)
    if not options.disable_shuffle:
        make.rng.shuffle(found)
    return found[: options.num_prompts]


SOURCES: dict[str, Callable[[DatasetOptions, PromptMaker], Iterator[Any]]] = {
    "random": make_random,
    "azure-chat": make_excerpt,
    "azure-code": make_excerpt,
    "mooncake": make_excerpt,
    "trace": make_trace,
    "prefix_repetition": make_shared_prefixes,
    "demo": make_demo,
    "custom": make_custom,
    "sharegpt": make_sharegpt,
}
