"""Streaming equals decoding, never splits a character, and does a bounded amount of work per token."""

from __future__ import annotations

import codecs
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from jaxserve import SamplingParams
from jaxserve.engine.output import OutputStream
from jaxserve.request import Request
from jaxserve.tokenizers import DetokenizerStream, Tokenizer, load_tokenizer, stream
from jaxserve.tokenizers.stream import EACH_BYTE, PieceTable, list_openings, trim_space
from tests.tokenizers import builders

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
    assert tokenizer.decode(prompt_ids, True) + output == tokenizer.decode(prompt_ids + ids, True)


@pytest.mark.parametrize("kind", KINDS)
def test_first_word_keeps_its_space_only_after_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(" cat", add_special_tokens=False)
    prompt_ids = tokenizer.encode("the")
    assert "".join(push_all(tokenizer.new_stream(True, prompt_ids), ids)).startswith(" ")
    only_bos = [tokenizer.bos_token_id]
    assert "".join(push_all(tokenizer.new_stream(True, only_bos), ids)) == tokenizer.decode(ids, True)
    assert "".join(push_all(tokenizer.new_stream(True), ids)) == tokenizer.decode(ids, True)


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


def make_bytes_table(errors: str = "replace") -> PieceTable:
    pieces: list[str | bytes] = [chr(byte) if byte < 128 else bytes([byte]) for byte in range(256)]
    return PieceTable(pieces, pieces, errors)


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
    ("until_text", "pieces", "expected"),
    [
        (None, ["  ", " a", " b"], "   a b"),
        (False, ["  ", " a", " b"], "  a b"),
        (False, [" ", " a", " b"], " a b"),
        (False, [b"\xe6", b"\x97", b"\xa5", " a"], "日 a"),
        (True, ["", " ", " a", " b"], "a b"),
        (True, ["  ", " a", " b"], "  a b"),
    ],
)
def test_a_space_at_the_start(until_text: bool | None, pieces: list[str | bytes], expected: str) -> None:
    opening = {} if until_text is None else list_openings(pieces, map(trim_space, pieces))
    table = PieceTable(pieces, pieces, "replace", opening=opening, opens_until_text=bool(until_text))
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


# --- spaces_between_special_tokens=False

FALLBACK = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
CAT, SAT, A, B, C, TOOL, BLANKS = 1, 2, 4, 5, 6, 7, 8


def join(tokenizer: Tokenizer, ids: list[int], prompt_ids: tuple[int, ...] = ()) -> str:
    return "".join(push_all(tokenizer.new_stream(False, prompt_ids, spaces_between_special_tokens=False), ids))


@pytest.mark.parametrize("kind", KINDS)
@LIMITS
@given(data=st.data())
def test_most_decoders_put_no_space_between_special_tokens(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    special = data.draw(st.lists(st.sampled_from(sorted(tokenizer.special_ids)), min_size=2))
    assert " " not in tokenizer.decode(special, False)
    ids = [*data.draw(ids_of(tokenizer)), *special, *data.draw(ids_of(tokenizer))]
    assert join(tokenizer, ids) == tokenizer.decode(ids, False)
    assert type(tokenizer.new_stream(False, (), False)) is DetokenizerStream, "which costs nothing"


@pytest.mark.parametrize(
    ("decoder", "ids", "text", "joined"),
    [
        (None, [A, A, CAT, A, TOOL, A], "<a> <a> cat <a> <tool> <a>", "<a><a> cat <a><tool><a>"),
        (None, [A, C, A], "<a>  <c> <a>", "<a> <c><a>"),  # a token's own space is its text
        (decoders.ByteLevel(), [A, A, C, TOOL, CAT], "<a><a> <c><tool>cat", "<a><a> <c><tool>cat"),
        (decoders.Metaspace(), [A, B, B, CAT, B, SAT, B], "<a> <b> <b>cat <b> sat <b>", "<a><b><b>cat <b> sat <b>"),
        (FALLBACK, [B, B, SAT, A, B, TOOL, C], " <b> <b> sat<a> <b><tool> <c>", " <b><b> sat<a><b><tool> <c>"),
        (FALLBACK, [A, BLANKS, B], "<a>   <b>", "<a>  <b>"),  # blanks are what that token says
    ],
)
def test_no_space_of_the_decoder_between_added_tokens(
    tmp_path: Path, decoder: decoders.Decoder | None, ids: list[int], text: str, joined: str
) -> None:
    library = builders.make_words(tmp_path, decoder)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(ids, False) == text == library.decode(ids, skip_special_tokens=False)
    assert join(tokenizer, ids) == joined


@pytest.mark.parametrize("decoder", [None, decoders.Metaspace(), FALLBACK])
def test_only_adjacent_added_tokens_lose_a_space(tmp_path: Path, decoder: decoders.Decoder | None) -> None:
    builders.make_words(tmp_path, decoder)
    tokenizer = load_tokenizer(tmp_path)
    for ids in itertools.product((CAT, SAT, A, B, TOOL, 99), repeat=3):
        joined, plain = join(tokenizer, list(ids)), tokenizer.decode(ids, False)
        pairs = [pair for pair in itertools.pairwise(ids) if min(pair) >= A and max(pair) <= TOOL]
        spaced = [pair for pair in pairs if decoder is None or pair[1] == B]
        assert len(plain) - len(joined) == len(spaced) and joined.replace(" ", "") == plain.replace(" ", "")
        hiding = tokenizer.new_stream(True, (), False)
        shown = tokenizer.decode(list(ids), True)
        assert "".join(push_all(hiding, list(ids))) == shown, "hidden tokens have no spaces between"


def test_the_prompt_ends_with_a_special_token(tmp_path: Path) -> None:
    builders.make_words(tmp_path, None)
    tokenizer = load_tokenizer(tmp_path)
    assert join(tokenizer, [A, A, CAT], (CAT, TOOL)) == "<a><a> cat"
    assert join(tokenizer, [A, A, CAT], (CAT,)) == " <a><a> cat"
    assert join(tokenizer, [CAT, A], (A,)) == " cat <a>"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"spaces_between_special_tokens": False, "skip_special_tokens": False}, "<a><a> cat <a><tool>"),
        ({"skip_special_tokens": False}, " <a> <a> cat <a> <tool>"),
        ({"spaces_between_special_tokens": False}, " cat <tool>"),
        ({}, " cat <tool>"),
    ],
)
def test_requests_ask_for_it(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    builders.make_words(tmp_path, None)
    request = Request("r", (CAT, A), SamplingParams(**options))
    sequence = SimpleNamespace(
        request=request,
        index=0,
        num_prompt_tokens=2,
        num_cached_tokens=0,
        token_ids=[],
        finish_reason=None,
        stop_ids=frozenset(),
    )
    group = SimpleNamespace(prompt_token_ids=[CAT, A], prompt_logprobs=None, first=sequence)
    output = OutputStream(sequence, group, load_tokenizer(tmp_path), None, lambda: 0.0)  # type: ignore[arg-type]
    output.push((A, A, CAT, A, TOOL))
    output.flush()
    assert output.make_output().outputs[0].text == text
