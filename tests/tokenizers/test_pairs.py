"""Pairs of texts: ids and types are those that `tokenizers` gives, however they are cut."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.tokenizers import Tokenizer, load_tokenizer
from tests.tokenizers.builders import make_sentencepiece

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh"]
SPECIAL = [("[CLS]", 2), ("[SEP]", 3)]
PROCESSORS = {
    "bert": processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "roberta": processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2), trim_offsets=False, add_prefix_space=False),
    "template": processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS]:1 $A:2 [SEP]:0 [SEP]:3 $B:1", special_tokens=SPECIAL
    ),
    "bytes": processors.ByteLevel(trim_offsets=False),
    "none": None,
}


def make(folder: Path, processor: object) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    library = tokenizers.Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    if processor is not None:
        library.post_processor = processor
    library.add_special_tokens(WORDS[:4])
    (folder / "tokenizer_config.json").write_text('{"unk_token": "[UNK]"}')
    library.save(str(folder / "tokenizer.json"))
    return library, load_tokenizer(folder)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [0, 0, 0, 1, 1]),
        ({"model_input_names": ["input_ids", "token_type_ids"]}, [0, 0, 0, 1, 1]),
        ({"model_input_names": ["input_ids", "attention_mask"]}, [0] * 5),
        ({"tokenizer_class": "TokenizersBackend"}, [0] * 5),
    ],
)
def test_types_are_given_where_the_files_say_so(config: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    make(tmp_path, PROCESSORS["bert"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).encode_pair("a", "b")[1] == expected


@pytest.mark.parametrize("name", PROCESSORS)
def test_pairs_are_those_of_the_library_at_every_length(name: str, tmp_path: Path) -> None:
    library, tokenizer = make(tmp_path, PROCESSORS[name])
    for first, second in itertools.product(("", "a", "a b c d", "a b c d e f g h"), repeat=2):
        whole = library.encode(first, second)
        assert tokenizer.encode_pair(first, second) == (whole.ids, whole.type_ids)
        around = library.num_special_tokens_to_add(is_pair=True)
        for most in range(around + 1, around + 18):
            library.enable_truncation(most, strategy="longest_first")
            cut = library.encode(first, second)
            assert tokenizer.encode_pair(first, second, most) == (cut.ids, cut.type_ids), (first, second, most)
            library.no_truncation()


def test_the_document_is_cut_before_the_pair(tmp_path: Path) -> None:
    _, tokenizer = make(tmp_path, PROCESSORS["bert"])
    ids, types = tokenizer.encode_pair("a b c d e", "f g h a b c", 8, 2)
    assert ids == [2, 4, 5, 6, 3, 9, 10, 3] and types == [0, 0, 0, 0, 0, 1, 1, 1]
    with pytest.raises(InvalidRequestError, match="2 tokens have no room for the 3 around a pair"):
        tokenizer.encode_pair("a", "b", 2)


def test_special_tokens_of_users_stay_text(tmp_path: Path) -> None:
    _, tokenizer = make(tmp_path, PROCESSORS["bert"])
    ids, _ = tokenizer.encode_pair("a [SEP] b", "c")
    assert ids[-3:] == [3, 6, 3] and 3 not in ids[:-3], "[, SEP and ] are three unknown words"


def test_a_tokenizer_that_does_not_say_how_is_refused(tmp_path: Path) -> None:
    make_sentencepiece(tmp_path)
    with pytest.raises(TokenizerError, match=r"pairs of texts need a tokenizer\.json"):
        load_tokenizer(tmp_path).encode_pair("a", "b")
    reverse = processors.TemplateProcessing(single="$A", pair="$B $A", special_tokens=[])
    (tmp_path / "reverse").mkdir()
    with pytest.raises(TokenizerError, match=r"pairs of texts need"):
        make(tmp_path / "reverse", reverse)[1].encode_pair("a", "b")
