"""`.model` files: ids and text are sentencepiece's own, plus BOS and the tokens of the files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.tokenizers import Tokenizer, load_tokenizer
from tests.examples import scale_examples
from tests.tokenizers import builders

LIMITS = settings(max_examples=scale_examples(120), deadline=None)
TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \nabé日▁")), max_size=30)


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": True},
        {"model_type": "unigram", "vocab_size": 310, "remove_extra_whitespaces": True, "add_dummy_prefix": False},
        {"user_defined_symbols": ["<|im_start|>", "\n"], "pad_id": 3},
    ],
    ids=lambda options: ",".join(options) or "default",
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    directory = tmp_path_factory.mktemp("model")
    model = builders.make_sentencepiece(directory, **request.param)
    return load_tokenizer(directory), model


@LIMITS
@given(text=TEXT)
def test_encode_equals_the_library(pair: tuple[Tokenizer, Any], text: str) -> None:
    tokenizer, model = pair
    assert tokenizer.encode(text) == [model.bos_id(), *model.encode(text)]
    assert tokenizer.encode(text, add_special_tokens=False) == model.encode(text)


@LIMITS
@given(data=st.data())
def test_decode_equals_the_library(pair: tuple[Tokenizer, Any], data: st.DataObject) -> None:
    tokenizer, model = pair
    ordinary = [token_id for token_id in range(model.get_piece_size()) if token_id not in tokenizer.special_ids]
    byte_ids = [token_id for token_id in ordinary if model.is_byte(token_id)]
    one_id = st.sampled_from(ordinary) | st.sampled_from(byte_ids)
    one_id |= st.sampled_from([token_id for token_id in ordinary if "▁" in model.id_to_piece(token_id)])
    ids = data.draw(st.lists(one_id, max_size=20))
    assert tokenizer.decode(ids, True) == model.decode(ids)


def test_digits_and_bytes(sentencepiece_dir: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_dir)
    assert len(tokenizer.encode("1234", add_special_tokens=False)) == 5  # the leading space, then digit by digit
    assert tokenizer.decode(tokenizer.encode("日😀"), True) == "日😀"


def test_attributes(sentencepiece_dir: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_dir)
    special = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|im_start|>": 3, "<|im_end|>": 4}
    assert tokenizer.special_tokens == special
    assert tokenizer.special_ids == set(special.values())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (4,))
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    assert tokenizer.decode([1, 0, 4], True) == "" and tokenizer.decode([1, 0, 4], False) == "<s><unk><|im_end|>"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "bos"),
        ({"add_bos_token": True, "add_eos_token": True}, "bos eos"),
        ({"add_bos_token": False}, ""),
        ({"add_bos_token": None, "add_eos_token": False}, "bos"),
    ],
)
def test_bos_and_eos(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    model = builders.make_sentencepiece(tmp_path)
    builders.write_json(tmp_path / "tokenizer_config.json", config)
    ids = load_tokenizer(tmp_path).encode("hello")
    assert ids == [1] * ("bos" in expected) + model.encode("hello") + [2] * ("eos" in expected)


def test_a_model_without_bos(tmp_path: Path) -> None:
    model = builders.make_sentencepiece(tmp_path, bos_id=-1)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("hello") == model.encode("hello")


def test_special_tokens_are_split_out_where_allowed(sentencepiece_dir: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_dir)
    model = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_dir / "tokenizer.model"))
    text = "<|im_start|>user\nthe cat<|im_end|>"
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert plain == model.encode(text) and tokenizer.special_ids.isdisjoint(plain)
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=True)
    assert (ids[0], ids[-1]) == (3, 4)
    assert model.decode(ids[1:-1]) == "user\nthe cat"
    assert not model.id_to_piece(ids[1]).startswith("▁")  # a continuation has no space of its own
    assert tokenizer.encode("<s>", allow_special=True, add_special_tokens=False) == [1]
    assert tokenizer.encode("the<|im_end|>", False, allow_special=True) == [*model.encode("the"), 4]


def test_legacy_text_after_a_special_token_starts_with_a_space(tmp_path: Path) -> None:
    model = builders.make_sentencepiece(tmp_path, control_symbols=["<|im_start|>"])
    builders.write_json(tmp_path / "tokenizer_config.json", {"legacy": True})
    ids = load_tokenizer(tmp_path).encode("<|im_start|>the", False, allow_special=True)
    assert ids == [3, *model.encode("the")]


def test_escaped_special_tokens_stay_text(sentencepiece_dir: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_dir)
    ids = tokenizer.encode("<|im_start|>a<!|im_end|>b<|im_end|>", False, allow_special=True, escape="!")
    assert [token_id for token_id in ids if token_id in tokenizer.special_ids] == [3, 4]
    assert tokenizer.decode(ids, True) == "a<|im_end|>b"


def test_added_tokens(tmp_path: Path) -> None:
    model = builders.make_sentencepiece(tmp_path)
    size = model.get_piece_size()
    builders.write_json(tmp_path / "added_tokens.json", {"<|im_end|>": size + 1, "<|im_start|>": size})
    builders.write_json(tmp_path / "special_tokens_map.json", {"eos_token": "<|im_end|>"})
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (size + 2, (size + 1,))
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", False, allow_special=True)
    assert (ids[0], ids[-1], tokenizer.decode(ids, True)) == (size, size + 1, "hi")
    assert tokenizer.encode("<|im_end|>", False) == model.encode("<|im_end|>")


def test_flags_of_added_tokens(tmp_path: Path) -> None:
    model = builders.make_sentencepiece(tmp_path)
    size = model.get_piece_size()
    entries = {
        str(size): {"content": "<tool>", "special": False},
        str(size + 2): {"content": "<both>", "special": True, "lstrip": True, "rstrip": True},
    }
    builders.write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": entries})
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a<tool>b", False)  # no special token: found in any text
    assert size in ids and tokenizer.decode(ids, True) == "a<tool>b"
    ids = tokenizer.encode("a \n<both>  b", False, allow_special=True)
    assert ids == [*model.encode("a"), size + 2, *tokenizer.encode("<s>b", False, allow_special=True)[1:]]
    assert tokenizer.decode([size + 1], True) == ""  # between the two: an id without a token


def test_symbols_that_the_model_finds_by_itself(tmp_path: Path) -> None:
    """A user-defined symbol is found in any text; declared special, it must not be."""
    builders.make_sentencepiece(tmp_path, user_defined_symbols=["<|im_end|>", "<|x|>"])
    tokenizer = load_tokenizer(tmp_path)
    symbol = tokenizer.encode("<|im_end|>", False)[-1]
    assert tokenizer.decode([symbol], True) == "<|im_end|>"
    builders.write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == (symbol,)
    ids = tokenizer.encode("a<|im_end|><|x|><|im_end|>", False)
    assert symbol not in ids and tokenizer.decode(ids, True) == "a<|im_end|><|x|><|im_end|>"
    assert tokenizer.encode("<|im_end|>", False, allow_special=True) == [symbol]


def test_a_symbol_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    builders.make_sentencepiece(tmp_path, user_defined_symbols=["☂"])
    builders.write_json(tmp_path / "tokenizer_config.json", {"eos_token": "☂"})
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(InvalidRequestError, match="☂"):
        tokenizer.encode("rain ☂")


@pytest.mark.parametrize("data", [b"", b"\0", b"{}", b"IQ== 0\nIg== 1\n", b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x7f"])
def test_files_that_are_no_models(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model.*tiktoken"):
        load_tokenizer(tmp_path)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    builders.make_sentencepiece(tmp_path)
    path = tmp_path / "tokenizer.model"
    data = path.read_bytes()
    for size in {*range(0, len(data), 97), *range(len(data) - 120, len(data))}:
        path.write_bytes(data[:size])
        with pytest.raises(TokenizerError, match=r"tokenizer\.model"):
            load_tokenizer(tmp_path)


@settings(max_examples=scale_examples(40), deadline=None)
@given(data=st.binary(max_size=200))
def test_garbage_raises_nothing_else(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("garbage") / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(TokenizerError):
        load_tokenizer(path)
