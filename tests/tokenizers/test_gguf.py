"""Tokenizers from the metadata of GGUF files, beside those that the metadata were made of."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from jaxserve.errors import TokenizerError
from jaxserve.tokenizers import load_tokenizer
from jaxserve.tokenizers.files import read_eos_token_ids, read_metadata
from jaxserve.tokenizers.gguf import write_gguf_tokenizer
from tests.gguf_files import finish
from tests.tokenizers.builders import CHAT_TEMPLATE, LINES, make_byte_level, make_sentencepiece

ALPHABET = [
    *"abcdefg THE019.,'\n\t_-",
    "  ",
    "é",
    "e\u0301",
    "日本",
    "😀",
    "\u00a0",
    "\x00",
    "<|im_start|>",
    "<tool>",
    "né e",
]


def make_texts(count: int = 300) -> list[str]:
    rng = random.Random(3)
    words = [*ALPHABET, *" ".join(LINES[:4]).split(" ")]
    return ["".join(rng.choice(words) for _ in range(rng.randint(0, 12))) for _ in range(count)]


def write(path: Path, add: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    finish(writer)
    return path


def add_bpe(writer: gguf.GGUFWriter, folder: Path, pre: str = "gpt-2") -> None:
    """The metadata of a tokenizer.json, as converters write them."""
    content = json.loads((folder / "tokenizer.json").read_text())
    tokens = dict(content["model"]["vocab"])
    kinds = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for token in content["added_tokens"]:
        tokens[token["content"]] = token["id"]
        kinds[token["content"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    ordered = sorted(tokens, key=tokens.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(ordered)
    writer.add_token_types([kinds[text] for text in ordered])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(tokens["<|bos|>"])
    writer.add_eos_token_id(tokens["<|eos|>"])
    writer.add_chat_template(CHAT_TEMPLATE)


def add_llama(writer: gguf.GGUFWriter, model: Any) -> None:
    """The metadata of a sentencepiece model, as converters write them."""
    ids = range(model.get_piece_size())
    kinds = [
        gguf.TokenType.CONTROL
        if model.is_control(each)
        else gguf.TokenType.UNKNOWN
        if model.is_unknown(each)
        else gguf.TokenType.BYTE
        if model.is_byte(each)
        else gguf.TokenType.NORMAL
        for each in ids
    ]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.id_to_piece(each) for each in ids])
    writer.add_token_scores([model.get_score(each) for each in ids])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.add_unk_token_id(model.unk_id())


def test_bpe_is_that_of_the_file_it_was_made_of(tmp_path: Path) -> None:
    library = make_byte_level(tmp_path)
    found = load_tokenizer(write(tmp_path / "model.gguf", lambda writer: add_bpe(writer, tmp_path)))
    for text in make_texts():
        ids = library.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False, allow_special=True) == ids
        assert found.decode(ids) == library.decode(ids, skip_special_tokens=False)
    assert found.get_vocab() == library.get_vocab()
    assert (found.bos_token, found.eos_token) == ("<|bos|>", "<|eos|>")
    assert found.chat_template == CHAT_TEMPLATE
    assert found.encode("a") == found.encode("a", add_special_tokens=False)


def test_sentencepiece_is_that_of_the_model_it_was_made_of(tmp_path: Path) -> None:
    model = make_sentencepiece(
        tmp_path,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    found = load_tokenizer(write(tmp_path / "model.gguf", lambda writer: add_llama(writer, model)))
    for text in make_texts():
        ids = model.encode(text)
        assert found.encode(text, add_special_tokens=False) == ids, text
        assert found.decode(ids) == model.decode(ids)
    assert found.encode("a") == [model.bos_id(), *model.encode("a")]
    assert found.eos_token_ids == (model.eos_id(),)


@pytest.mark.parametrize(("bos", "eos"), [(None, None), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", ["gpt-2", "llama-bpe", "sentencepiece"])
def test_flags_say_what_is_put_around_a_text(kind: str, bos: bool | None, eos: bool | None, tmp_path: Path) -> None:
    make_byte_level(tmp_path)
    model = make_sentencepiece(tmp_path, model_type="bpe", byte_fallback=True)

    def add(writer: gguf.GGUFWriter) -> None:
        if kind == "sentencepiece":
            add_llama(writer, model)
        else:
            add_bpe(writer, tmp_path, kind)
        if bos is not None:
            writer.add_add_bos_token(bos)
        if eos is not None:
            writer.add_add_eos_token(eos)

    found = load_tokenizer(write(tmp_path / "model.gguf", add))
    inner = found.encode("the cat", add_special_tokens=False)
    has_bos = kind != "gpt-2" if bos is None else bos
    expected = [*[found.bos_token_id] * has_bos, *inner, *found.eos_token_ids[:1] * bool(eos)]
    assert found.encode("the cat") == expected


CUTS = {
    "gpt-2": "I|'|LL| pay| 12345|  | NOW|'s|\n|\n|é|_!!|\n",
    "smollm": "I|'|LL| pay| |1|2|3|4|5|  | NOW|'s|\n|\n|é|_!!|\n",
    "llama-bpe": "I|'LL| pay| |123|45|  | NOW|'s|\n\n|é|_!!\n",
    "glm4": "I|'LL| pay| |123|45|  | NOW|'s|\n\n|é|_!!\n",
    "qwen2": "I|'LL| pay| |1|2|3|4|5|  | NOW|'s|\n\n|é|_!!\n",
    "tekken": "I|'LL| pay| |1|2|3|4|5|  | NOW|'s|\n\n|é|_!!\n",
    "gpt-4o": "I'LL| pay| |123|45|  | NOW's|\n\n|é|_!!\n",
    "deepseek-llm": "I|'|LL| pay| |1|2|3|4|5|  | NOW|'|s|\n|\n|é|_!!|\n",
    "deepseek-v3": "I|'LL| pay| |123|45|  | NOW|'s|\n\n|é|_!!\n",
}


@pytest.mark.parametrize("pre", CUTS)
def test_each_kind_cuts_texts_in_its_way(pre: str, tmp_path: Path) -> None:
    make_byte_level(tmp_path)
    found: Any = load_tokenizer(write(tmp_path / "model.gguf", lambda writer: add_bpe(writer, tmp_path, pre)))
    text = CUTS[pre].replace("|", "")
    pieces = [text[start:stop] for _, (start, stop) in found._with_special.pre_tokenizer.pre_tokenize_str(text)]
    assert "|".join(pieces) == CUTS[pre]
    composes = found.encode("e\u0301", add_special_tokens=False) == found.encode("é", add_special_tokens=False)
    assert composes == (pre == "qwen2")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_what_is_written_is_the_same_tokenizer(kind: str, tmp_path: Path) -> None:
    make_byte_level(tmp_path)
    model, folder = make_sentencepiece(tmp_path, model_type="bpe", byte_fallback=True), tmp_path / "out"

    def add(writer: gguf.GGUFWriter) -> None:
        add_bpe(writer, tmp_path, "llama-bpe") if kind == "gpt2" else add_llama(writer, model)

    path = write(tmp_path / "model.gguf", add)
    folder.mkdir()
    write_gguf_tokenizer(path, folder)
    one, other = load_tokenizer(path), load_tokenizer(folder)
    for text in make_texts(100):
        assert one.encode(text) == other.encode(text)
    assert one.named_tokens == other.named_tokens
    assert one.chat_template == other.chat_template
    assert one.eos_token_ids == other.eos_token_ids == read_eos_token_ids(folder)
    assert read_metadata(path).chat_template == read_metadata(folder).chat_template


def change(writer: gguf.GGUFWriter, **values: Any) -> None:
    for name, value in values.items():
        key = f"tokenizer.ggml.{name}"
        kind = {list: gguf.GGUFValueType.ARRAY, str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32}[
            type(value)
        ]
        writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, kind)


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"model": "bert"}, "model", "'bert' is not read; known are gpt2"),
        ({"pre": "viking"}, "pre", "'viking' is not read; known are gpt-2, "),
        ({"pre": "default"}, "pre", "'default' is not read"),
        ({"tokens": "x"}, "tokens", "must be a list of texts, not 'x'"),
        ({"tokens": [1, 2]}, "tokens", "must be a list of texts"),
        ({"token_type": [1, 2]}, "token_type", "has 2 items for "),
        ({"tokens": ["a", "a"], "token_type": [1, 1], "merges": ["a a"]}, "tokens", "holds a token twice"),
        ({"merges": ["a"]}, "merges", "merges 'a', which are not tokens"),
        ({"merges": ["a ‽"]}, "merges", "which are not tokens"),
        ({"eos_token_id": 10**6}, "eos_token_id", "must be the id of one of"),
        ({"model": "llama"}, "scores", "must be a list of numbers"),
        ({"model": "llama", "scores": [1, 2]}, "scores", "has 2 items for "),
    ],
)
def test_faults_name_the_key(values: dict[str, Any], field: str, words: str, tmp_path: Path) -> None:
    make_byte_level(tmp_path)

    def add(writer: gguf.GGUFWriter) -> None:
        add_bpe(writer, tmp_path)
        if "tokens" in values:
            values.setdefault("bos_token_id", 0)
            values.setdefault("eos_token_id", 0)
        change(writer, **values)

    path = write(tmp_path / "model.gguf", add)
    with pytest.raises(TokenizerError, match=words) as caught:
        load_tokenizer(path)
    assert caught.value.field == f"tokenizer.ggml.{field}"


def test_a_cut_file_is_an_error_about_the_file(tmp_path: Path) -> None:
    make_byte_level(tmp_path)
    path = write(tmp_path / "model.gguf", lambda writer: add_bpe(writer, tmp_path))
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(TokenizerError, match="truncated") as caught:
        load_tokenizer(path)
    assert caught.value.field == str(path)
