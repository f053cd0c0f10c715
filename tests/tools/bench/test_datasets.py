"""Each dataset makes the requests that its flags say, and bad input is one clear error."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, quantiles

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from excerpt_traces import TRACES as EXCERPTS
from excerpt_traces import make_excerpt

from jaxserve.errors import ConfigError
from jaxserve.tokenizers import Tokenizer, load_tokenizer
from jaxserve.tools.bench.datasets import (
    BenchRequest,
    DatasetOptions,
    add_dataset_flags,
    make_requests,
    read_dataset_options,
)
from jaxserve.tools.simulation.traces import read_trace

ROOT = Path(__file__).parents[3]
TRACES = ROOT.parent / "shared" / "traces"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ROOT / "jaxserve" / "demo")


def make(
    name: str, length: int | None = None, tokenizer: Tokenizer | None = None, **options: object
) -> list[BenchRequest]:
    return make_requests(DatasetOptions(name, **options), vocab_size=100, tokenizer=tokenizer, max_model_len=length)


def read(*flags: str) -> DatasetOptions:
    parser = argparse.ArgumentParser()
    add_dataset_flags(parser)
    return read_dataset_options(parser.parse_args(flags))


def ids(request: BenchRequest) -> Sequence[int]:
    assert request.prompt_token_ids is not None and len(request.prompt_token_ids) == request.num_prompt_tokens
    return request.prompt_token_ids


def test_random_lengths_lie_around_those_given_behind_one_prefix() -> None:
    found = make(
        "random",
        num_prompts=200,
        random_input_len=20,
        random_output_len=10,
        random_range_ratio=0.5,
        random_prefix_len=5,
    )
    assert {len(ids(each)) for each in found} == set(range(15, 36))
    assert {each.max_tokens for each in found} == set(range(5, 16))
    assert len({ids(each)[:5] for each in found}) == 1 and len({ids(each)[5:] for each in found}) == 200
    assert all(10 <= token < 100 for each in found for token in ids(each))
    assert found == make(
        "random",
        num_prompts=200,
        random_input_len=20,
        random_output_len=10,
        random_range_ratio=0.5,
        random_prefix_len=5,
    )
    fixed = make("random", num_prompts=3, random_input_len=7, random_output_len=4, seed=1)
    assert {(len(ids(each)), each.max_tokens, each.arrival_time) for each in fixed} == {(7, 4, 0.0)}


def test_prompts_share_the_prefixes_in_turn() -> None:
    options = {
        "prefix_repetition_prefix_len": 8,
        "prefix_repetition_suffix_len": 4,
        "prefix_repetition_num_prefixes": 3,
    }
    found = make("prefix_repetition", num_prompts=9, prefix_repetition_output_len=6, **options)
    prefixes = [ids(each)[:8] for each in found]
    assert len(set(prefixes)) == 3 and prefixes[:3] == prefixes[3:6] == prefixes[6:]
    assert {len(ids(each)) for each in found} == {12} and {each.max_tokens for each in found} == {6}


def list_lengths(requests: Sequence[BenchRequest]) -> list[tuple[int, int]]:
    return [(each.num_prompt_tokens, each.max_tokens) for each in requests]


@pytest.mark.parametrize("name", EXCERPTS)
def test_excerpts_give_lengths_and_arrivals(name: str) -> None:
    found, other = make(name, num_prompts=40, seed=3), make(name, num_prompts=40, seed=4)
    assert found == make(name, num_prompts=40, seed=3) and list_lengths(found) != list_lengths(other)
    assert found[0].arrival_time == 0
    assert [each.arrival_time for each in found] == sorted(each.arrival_time for each in found)
    in_order = make(name, num_prompts=40, disable_shuffle=True, seed=8)
    assert list_lengths(in_order) == read_excerpt(name)[:40]


def test_all_rows_of_an_excerpt_come_before_one_comes_again() -> None:
    found = list_lengths(make("azure-chat", num_prompts=700))
    assert sorted(found[:500]) == sorted(read_excerpt("azure-chat")) and len(found) == 700


def read_excerpt(name: str) -> list[tuple[int, int]]:
    with (ROOT / "jaxserve" / "tools" / "bench" / "lengths" / f"{name}.csv").open() as file:
        return [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]


@pytest.mark.parametrize("name", EXCERPTS)
def test_excerpts_are_like_the_traces(name: str) -> None:
    path = TRACES / EXCERPTS[name]
    if not path.exists():
        pytest.skip("the public traces are not in ../shared/traces")
    trace, rows = read_trace(path), read_excerpt(name)
    assert make_excerpt(trace) == (ROOT / "jaxserve" / "tools" / "bench" / "lengths" / f"{name}.csv").read_text()
    whole = [[each.num_prompt_tokens for each in trace], [each.num_output_tokens for each in trace]]
    for all_lengths, sampled in zip(whole, zip(*rows, strict=True), strict=True):
        assert mean(sampled) == pytest.approx(mean(all_lengths), rel=0.03)
        for bound in quantiles(all_lengths, n=20):
            shares = [sum(length <= bound for length in lengths) / len(lengths) for lengths in (all_lengths, sampled)]
            assert shares[1] == pytest.approx(shares[0], abs=0.04), bound


def test_a_trace_shares_ids_where_it_shares_blocks(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 1500, "input_length": 700, "output_length": 6, "hash_ids": [7, 9]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = make("trace", dataset_path=str(path), disable_shuffle=False)
    assert (len(ids(first)), len(ids(second))) == (1000, 700)
    assert ids(first)[:512] == ids(second)[:512] and ids(first)[512:700] != ids(second)[512:]
    assert (first.arrival_time, second.arrival_time, second.max_tokens) == (0.0, 0.5, 6)
    assert len(make("trace", dataset_path=str(path), num_prompts=1)) == 1


def test_texts_of_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "Once upon a time"}\n\n{"prompt": "What is prefill?"}\n')
    found = make("custom", tokenizer=tokenizer, dataset_path=str(path), disable_shuffle=True, custom_output_len=9)
    assert [each.prompt for each in found] == ["Once upon a time", "What is prefill?"]
    assert list(ids(found[0])) == tokenizer.encode("Once upon a time") and found[0].max_tokens == 9
    (without, _) = make("custom", dataset_path=str(path), disable_shuffle=True)
    assert without.prompt_token_ids is None and without.num_prompt_tokens == 0
    talks = [
        {
            "conversations": [
                {"from": "human", "value": "Tell me a story."},
                {"from": "gpt", "value": "Once upon a time"},
            ]
        },
        {"conversations": [{"from": "human", "value": "alone"}]},
    ]
    path.write_text(json.dumps(talks))
    (found_talk,) = make("sharegpt", tokenizer=tokenizer, dataset_path=str(path))
    assert found_talk.prompt == "Tell me a story." and found_talk.max_tokens == len(ids(found[0])) - 1


def test_the_demo_model_gets_its_questions(tokenizer: Tokenizer) -> None:
    found = make("demo", tokenizer=tokenizer, num_prompts=8)
    assert all(each.prompt is not None and each.max_tokens == 128 for each in found)
    assert any("story" in str(each.prompt) for each in found) and len({ids(each) for each in found}) > 5
    assert not DatasetOptions("demo").ignores_eos and DatasetOptions("demo", ignore_eos=True).ignores_eos
    assert DatasetOptions("random").ignores_eos


def test_what_does_not_fit_is_cut_and_says_so() -> None:
    lengths = {"random_input_len": 100, "random_output_len": 50, "num_prompts": 1}
    (whole,) = make("random", 150, **lengths)
    assert not whole.is_cut
    (cut,) = make("random", 120, **lengths)
    assert cut.is_cut and (cut.num_prompt_tokens, cut.max_tokens) == (70, 50)
    assert ids(cut) == ids(whole)[:70]
    (cut,) = make("random", 60, **lengths)
    assert (len(ids(cut)), cut.max_tokens) == (30, 30)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--dataset-name", "imagenet"), "dataset_name: there is no dataset 'imagenet'; there are random, azure-chat"),
        (("--dataset-name", "custom"), "dataset_path: custom is read from a file"),
        (("--num-prompts", "0"), "num_prompts: must be at least 1, got 0"),
        (("--random-range-ratio", "1"), "random_range_ratio: must be at least 0 and below 1"),
        (("--ignore-eos",), "ignore_eos: is for --dataset-name demo, custom, sharegpt; this is random"),
        (("--dataset-name", "demo", "--random-input-len", "5"), "random_input_len: is for --dataset-name random"),
    ],
)
def test_wrong_flags_are_one_clear_error(flags: Sequence[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*flags)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["trace", "custom", "sharegpt"])
@pytest.mark.parametrize("text", [None, "", "[]", "nonsense"])
def test_missing_and_empty_files_are_named(name: str, text: str | None, tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "file"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)) as caught:
        make(name, tokenizer=tokenizer, dataset_path=str(path))
    assert caught.value.field == "dataset_path"
    if name == "trace":  # which needs no tokenizer, so its faults show before anything slow
        with pytest.raises(ConfigError, match=str(path)):
            read("--dataset-name", name, "--dataset-path", str(path))


def test_flags_become_options(tmp_path: Path) -> None:
    assert read() == DatasetOptions()
    path = tmp_path / "x"
    path.write_text('{"prompt": "Hello"}')
    found = read(
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(path),
        "--custom-output-len",
        "3",
        "--seed",
        "4",
        "--ignore-eos",
    )
    assert found == DatasetOptions("custom", dataset_path=str(path), custom_output_len=3, seed=4, ignore_eos=True)


def test_ids_are_drawn_of_a_vocabulary_of_any_size() -> None:
    options = DatasetOptions("random", num_prompts=2, random_input_len=5, random_output_len=1)
    first, second = make_requests(options, vocab_size=10**9)
    ids = (first.prompt_token_ids or ()) + (second.prompt_token_ids or ())
    assert len(ids) == 10 and all(0 <= each < 10**9 for each in ids)


def test_a_trace_with_impossible_times_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("gap_seconds,prompt_tokens,output_tokens\nnan,1,1\n")
    with pytest.raises(ConfigError, match=r"^dataset_path: .*line 2: a time must be"):
        make_requests(DatasetOptions("trace", dataset_path=str(path)), vocab_size=9)
