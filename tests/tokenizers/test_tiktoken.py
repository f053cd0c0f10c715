"""Kimi's tiktoken.model: cut, joined and named as its own code does it."""

from __future__ import annotations

import base64
import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import TokenizerError
from jaxserve.tokenizers import load_tokenizer
from jaxserve.tokenizers.decoders import BYTE_CHARACTERS
from jaxserve.tokenizers.tokenizer import Tokenizer
from tests.tokenizers.builders import LINES

CONFIG = {
    "tokenizer_class": "TikTokenTokenizer",
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "additional_special_tokens": ["<|im_end|>", "<|im_user|>"],
}
# Texts and their pieces, by the eight rules in turn.
CUTS = {
    "Hello 世界world": ["Hello", " ", "世界", "world"],
    "it's 12345 HTTPServer's": ["it's", " ", "123", "45", " HTTPServer's"],
    "camelCase XML": ["camel", "Case", " XML"],
    "a  b\n\n c!?\n": ["a", " ", " b", "\n\n", " c", "!?\n"],
    "été ÉTÉ": ["été", " ÉTÉ"],
    "tail   ": ["tail", "   "],
}


def learn(lines: Iterable[str], count: int) -> list[bytes]:
    """256 bytes, then `count` tokens, each the most frequent pair of the tokens before."""
    words = [[bytes([byte]) for byte in word.encode()] for line in lines for word in line.split(" ")]
    tokens = [bytes([byte]) for byte in random.Random(0).sample(range(256), 256)]
    while len(tokens) < 256 + count:
        pairs: dict[bytes, int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                pairs[b"".join(pair)] = pairs.get(b"".join(pair), 0) + 1
        best = max((pair for pair in pairs if pair not in tokens), key=lambda pair: (pairs[pair], pair))
        tokens.append(best)
        words = [join(word, {token: rank for rank, token in enumerate(tokens)}) for word in words]
    return tokens


def join(parts: list[bytes], ranks: dict[bytes, int]) -> list[bytes]:
    """Joins neighbours, those of the lowest rank first, until no two are a token."""
    while True:
        found = [(ranks[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not found:
            return parts
        _, at = min(found)
        parts = [*parts[:at], parts[at] + parts[at + 1], *parts[at + 2 :]]


TOKENS = learn([*LINES, "camelCase été ÉTÉ HTTPServer 世界 12345"], 60)
FIRST = len(TOKENS)
NAMED = {FIRST: "[BOS]", FIRST + 1: "[EOS]", FIRST + 2: "<|im_end|>", FIRST + 5: "<|im_user|>"}


def write(folder: Path, lines: Iterable[str] | None = None, **changes: Any) -> Path:
    if lines is None:
        lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(TOKENS))
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {str(each): {"content": text, "special": True} for each, text in NAMED.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | {"added_tokens_decoder": added} | changes))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write(tmp_path_factory.mktemp("kimi")))


@pytest.mark.parametrize("text", [*CUTS, *dict.fromkeys(LINES)])
def test_ids_are_those_of_the_ranks(tokenizer: Tokenizer, text: str) -> None:
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    ids = tokenizer.encode(text, add_special_tokens=False)
    if text in CUTS:
        pieces = CUTS[text]
        assert "".join(pieces) == text
        expected = [join([bytes([byte]) for byte in piece.encode()], ranks) for piece in pieces]
        assert ids == [ranks[token] for word in expected for token in word]
    assert tokenizer.decode(ids) == text


def test_special_tokens_have_the_ids_behind_the_file(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == FIRST + 256
    assert {text: tokenizer.special_tokens[text] for text in NAMED.values()} == {v: k for k, v in NAMED.items()}
    assert tokenizer.special_tokens[f"<|reserved_token_{FIRST + 3}|>"] == FIRST + 3
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (FIRST, FIRST + 1)


def test_bytes_are_spelled_apart() -> None:
    assert len(set(BYTE_CHARACTERS)) == 256 and BYTE_CHARACTERS[ord("a")] == "a" and BYTE_CHARACTERS[0x20] == "Ġ"


LINE = f"{base64.b64encode(b'a').decode()} 0"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["abc"], "line 1 .*base64"),
        (["!!!! 0"], "line 1 .*base64"),
        ([LINE, LINE.replace(" 0", " 1")], "line 2 .*doubled"),
        ([LINE.replace(" 0", " 7")], "line 1 .*rank than 0"),
        ([LINE], "byte.*truncated"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(lines: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=words) as caught:
        load_tokenizer(write(tmp_path, lines))
    assert caught.value.field == "tiktoken.model"


def test_other_classes_cut_texts_in_another_way(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer_class.*TikTokenTokenizer.*'QWenTokenizer'") as caught:
        load_tokenizer(write(tmp_path, tokenizer_class="QWenTokenizer"))
    assert caught.value.field == "tokenizer_class"
