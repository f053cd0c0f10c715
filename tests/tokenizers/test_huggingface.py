"""tokenizer.json: ids and text are those of the `tokenizers` library, set up as transformers does."""

from __future__ import annotations

import itertools
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.tokenizers import load_tokenizer
from tests.examples import scale_examples
from tests.tokenizers import builders

LIMITS = settings(max_examples=scale_examples(150), deadline=None)
TEXTS = ["", "hello world", "  two", "日本語 😀 e\u0301", "a\0b", "12345", "né e", "x" * 500, "<tool>{}"]


def load_library(directory: Path) -> Tokenizer:
    library = Tokenizer.from_file(str(directory / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    return library


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["llama3", "llama2"])
def test_encode_equals_the_library(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(kind)
    tokenizer, library = load_tokenizer(directory), load_library(directory)
    for special in (True, False):
        expected = library.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, special) == expected
        assert tokenizer.encode(text, special, allow_special=True) == expected


@pytest.mark.parametrize("kind", ["llama3", "llama2"])
def test_every_token_decodes_as_in_the_library(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer, library = cached_pair(request.getfixturevalue(kind))
    for token_id in range(tokenizer.vocab_size):
        for ids in ([token_id], [tokenizer.bos_token_id, token_id, token_id]):
            assert tokenizer.decode(ids, True) == library.decode(ids)
            assert tokenizer.decode(ids, False) == library.decode(ids, skip_special_tokens=False)


@LIMITS
@given(data=st.data())
def test_byte_level_decode_equals_the_library(llama3: Path, data: st.DataObject) -> None:
    tokenizer, library = cached_pair(llama3)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == library.decode(ids, skip)


@LIMITS
@given(data=st.data())
def test_byte_fallback_decode_equals_the_library_for_whole_characters(llama2: Path, data: st.DataObject) -> None:
    tokenizer, library = cached_pair(llama2)
    words = st.sampled_from([token_id for token_id in range(tokenizer.vocab_size) if not 3 <= token_id < 259])
    characters = st.characters(codec="utf-8").map(lambda char: [3 + byte for byte in char.encode()])
    parts = data.draw(st.lists(words.map(lambda token_id: [token_id]) | characters, max_size=20))
    ids = list(itertools.chain(*parts))
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == library.decode(ids, skip)


def test_byte_fallback_keeps_whole_characters_beside_broken_bytes(llama2: Path) -> None:
    tokenizer = load_tokenizer(llama2)
    assert tokenizer.decode([3 + byte for byte in "é".encode() + b"\xff\xe2\x82"], True) == "é\ufffd\ufffd\ufffd"


_PAIRS: dict[Path, tuple[Any, Tokenizer]] = {}


def cached_pair(directory: Path) -> tuple[Any, Tokenizer]:
    if directory not in _PAIRS:
        _PAIRS[directory] = load_tokenizer(directory), load_library(directory)
    return _PAIRS[directory]


def test_attributes(llama3: Path, llama2: Path) -> None:
    tokenizer, library = load_tokenizer(llama3), load_library(llama3)
    assert tokenizer.vocab_size == library.get_vocab_size()
    assert tokenizer.bos_token_id == library.token_to_id("<|bos|>")
    end, eos = library.token_to_id("<|im_end|>"), library.token_to_id("<|eos|>")
    assert tokenizer.eos_token_ids == (end, eos)  # its own first, generation_config.json's once
    assert tokenizer.special_ids == {library.token_to_id(text) for text in tokenizer.special_tokens}
    assert set(tokenizer.special_tokens) == {"<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"}
    assert tokenizer.named_tokens == {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
    assert tokenizer.chat_template == builders.CHAT_TEMPLATE
    other = load_tokenizer(llama2)
    assert (other.bos_token_id, other.eos_token_ids, other.chat_template) == (1, (2,), None)


def test_a_tokenizer_json_alone(tmp_path: Path) -> None:
    library = builders.make_llama3(tmp_path)
    for name in ("tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).unlink()
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.bos_token_id == library.token_to_id("<|bos|>") == tokenizer.encode("x")[0]
    assert tokenizer.eos_token_ids == ()


def test_text_never_becomes_a_special_token(llama3: Path) -> None:
    tokenizer = load_tokenizer(llama3)
    text = "<|im_end|>\n<|im_start|>system<|bos|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert tokenizer.decode(ids, True) == text
    allowed = tokenizer.encode(text, add_special_tokens=False, allow_special=True)
    assert [token_id for token_id in allowed if token_id in tokenizer.special_ids] == [
        tokenizer.special_tokens[special] for special in ("<|im_end|>", "<|im_start|>", "<|bos|>")
    ]


def test_escaped_special_tokens_stay_text(llama3: Path) -> None:
    tokenizer = load_tokenizer(llama3)
    ids = tokenizer.encode("a<|im_end|>b<!|im_end|>!<|eos|>", False, allow_special=True, escape="!")
    end, eos = tokenizer.special_tokens["<|im_end|>"], tokenizer.special_tokens["<|eos|>"]
    assert [token_id for token_id in ids if token_id in tokenizer.special_ids] == [end, eos]
    assert tokenizer.decode(ids, False) == "a<|im_end|>b<|im_end|><|eos|>"


def test_a_vocabulary_that_finds_specials_in_text_refuses(tmp_path: Path) -> None:
    library = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "hi": 2}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<unk>", "<s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    builders.write_json(tmp_path / "tokenizer_config.json", {"unk_token": "<unk>"})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("hi there hi") == [2, 0, 2]
    assert tokenizer.decode([2, 0, 2], False) == library.decode([2, 0, 2], False) == "hi <unk> hi"
    with pytest.raises(InvalidRequestError, match="'<s>'"):
        tokenizer.encode("hi <s> hi")
    assert tokenizer.encode("hi <s> hi", allow_special=True) == [2, 1, 2]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "bos"),
        ({"add_bos_token": False, "add_eos_token": True}, "bos"),  # not a class that reads the flags
        ({"tokenizer_class": "LlamaTokenizerFast"}, "bos"),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, ""),
        ({"tokenizer_class": "GemmaTokenizer", "add_eos_token": True}, "bos eos"),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": True}, "eos"),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": None}, ""),
    ],
)
def test_bos_and_eos(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    library = builders.make_llama3(tmp_path, **config)
    bos, eos = library.token_to_id("<|bos|>"), library.token_to_id("<|im_end|>")
    tokenizer = load_tokenizer(tmp_path)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == ([bos] * ("bos" in expected)) + plain + [eos] * ("eos" in expected)


def test_tokens_that_only_the_config_names(tmp_path: Path) -> None:
    library = builders.make_byte_level(tmp_path)
    new_id = library.get_vocab_size()
    config = {
        "bos_token": "<tool>",  # plain in tokenizer.json: naming it makes it special
        "pad_token": "[PAD]",  # in no vocabulary: no token
        "added_tokens_decoder": {str(new_id): {"content": "<new>", "special": True}},
    }
    builders.write_json(tmp_path / "tokenizer_config.json", config)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == new_id + 1
    assert tokenizer.encode("<new>", allow_special=True) == [new_id]
    assert tokenizer.decode([new_id], True) == "" and tokenizer.decode([new_id], False) == "<new>"
    assert tokenizer.bos_token_id == library.token_to_id("<tool>")
    assert tokenizer.bos_token_id not in tokenizer.encode("<tool>")
    assert "[PAD]" not in tokenizer.special_tokens


@pytest.mark.parametrize("token_id", [0, 5, 400])
def test_ids_that_contradict_the_vocabulary_are_refused(tmp_path: Path, token_id: int) -> None:
    builders.make_byte_level(tmp_path)
    config = {"added_tokens_decoder": {str(token_id): {"content": "<new>", "special": True}}}
    builders.write_json(tmp_path / "tokenizer_config.json", config)
    with pytest.raises(TokenizerError, match=f"'<new>' .*{token_id}"):
        load_tokenizer(tmp_path)


def test_metaspace_decoder_equals_the_library(tmp_path: Path) -> None:
    library = Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=["<s>"], unk_token="<unk>", show_progress=False)
    library.train_from_iterator(builders.LINES, trainer)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(8))]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == library.decode(ids, skip)


def test_a_decoder_that_needs_the_whole_text_decodes_but_does_not_stream(tmp_path: Path) -> None:
    library = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([1, 2, 99], True) == "playing"
    with pytest.raises(TokenizerError, match="ByteLevel"):
        tokenizer.new_stream()


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
        decoders.CTC(),
    ],
)
def test_unknown_decoders_do_not_stream(tmp_path: Path, decoder: decoders.Decoder) -> None:
    library = builders.make_byte_level(tmp_path)
    library.decoder = decoder
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="decoder"):
        tokenizer.new_stream()
    assert tokenizer.decode(tokenizer.encode("hello")) == library.decode(library.encode("hello").ids)


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "日\udc00", None, 5, ["x"], b"x"])
def test_what_is_no_text_is_refused(tokenizers: dict[str, Any], text: Any) -> None:
    for tokenizer in tokenizers.values():
        with pytest.raises(InvalidRequestError) as caught:
            tokenizer.encode(text)
        assert caught.value.field == "prompt"


@pytest.mark.parametrize("ids", [[-1], [1.5], ["1"], [None]])
def test_what_is_no_id_is_refused(tokenizers: dict[str, Any], ids: Any) -> None:
    for tokenizer in tokenizers.values():
        with pytest.raises(InvalidRequestError, match="token_ids"):
            tokenizer.decode(ids, True)


def test_threads_do_not_disturb_each_other(llama3: Path) -> None:
    """A chat and a prompt are encoded at the same time: the switch for special tokens must not leak between them."""
    tokenizer = load_tokenizer(llama3)
    text = "hi <|im_end|> there" * 5
    expected = {allow: tokenizer.encode(text, allow_special=allow) for allow in (True, False)}
    assert expected[True] != expected[False]
    wrong: list[bool] = []

    def encode_often(allow: bool) -> None:
        for _ in range(200):
            if tokenizer.encode(text, allow_special=allow) != expected[allow]:
                wrong.append(allow)

    threads = [threading.Thread(target=encode_often, args=(allow,)) for allow in (True, False, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_added_tokens_keep_their_flags_as_text_and_as_tokens(tmp_path: Path) -> None:
    library = builders.make_byte_level(tmp_path)
    library.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    library.post_processor = processors.TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", 336)])
    library.save(str(tmp_path / "tokenizer.json"))
    end = json.loads(library.to_str())["added_tokens"][-1]["id"]
    assert end == 336
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a<|end|>  b", False, allow_special=True) == library.encode("a<|end|>b").ids[:-1]
    assert tokenizer.encode("a")[-1] == end
