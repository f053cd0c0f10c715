"""What `tokenizers` raises, bare exceptions and panics of Rust, becomes an error that names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from jaxserve.engine.logprobs import LogprobReader
from jaxserve.engine.prompts import RequestFactory
from jaxserve.errors import InvalidRequestError, TokenizerError, is_failure
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizers import load_tokenizer
from tests.tokenizers import builders


class PanicException(BaseException):
    """As pyo3 defines it in each library."""


def panic(*_args: Any, **_options: Any) -> Any:
    raise PanicException("index out of bounds")


def make_panicking(directory: Path) -> None:
    """A tokenizer that cannot encode words it lacks, and whose decoder panics at a token shorter than what it cuts."""
    library = Tokenizer(models.WordLevel({"": 0, "hello": 1}, unk_token="<none>"))
    library.decoder = decoders.Strip("a", 1, 1)
    library.save(str(directory / "tokenizer.json"))
    content = json.loads((directory / "tokenizer.json").read_text())
    content["added_tokens"] = [
        {"id": 2, "content": "a", "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": False}
    ]
    builders.write_json(directory / "tokenizer.json", content)


def test_what_is_a_failure(tmp_path: Path) -> None:
    make_panicking(tmp_path)
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BaseException, match="index out of bounds") as caught:
        library.decode([0])
    assert not isinstance(caught.value, Exception) and is_failure(caught.value)
    assert is_failure(ValueError()) and is_failure(PanicException())
    assert not any(map(is_failure, (KeyboardInterrupt(), SystemExit(), GeneratorExit())))


def test_the_library_fails(tmp_path: Path) -> None:
    make_panicking(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("hello") == [1] and tokenizer.decode([1]) == "hello"
    with pytest.raises(InvalidRequestError, match=r"token_ids: .*PanicException.*index out of bounds"):
        tokenizer.decode([1, 0])
    with pytest.raises(InvalidRequestError, match=r"prompt: .*UNK"):
        tokenizer.encode("world")


def test_encoding_panics(llama3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = load_tokenizer(llama3)
    monkeypatch.setattr(tokenizer, "_encode_plain", panic)
    factory = RequestFactory(tokenizer, vocab_size=400, eos_token_ids=(), seed=0, max_model_len=64, max_logprobs=5)
    params = SamplingParams(max_tokens=1)
    for fail in (
        lambda: tokenizer.encode("hello"),
        lambda: factory.make("hello", params),
        lambda: factory.make_chat([{"role": "user", "content": "<|im_end|>"}], params),
        lambda: factory.make({"prompt_token_ids": [5]}, SamplingParams(max_tokens=1, bad_words=["hello"])),
    ):
        with pytest.raises(InvalidRequestError, match="index out of bounds") as caught:
            fail()
        assert caught.value.field == "prompt"
    assert factory.make({"prompt_token_ids": [5]}, params).prompt_token_ids == (5,)


def test_an_interrupt_stays_one(llama3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = load_tokenizer(llama3)

    def interrupt(_text: str) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "_encode_plain", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("hello")


def test_loading_panics(llama3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.tokenizers.huggingface._read_affixes", panic)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json.*index out of bounds"):
        load_tokenizer(llama3)


def test_log_probabilities_of_a_token_without_text(tmp_path: Path) -> None:
    """They are read on the engine's thread, which a panic would end."""
    make_panicking(tmp_path)
    reader = LogprobReader(load_tokenizer(tmp_path))
    found = reader.read(np.array([[-2.0, -1.0]]), 0, 1, 2)
    assert {token_id: each.decoded_token for token_id, each in found.items()} == {1: "hello", 0: None}
