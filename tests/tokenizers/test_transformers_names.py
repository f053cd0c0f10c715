"""What scripts written for transformers call on `LLM.get_tokenizer()`."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers as library

from jaxserve.engine.prompts import RequestFactory
from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizers import Tokenizer, load_tokenizer
from jaxserve.tokenizers.chat import encode_chat
from jaxserve.tokenizers.transformers_names import TransformersTokenizer
from tests.tokenizers import builders

KINDS = ("llama3", "llama2", "sentencepiece")
WITH_TEMPLATE = ("llama3", "sentencepiece")
HI = [{"role": "user", "content": "hello <|im_end|> world"}]
TALK = [*HI, {"role": "assistant", "content": "The dog"}]


@pytest.mark.parametrize("kind", WITH_TEMPLATE)
def test_a_conversation_as_ids_as_text_and_as_a_mapping(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    for begins in (False, True):
        text, ids = encode_chat(tokenizer, HI, add_generation_prompt=begins)
        assert tokenizer.apply_chat_template(HI, add_generation_prompt=begins) == ids
        assert tokenizer.apply_chat_template(HI, tokenize=False, add_generation_prompt=begins) == text
        found = tokenizer.apply_chat_template(HI, add_generation_prompt=begins, return_dict=True)
        assert found["input_ids"] == ids and found.attention_mask == [1] * len(ids)
    assert tokenizer.apply_chat_template(HI) == encode_chat(tokenizer, HI, add_generation_prompt=False)[1]


@pytest.mark.parametrize("kind", WITH_TEMPLATE)
def test_a_list_of_conversations(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    each = [tokenizer.apply_chat_template(one) for one in (HI, TALK)]
    assert tokenizer.apply_chat_template([HI, TALK]) == each
    assert tokenizer.apply_chat_template([HI, TALK], return_dict=True).input_ids == each
    texts = [tokenizer.apply_chat_template(one, tokenize=False) for one in (HI, TALK)]
    assert tokenizer.apply_chat_template([HI, TALK], tokenize=False) == texts


@pytest.mark.parametrize("kind", WITH_TEMPLATE)
def test_rendered_text_is_encoded_as_what_it_stands_for(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """The commonest script gives the text to `LLM.generate`: its special tokens are tokens, the user's stay text."""
    tokenizer = tokenizers[kind]
    text = tokenizer.apply_chat_template(HI, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(HI, add_generation_prompt=True)
    assert isinstance(text, str) and type(text) is not str
    for special in (True, False):
        assert tokenizer.encode(text, special) == tokenizer(text, special).input_ids == ids
    assert text.count("<|im_end|>") == 2 and ids.count(tokenizer.special_tokens["<|im_end|>"]) == 1


def test_rendered_text_as_a_prompt(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["llama3"]
    factory = RequestFactory(tokenizer, vocab_size=400, eos_token_ids=(), seed=0, max_model_len=64, max_logprobs=5)
    params = SamplingParams(max_tokens=1, stop_token_ids=[tokenizer.eos_token_id])
    text = tokenizer.apply_chat_template(HI, tokenize=False, add_generation_prompt=True)
    made, chat = factory.make(text, params), factory.make_chat(HI, params)
    assert made.prompt_token_ids == chat.prompt_token_ids and made.prompt == chat.prompt


def test_what_is_made_of_rendered_text_is_plain(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, other = tokenizers["llama3"], tokenizers["llama2"]
    text = tokenizer.apply_chat_template(HI, tokenize=False)
    plain = tokenizer.encode(str(text))
    assert plain != tokenizer.encode(text)
    for made in (copy.deepcopy(text), pickle.loads(pickle.dumps(text)), text + "", text[:]):
        assert type(made) is str and tokenizer.encode(made) == plain
    assert other.encode(text) == other.encode(str(text)), "ids of another tokenizer mean nothing to it"


def test_templates_tools_and_continuation(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["llama2"]
    with pytest.raises(TokenizerError, match="chat_template"):
        tokenizer.apply_chat_template(HI)
    template = (
        "{{ tools | length if tools else 0 }}{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}."
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    options: dict[str, Any] = {"chat_template": template, "tokenize": False, "enable_thinking": True}
    assert tokenizer.apply_chat_template(TALK[1:] + HI, [tool], **options) == "1TrueThe doghello <|im_end|> world."
    assert tokenizer.apply_chat_template(TALK[1:], continue_final_message=True, **options) == "0TrueThe dog"


@pytest.mark.parametrize(
    "arguments", [{"return_tensors": "pt"}, {"padding": True}, {"truncation": True}, {"max_length": 5}, {"nonsense": 1}]
)
def test_what_is_not_here_is_refused_by_name(tokenizers: dict[str, Tokenizer], arguments: dict[str, Any]) -> None:
    tokenizer = tokenizers["llama3"]
    (name,) = arguments
    for call in (
        lambda: tokenizer.apply_chat_template(HI, **arguments),
        lambda: tokenizer("hello", **arguments),
        lambda: tokenizer.encode("hello", **arguments),
        lambda: tokenizer.decode([5], **arguments),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            call()
        assert caught.value.field.removeprefix("chat_template_kwargs.") == name


def test_what_changes_nothing_is_taken(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["llama3"]
    nothing: dict[str, Any] = {"padding": False, "truncation": False, "max_length": None, "return_tensors": None}
    assert tokenizer.encode("hello", **nothing) == tokenizer("hello", **nothing).input_ids == tokenizer.encode("hello")
    assert tokenizer.apply_chat_template(HI, documents=None, **nothing) == tokenizer.apply_chat_template(HI)
    assert tokenizer.decode([5], clean_up_tokenization_spaces=False) == tokenizer.decode([5])


@pytest.mark.parametrize("kind", KINDS)
def test_calls_encode_texts(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = [tokenizer.encode(text) for text in ("hello", "the cat")]
    one, many = tokenizer("hello"), tokenizer(["hello", "the cat"])
    assert one["input_ids"] == one.input_ids == ids[0] and one.attention_mask == [1] * len(ids[0])
    assert many.input_ids == ids and many["attention_mask"] == [[1] * len(each) for each in ids]
    assert dict(**one).keys() == {"input_ids", "attention_mask"} and tokenizer([]).input_ids == []
    assert tokenizer("hello", add_special_tokens=False).input_ids == tokenizer.encode("hello", False)
    with pytest.raises(AttributeError, match="token_type_ids"):
        _ = one.token_type_ids


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_shows_special_tokens_unless_told(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("hello")
    assert tokenizer.bos_token is not None and tokenizer.decode(ids).startswith(tokenizer.bos_token)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello"
    assert tokenizer.batch_decode([ids, ids[1:]], skip_special_tokens=True) == ["hello", "hello"]
    assert tokenizer.decode(ids[0]) == tokenizer.bos_token


def test_names_of_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    byte_level, fallback, model = (tokenizers[kind] for kind in KINDS)
    assert (byte_level.eos_token, byte_level.eos_token_id) == ("<|im_end|>", byte_level.eos_token_ids[0])
    assert byte_level.pad_token is byte_level.pad_token_id is byte_level.unk_token is byte_level.unk_token_id is None
    assert (fallback.unk_token, fallback.unk_token_id, fallback.bos_token_id) == ("<unk>", 0, 1)
    assert (model.eos_token, model.eos_token_id, model.unk_token_id) == ("<|im_end|>", 4, 0)
    for tokenizer in (byte_level, fallback, model):
        assert tokenizer.convert_ids_to_tokens(tokenizer.all_special_ids) == tokenizer.all_special_tokens
        assert set(tokenizer.all_special_ids) == tokenizer.special_ids and len(tokenizer) == tokenizer.vocab_size


def test_a_padding_token(tmp_path: Path) -> None:
    made = builders.make_llama3(tmp_path, pad_token="<|eos|>")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|eos|>", made.token_to_id("<|eos|>"))


@pytest.mark.parametrize("kind", ["llama3", "llama2"])
def test_the_vocabulary_of_tokenizer_json(kind: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(kind)
    check_vocabulary(
        load_tokenizer(directory), library.Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
    )


def test_the_vocabulary_of_a_sentencepiece_model(tmp_path: Path) -> None:
    builders.make_sentencepiece(tmp_path)
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    size = model.get_piece_size()
    builders.write_json(tmp_path / "added_tokens.json", {"<|im_end|>": size + 1})
    pieces = {model.id_to_piece(token_id): token_id for token_id in range(size)}
    check_vocabulary(load_tokenizer(tmp_path), pieces | {"<|im_end|>": size + 1})


def check_vocabulary(tokenizer: Tokenizer, expected: dict[str, int]) -> None:
    assert tokenizer.get_vocab() == expected
    tokens, ids = list(expected), list(expected.values())
    assert tokenizer.convert_tokens_to_ids(tokens) == ids and tokenizer.convert_tokens_to_ids(tokens[5]) == ids[5]
    assert tokenizer.convert_ids_to_tokens(ids) == tokens and tokenizer.convert_ids_to_tokens(ids[5]) == tokens[5]
    special = sorted(tokenizer.special_ids)[0]
    token, ordinary = next(item for item in expected.items() if item[1] not in tokenizer.special_ids)
    assert tokenizer.convert_ids_to_tokens([special, ordinary], skip_special_tokens=True) == [token]
    assert tokenizer.convert_tokens_to_ids("no such token") == tokenizer.unk_token_id
    assert tokenizer.convert_ids_to_tokens(10**12) is None
    words = tokenizer.tokenize("the cat")
    assert tokenizer.convert_tokens_to_ids(words) == tokenizer.encode("the cat", add_special_tokens=False)
    with pytest.raises(InvalidRequestError, match="token_ids"):
        tokenizer.convert_ids_to_tokens([-1])


def test_defaults_are_those_of_transformers() -> None:
    found = inspect.signature(TransformersTokenizer.apply_chat_template).parameters
    assert (found["tokenize"].default, found["add_generation_prompt"].default) == (True, False)
    assert inspect.signature(TransformersTokenizer.decode).parameters["skip_special_tokens"].default is False
    assert inspect.signature(TransformersTokenizer.encode).parameters["add_special_tokens"].default is True
