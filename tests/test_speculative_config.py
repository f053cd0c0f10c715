"""The keys of speculative_config: what is read, what each method's defaults are, what is refused and how."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.runtime.identity import list_chosen_options
from jaxserve.errors import ConfigError
from jaxserve.option_flags import read_object
from jaxserve.options import list_tables, read_options
from jaxserve.speculative_config import METHODS, SpeculativeConfig, read_speculative_config

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SUFFIX = {"method": "suffix"}
EAGLE = {"method": "eagle3", "num_speculative_tokens": 3, "model": "head"}
MTP = {"method": "mtp", "num_speculative_tokens": 1}
LAST = 2**31 - 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (NGRAM, SpeculativeConfig("ngram", 3, prompt_lookup_min=5, prompt_lookup_max=5)),
        (
            NGRAM | {"prompt_lookup_max": 4},
            SpeculativeConfig("ngram", 3, prompt_lookup_min=4, prompt_lookup_max=4),
        ),
        (
            NGRAM | {"prompt_lookup_min": 2},
            SpeculativeConfig("ngram", 3, prompt_lookup_min=2, prompt_lookup_max=2),
        ),
        (
            NGRAM | {"prompt_lookup_min": 1, "prompt_lookup_max": 4, "model": "[ngram]", "quantization": None},
            SpeculativeConfig("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=4),
        ),
        (
            {"model": "ngram", "num_speculative_tokens": 3},
            SpeculativeConfig("ngram", 3, prompt_lookup_min=5, prompt_lookup_max=5),
        ),
        (
            {"method": "ngram_gpu", "num_speculative_tokens": 3},
            SpeculativeConfig("ngram", 3, prompt_lookup_min=5, prompt_lookup_max=5),
        ),
        (SUFFIX, SpeculativeConfig("suffix", 8)),
        (
            SUFFIX | {"suffix_decoding_max_spec_factor": 2, "suffix_decoding_max_cached_requests": 0},
            SpeculativeConfig("suffix", 8, suffix_decoding_max_spec_factor=2, suffix_decoding_max_cached_requests=0),
        ),
        (EAGLE, SpeculativeConfig("eagle3", 3, model="head")),
        (
            {"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 2},
            SpeculativeConfig("eagle3", 2, model="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        ),
        (
            EAGLE | {"draft_sample_method": "probabilistic", "rejection_sample_method": "standard"},
            SpeculativeConfig("eagle3", 3, model="head", draft_sample_method="probabilistic"),
        ),
        (MTP | {"method": "mimo_mtp"}, SpeculativeConfig("mtp", 1)),
        (EAGLE | {"method": "draft_model"}, SpeculativeConfig("draft_model", 3, model="head")),
        (
            EAGLE | {"disable_padded_drafter_batch": True, "parallel_drafting": False},
            SpeculativeConfig("eagle3", 3, "head"),
        ),
        (
            MTP
            | {
                "num_speculative_tokens": 4,
                "num_speculative_tokens_per_batch_size": [[1, 4, 4], [9, 16, 2], [17, 17, 0]],
            },
            SpeculativeConfig("mtp", 4, num_speculative_tokens_per_batch_size=((1, 8, 4), (9, 16, 2), (17, LAST, 0))),
        ),
    ],
)
def test_keys_are_read(given: dict[str, Any], expected: SpeculativeConfig) -> None:
    found = read_speculative_config(given)
    assert found == expected and hash(found) == hash(expected)
    assert read_speculative_config(found) == found, "a config reads as itself"
    assert read_speculative_config(found.to_dict()) == found
    assert found.has_weights == (found.method in ("eagle3", "mtp", "draft_model"))


@pytest.mark.parametrize(
    ("given", "key", "message"),
    [
        ([], "", "must be a table of keys"),
        ("ngram", "", "must be a table of keys"),
        ({"num_speculative_tokens": 3}, "method", "ngram, suffix, eagle3, mtp, draft_model"),
        ({"model": "small", "num_speculative_tokens": 3}, "method", "must be given: ngram"),
        (
            NGRAM | {"method": "medusa"},
            "method",
            "ngram, suffix, eagle3, mtp, draft_model, got 'medusa'",
        ),
        (NGRAM | {"method": ["ngram"]}, "method", "must be one of"),
        (NGRAM | {"num_speculative_token": 3}, "num_speculative_token", "'num_speculative_tokens'"),
        (NGRAM | {"zzz": 3}, "zzz", "method, "),
        ({"method": "ngram"}, "num_speculative_tokens", "'ngram'"),
        ({"method": "mtp"}, "num_speculative_tokens", "'mtp'"),
        (NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens", "at least 1, got 0"),
        (NGRAM | {"num_speculative_tokens": True}, "num_speculative_tokens", "an integer"),
        (NGRAM | {"num_speculative_tokens": "3"}, "num_speculative_tokens", "an integer of at least 1, got '3'"),
        (NGRAM | {"prompt_lookup_min": 0}, "prompt_lookup_min", "at least 1"),
        (NGRAM | {"prompt_lookup_max": 2.5}, "prompt_lookup_max", "an integer"),
        (
            NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "prompt_lookup_min",
            "at most prompt_lookup_max=4, got 5",
        ),
        (NGRAM | {"model": "small"}, "model", "'eagle3' and 'draft_model'.*'ngram'"),
        (NGRAM | {"draft_sample_method": "greedy"}, "draft_sample_method", "'eagle3' and 'mtp'"),
        (NGRAM | {"suffix_decoding_max_tree_depth": 24}, "suffix_decoding_max_tree_depth", "'suffix'"),
        (SUFFIX | {"prompt_lookup_min": 1}, "prompt_lookup_min", "'ngram'.*'suffix'"),
        (SUFFIX | {"suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth", "at least 1"),
        (SUFFIX | {"suffix_decoding_max_cached_requests": -1}, "suffix_decoding_max_cached_requests", "at least 0"),
        (SUFFIX | {"suffix_decoding_corpus_tokens": 0}, "suffix_decoding_corpus_tokens", "at least 1"),
        (
            SUFFIX | {"suffix_decoding_corpus_tokens": 9, "suffix_decoding_max_cached_requests": 0},
            "suffix_decoding_corpus_tokens",
            "suffix_decoding_max_cached_requests=0",
        ),
        (SUFFIX | {"suffix_decoding_max_spec_factor": 0}, "suffix_decoding_max_spec_factor", "above 0"),
        (SUFFIX | {"suffix_decoding_max_spec_factor": float("inf")}, "suffix_decoding_max_spec_factor", "above 0"),
        (SUFFIX | {"suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob", r"in \[0, 1\]"),
        (
            SUFFIX | {"suffix_decoding_min_token_prob": float("nan")},
            "suffix_decoding_min_token_prob",
            r"in \[0, 1\]",
        ),
        (EAGLE | {"model": None}, "model", "checkpoint.*'eagle3', got None"),
        (EAGLE | {"model": 3}, "model", "checkpoint"),
        (EAGLE | {"draft_sample_method": "gumbel"}, "draft_sample_method", "'greedy' or 'probabilistic'"),
        (EAGLE | {"rejection_sample_method": "block"}, "rejection_sample_method", "'standard', got 'block'"),
        (EAGLE | {"parallel_drafting": True}, "parallel_drafting", "drafts are chains of single tokens"),
        (EAGLE | {"draft_tensor_parallel_size": 1}, "draft_tensor_parallel_size", "must be that of the target"),
        (EAGLE | {"quantization": "fp8"}, "quantization", "quantized drafters are not read"),
        (EAGLE | {"enforce_eager": "yes"}, "enforce_eager", "true or false, got 'yes'"),
        (EAGLE | {"max_model_len": 2048}, "max_model_len", "up to the target's max_model_len"),
        (MTP | {"model": "head"}, "model", "whose head is in the target's own checkpoint"),
    ],
)
def test_refusals_name_the_key(given: Any, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_speculative_config(given)
    assert caught.value.field == (f"speculative_config.{key}" if key else "speculative_config")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], r"a list of \[from, to, drafts\], got \[\]"),
        ("1", "a list of"),
        ([[1, 4]], r"got \[1, 4\] in it"),
        ([[1, 4, 2.0]], "in it"),
        ([[2, 4, 3]], r"\[2, 4, 3\] must begin at 1"),
        ([[1, 4, 3], [4, 8, 2]], r"\[4, 8, 2\] must begin above 4"),
        ([[1, 4, 3], [9, 8, 2]], "must ascend"),
        ([[1, 4, 4]], "0 to num_speculative_tokens=3"),
        ([[1, 4, -1]], "0 to num_speculative_tokens=3"),
    ],
)
def test_refused_tables_of_batch_sizes(table: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_speculative_config(NGRAM | {"num_speculative_tokens_per_batch_size": table})
    assert caught.value.field == "speculative_config.num_speculative_tokens_per_batch_size"


def test_a_config_made_by_hand_is_checked_as_well() -> None:
    made = SpeculativeConfig("ngram", 0, prompt_lookup_min=2, prompt_lookup_max=3)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        EngineConfig.from_options(speculative_config=made)
    with pytest.raises(ConfigError, match="belongs to 'eagle3'"):
        read_speculative_config(SpeculativeConfig("suffix", 3, model="head"))


@pytest.mark.parametrize("name", ["speculative_config", "sc"])
def test_the_option_of_the_engine(name: str) -> None:
    config = EngineConfig.from_options(**{name: NGRAM})
    assert config.speculation.speculative_config == read_speculative_config(NGRAM)
    assert EngineConfig.from_options(**{name: None}) == EngineConfig()
    assert EngineConfig().speculation.speculative_config is None


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"deterministic": True}, "deterministic"),
        ({"max_decode_steps": 4}, "max_decode_steps=4"),
    ],
)
def test_what_excludes_drafts(other: dict[str, Any], message: str) -> None:
    for name in ("speculative_config", "sc"):
        with pytest.raises(ConfigError, match=message) as caught:
            EngineConfig.from_options(**{name: NGRAM}, **other)
        assert caught.value.field == name


def test_a_drafter_is_split_as_its_target() -> None:
    for size, options in ((1, {}), (2, {"tp": 2}), (2, {"tensor_parallel_size": 2})):
        split = EAGLE | {"draft_tensor_parallel_size": size}
        config = EngineConfig.from_options(speculative_config=split, **options)
        assert config.speculation.speculative_config == read_speculative_config(EAGLE)
    with pytest.raises(ConfigError, match="must be that of the target") as caught:
        EngineConfig.from_options(speculative_config=EAGLE | {"draft_tensor_parallel_size": 1}, tp=2)
    assert caught.value.field == "speculative_config.draft_tensor_parallel_size"


@pytest.mark.parametrize(
    "text",
    [
        'max_num_seqs = 3\nspeculative_config = {method = "ngram", num_speculative_tokens = 3}\n',
        'max_num_seqs = 3\n[speculative_config]\nmethod = "ngram"\nnum_speculative_tokens = 3\n',
        '[scheduler]\nmax_num_seqs = 3\n[speculation.sc]\nmethod = "ngram"\nnum_speculative_tokens = 3\n',
    ],
)
def test_tables_in_a_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "options.toml").write_text(text)
    options = read_options(tmp_path / "options.toml", list_tables(EngineConfig))
    config = EngineConfig.from_options(**options)
    assert config.speculation.speculative_config == read_speculative_config(NGRAM)
    assert config.scheduler.max_num_seqs == 3


def test_flags_are_json() -> None:
    assert read_object('{"method": "suffix"}') == SUFFIX
    for text in ("", "ngram", "[1]", "3", "{"):
        with pytest.raises(Exception, match="must be a JSON object"):
            read_object(text)


def test_a_recording_has_what_makes_the_same_config() -> None:
    for given in (NGRAM, SUFFIX, EAGLE, MTP):
        config = EngineConfig.from_options(speculative_config=given)
        chosen = list_chosen_options(config)
        assert EngineConfig.from_options(**chosen) == config
        assert isinstance(chosen["speculative_config"], dict)


@pytest.mark.docs
def test_the_page_has_every_key_and_method_and_its_examples_are_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "speculation.md").read_text()
    tables = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    for name in (*METHODS, *(f.name for f in fields(SpeculativeConfig))):
        assert f"`{name}`" in tables, name
    flags = re.findall(r"--speculative-config '(.*?)'", page)
    assert [read_speculative_config(read_object(text)).method for text in flags] == ["ngram", "eagle3"]
    (tmp_path / "options.toml").write_text(re.findall(r"```toml\n(.*?)```", page, flags=re.S)[0])
    options = read_options(tmp_path / "options.toml", list_tables(EngineConfig))
    assert EngineConfig.from_options(**options).speculation.speculative_config is not None
    table = json.loads(re.findall(r"`(\[\[1, .*?)`", page)[0])
    config = NGRAM | {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": table}
    assert read_speculative_config(config).num_speculative_tokens_per_batch_size is not None
