"""Streaming equals decoding, never splits a character, and does a bounded amount of work per token."""

from __future__ import annotations

import codecs
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.tokenizers import DetokenizerStream, Tokenizer, stream
from jaxserve.tokenizers.stream import EACH_BYTE, Leading, PieceTable

KINDS = ("llama3", "llama2", "sentencepiece")
TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\té日本😀\u0301▁")), max_size=40)
LIMITS = settings(max_examples=150, deadline=None)


def push_all(detokenizer: DetokenizerStream, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40)


@pytest.mark.parametrize("kind", KINDS)
@LIMITS
@given(data=st.data())
def test_pieces_are_the_decoded_text(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizers[kind]
    ids, skip = data.draw(ids_of(tokenizer)), data.draw(st.booleans())
    assert "".join(push_all(tokenizer.new_stream(skip), ids)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@LIMITS
@given(data=st.data())
def test_token_bytes_are_what_each_token_adds(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizers[kind]
    tokens = tokenizer.list_token_bytes()
    assert len(tokens) == tokenizer.vocab_size
    prompt, ids = tokenizer.encode("hello", False), data.draw(ids_of(tokenizer))
    text = b"".join(tokens[token_id] for token_id in ids)
    if codecs.utf_8_decode(text, "ignore", True)[0].encode() == text:  # no broken characters, which decoding replaces
        assert "".join(push_all(tokenizer.new_stream(False, prompt), ids)).encode() == text


@pytest.mark.parametrize("kind", KINDS)
@LIMITS
@given(text=TEXT)
def test_text_survives_and_no_character_is_split(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    pieces = push_all(tokenizer.new_stream(), tokenizer.encode(text))
    if kind != "llama3":
        text = text.replace("▁", " ")  # there the space mark is a space
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
@LIMITS
@given(prompt=TEXT.filter(bool), data=st.data())
def test_output_continues_the_prompt(
    tokenizers: dict[str, Tokenizer], kind: str, prompt: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    prompt_ids = tokenizer.encode(prompt)
    ids = data.draw(ids_of(tokenizer))
    output = "".join(push_all(tokenizer.new_stream(True, prompt_ids), ids))
    assert tokenizer.decode(prompt_ids) + output == tokenizer.decode(prompt_ids + ids)


@pytest.mark.parametrize("kind", KINDS)
def test_first_word_keeps_its_space_only_after_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(" cat", add_special_tokens=False)
    prompt_ids = tokenizer.encode("the")
    assert "".join(push_all(tokenizer.new_stream(True, prompt_ids), ids)).startswith(" ")
    only_bos = [tokenizer.bos_token_id]
    assert "".join(push_all(tokenizer.new_stream(True, only_bos), ids)) == tokenizer.decode(ids)
    assert "".join(push_all(tokenizer.new_stream(True), ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@LIMITS
@given(data=st.data())
def test_push_many_equals_push(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizers[kind]
    ids, cut = data.draw(ids_of(tokenizer)), data.draw(st.integers(0, 40))
    one, many = tokenizer.new_stream(), tokenizer.new_stream()
    assert many.push_many(ids[:cut]) == "".join(map(one.push, ids[:cut]))
    assert many.push_many(ids[cut:]) == "".join(map(one.push, ids[cut:]))
    assert many.flush() == one.flush()


def make_bytes_table(errors: str = "replace", leading: Leading = Leading.KEEP) -> PieceTable:
    pieces: list[str | bytes] = [chr(byte) if byte < 128 else bytes([byte]) for byte in range(256)]
    return PieceTable(pieces, pieces, leading, errors)


@LIMITS
@given(data=st.binary(max_size=60))
def test_bytes_decode_as_python_does(data: bytes) -> None:
    for errors in ("replace", EACH_BYTE):
        detokenizer = DetokenizerStream(make_bytes_table(errors), skip_special_tokens=True)
        assert "".join(push_all(detokenizer, list(data))) == data.decode("utf-8", errors)


@LIMITS
@given(text=TEXT, cut=st.integers(0, 160))
def test_a_character_shows_with_its_last_byte(text: str, cut: int) -> None:
    data = text.encode()[:cut]
    detokenizer = DetokenizerStream(make_bytes_table(), skip_special_tokens=True)
    shown = detokenizer.push_many(list(data))
    assert shown == data.decode("utf-8", "ignore")
    assert detokenizer.flush() == ("\ufffd" if len(shown.encode()) < len(data) else "")


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ("日".encode()[:2], "日".encode()[2:], "日"),  # begun by the prompt, finished by the output
        ("😀".encode()[:1], "😀".encode()[1:] + b"!", "😀!"),
        ("x日😀".encode()[:-1], "😀".encode()[3:], "😀"),
        ("日".encode()[:2], b"A", "A"),  # the prompt's broken character is no output
        ("日".encode()[:2], b"", ""),
        ("😀".encode()[:1], "😀".encode()[1:3], "\ufffd"),  # still open at the end
        ("日本".encode(), "語".encode(), "語"),
    ],
)
def test_prompt_that_ends_inside_a_character(prompt: bytes, output: bytes, expected: str) -> None:
    detokenizer = DetokenizerStream(make_bytes_table(), skip_special_tokens=True, prompt_ids=list(prompt))
    assert "".join(push_all(detokenizer, list(output))) == expected


@pytest.mark.parametrize(
    ("leading", "pieces", "expected"),
    [
        (Leading.KEEP, ["  ", " a", " b"], "   a b"),
        (Leading.ONE_SPACE, ["  ", " a", " b"], "  a b"),
        (Leading.ONE_SPACE, [" ", " a", " b"], " a b"),
        (Leading.SPACES, ["", " ", " a", " b"], "a b"),
        (Leading.ALL_SPACES, ["  ", " a", " b"], " a b"),
    ],
)
def test_leading_spaces(leading: Leading, pieces: list[str | bytes], expected: str) -> None:
    table = PieceTable(pieces, pieces, leading, "replace")
    detokenizer = DetokenizerStream(table, skip_special_tokens=True)
    assert detokenizer.push_many(range(len(pieces))) + detokenizer.flush() == expected


def test_ids_outside_the_vocabulary_have_no_text(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode("hello", add_special_tokens=False)
        padding = [tokenizer.vocab_size, tokenizer.vocab_size + 1000]
        assert tokenizer.new_stream(True, padding).push_many([*padding, *ids]) == "hello"


def test_work_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is decoded once, and at most three bytes wait."""
    decoded = 0

    def count(data: bytes, errors: str, final: bool) -> tuple[str, int]:
        nonlocal decoded
        decoded += len(data)
        return codecs.utf_8_decode(data, errors, final)

    monkeypatch.setattr(stream, "codecs", SimpleNamespace(utf_8_decode=count))
    data = list("日本語😀é plain ".encode() * 400)
    detokenizer = DetokenizerStream(make_bytes_table(), skip_special_tokens=True, prompt_ids=data)
    for token_id in data:
        detokenizer.push(token_id)
        assert len(detokenizer._pending) <= 3
    detokenizer.flush()
    assert decoded <= 4 * len(data)
