"""Which file is taken, and what is said about missing, truncated and malformed ones."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import TokenizerError
from jaxserve.tokenizers import load_tokenizer
from jaxserve.tokenizers.huggingface import HuggingFaceTokenizer
from jaxserve.tokenizers.sentencepiece import SentencePieceTokenizer
from tests.tokenizers import builders


def test_tokenizer_json_is_taken_first(tmp_path: Path) -> None:
    builders.make_sentencepiece(tmp_path)
    assert isinstance(load_tokenizer(tmp_path), SentencePieceTokenizer)
    builders.make_byte_level(tmp_path)
    assert isinstance(load_tokenizer(str(tmp_path)), HuggingFaceTokenizer)
    assert isinstance(load_tokenizer(tmp_path / "tokenizer.model"), SentencePieceTokenizer)


def test_a_single_model_file_of_any_name(tmp_path: Path) -> None:
    builders.make_sentencepiece(tmp_path)
    (tmp_path / "tokenizer.model").rename(tmp_path / "spiece.model")
    assert isinstance(load_tokenizer(tmp_path), SentencePieceTokenizer)
    (tmp_path / "other.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"other\.model, spiece\.model"):
        load_tokenizer(tmp_path)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="does not exist"):
        load_tokenizer(tmp_path / "nothing")
    (tmp_path / "vocab.txt").write_text("a")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path / "vocab.txt")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "{}", '{"model": 1}', "[" * 100_000, '{"version": "1.0", "model": null}']
)
def test_malformed_tokenizer_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.field == "tokenizer.json"
    assert len(str(caught.value)) < 1000


def test_truncated_and_mutated_tokenizer_json(tmp_path: Path) -> None:
    builders.make_llama3(tmp_path)
    path = tmp_path / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    rng = random.Random(0)
    for _ in range(40):
        path.write_text(text[: rng.randrange(len(text))], encoding="utf-8")
        with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
            load_tokenizer(tmp_path)
    outcomes = set()
    for _ in range(150):
        path.write_text(json.dumps(mutate(json.loads(text), rng)), encoding="utf-8")
        try:
            load_tokenizer(tmp_path).encode("hello 日 <|im_end|>")
            outcomes.add("loads")
        except TokenizerError:
            outcomes.add("refused")
    assert outcomes == {"loads", "refused"}


def mutate(value: Any, rng: random.Random) -> Any:
    """Replaces one part of a JSON value by something else."""
    node = value
    while True:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if not node[key] or not isinstance(node[key], dict | list) or rng.random() < 0.3:
            node[key] = rng.choice([None, -1, 2**40, "", [], {}, "x", True, 1.5])
            return value
        node = node[key]


def test_invalid_utf8(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json"),
        ("tokenizer_config.json", {"bos_token": 5}, "bos_token"),
        ("tokenizer_config.json", {"eos_token": ["</s>"]}, "eos_token"),
        ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token"),
        ("tokenizer_config.json", {"tokenizer_class": 1}, "tokenizer_class"),
        ("tokenizer_config.json", {"chat_template": 1}, "chat_template"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "chat_template"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": 1}]}, "chat_template"),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": 1}]},
            "chat_template",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"-1": {"content": "a"}}}, "added_tokens_decoder"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9999999999": {"content": "a"}}}, "added_tokens_decoder"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"400": {"content": ""}}}, "added_tokens_decoder"),
        ("tokenizer_config.json", {"additional_special_tokens": "<a>"}, "additional_special_tokens"),
        ("added_tokens.json", {"<a>": "b"}, "added_tokens.json"),
        ("added_tokens.json", {"<a>": True}, "added_tokens.json"),
        ("special_tokens_map.json", "nonsense", "special_tokens_map.json"),
        ("generation_config.json", {"eos_token_id": "2"}, None),
        ("generation_config.json", {"eos_token_id": [2, -1]}, "eos_token_id"),
        ("generation_config.json", {"eos_token_id": [2.5]}, "eos_token_id"),
        ("config.json", {"eos_token_id": True}, "eos_token_id"),
    ],
)
def test_malformed_companions(tmp_path: Path, name: str, content: Any, named: str | None) -> None:
    for make in (builders.make_sentencepiece, builders.make_byte_level):
        directory = tmp_path / make.__name__
        directory.mkdir()
        make(directory)
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
        if named is None:
            assert load_tokenizer(directory).eos_token_ids[-1] == 2
            continue
        with pytest.raises(TokenizerError) as caught:
            load_tokenizer(directory)
        assert caught.value.field == named


def test_eos_falls_back_to_the_model_config(tmp_path: Path) -> None:
    builders.make_byte_level(tmp_path)
    builders.write_json(tmp_path / "config.json", {"eos_token_id": [7, 8], "hidden_size": 64})
    assert load_tokenizer(tmp_path).eos_token_ids == (7, 8)
    builders.write_json(tmp_path / "generation_config.json", {"eos_token_id": 9})
    assert load_tokenizer(tmp_path).eos_token_ids == (9,)


@pytest.mark.parametrize(
    ("config", "file", "expected"),
    [
        ("plain", None, "plain"),
        ([{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}], None, "b"),
        ([{"name": "rag", "template": "a"}], None, None),
        ("plain", "from file", "from file"),
        (None, "from file", "from file"),
        (None, None, None),
    ],
)
def test_where_the_chat_template_is(tmp_path: Path, config: Any, file: str | None, expected: str | None) -> None:
    builders.make_byte_level(tmp_path)
    builders.write_json(tmp_path / "tokenizer_config.json", {"chat_template": config})
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file)
    assert load_tokenizer(tmp_path).chat_template == expected


def test_import_is_light() -> None:
    code = "import sys, jaxserve.tokenizers, jaxserve.tokenizers.chat; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "jaxserve.tokenizers" in names
    assert {"jax", "numpy", "tokenizers", "sentencepiece", "jinja2"}.isdisjoint(names)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"])
def test_fifos_and_large_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    builders.make_byte_level(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(TokenizerError, match=f"{re.escape(str(tmp_path / name))}: .*FIFO"):
        load_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**27 + 1)
    with pytest.raises(TokenizerError, match=r"134,217,729 bytes.*at most (128|16) MiB") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.field == name


@pytest.mark.parametrize("given", ["the directory", "the file"])
def test_a_sentencepiece_model_that_is_a_fifo_is_refused(tmp_path: Path, given: str) -> None:
    os.mkfifo(tmp_path / "tokenizer.model")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model: .*FIFO"):
        load_tokenizer(tmp_path if given == "the directory" else tmp_path / "tokenizer.model")


def test_files_of_a_hub_cache_are_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    builders.make_byte_level(blobs)
    (snapshot / "tokenizer.json").symlink_to("../blobs/tokenizer.json")
    assert load_tokenizer(snapshot).encode("the cat") == load_tokenizer(blobs).encode("the cat")


def test_line_endings_of_a_template_are_newlines(tmp_path: Path) -> None:
    builders.make_byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"a\r\nb\rc\n")
    assert load_tokenizer(tmp_path).chat_template == "a\nb\nc\n"
