"""Tokens of completions and their places: joined they are the text, and each offset points at its token.

Whole answers and streams come from a real engine with real tokenizers; only the sampled tokens are written down here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.scheduler import Scheduler, SchedulerLimits, StepPlan
from jaxserve.engine.engine import Engine
from jaxserve.engine.generation_config import GenerationDefaults
from jaxserve.engine.logprobs import LogprobReader
from jaxserve.engine.prompts import RequestFactory
from jaxserve.request import RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.answers import AnswerReader
from jaxserve.server.generation import Account
from jaxserve.server.logprobs import CompletionTokens, TokenTexts
from jaxserve.server.options import ServerConfig
from jaxserve.server.protocol.completions import CompletionRequest
from jaxserve.server.protocol.tokens import TokenizeRequest
from jaxserve.server.routes.completions import CompletionWriter, make_requests
from jaxserve.server.routes.tokens import _tokenize
from jaxserve.tokenizers import Tokenizer, load_tokenizer
from tests.fake_device import FakeDevice
from tests.tokenizers import builders

KINDS = ("byte-level", "strip", "metaspace", "sentencepiece")
SPLIT = ("byte-level", "strip", "sentencepiece")  # those that spell an unknown character in bytes
PROMPT, ANSWER = "hello world", " the cat sat, on the mat"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    builders.make_llama3(paths["byte-level"])
    builders.make_llama2(paths["strip"])
    builders.make_metaspace(paths["metaspace"])
    builders.make_sentencepiece(paths["sentencepiece"])
    return {kind: load_tokenizer(path) for kind, path in paths.items()}


class ScriptedDevice(FakeDevice):
    """Samples the tokens that it is told, by sequence."""

    def __init__(self, groups: Sequence[PageGroup], scripts: Sequence[Sequence[int]]) -> None:
        super().__init__(groups, page_size=32)
        self._scripts, self._starts = scripts, {}

    def start(self, plan: StepPlan) -> Any:
        for row in plan.new_rows:
            self._starts[row.row] = self._scripts[row.sequence_index], row.max_num_tokens - row.params.max_tokens
        return super().start(plan)

    def _sample(self, row: int) -> int:
        script, start = self._starts[row]
        self._last_token[row] = script[min(self._num_computed[row] - start, len(script) - 1)]
        return self._last_token[row]


def make_state(tokenizer: Tokenizer) -> Any:
    factory = RequestFactory(
        tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=(), seed=0, max_model_len=200, max_logprobs=-1
    )
    defaults = GenerationDefaults(SamplingParams(temperature=0))
    engine = SimpleNamespace(tokenizer=tokenizer, requests=factory, defaults=defaults, max_model_len=200)
    return SimpleNamespace(engine=engine, config=ServerConfig.from_options(), fingerprint="f")


def run(engine: Engine, request: Any) -> list[RequestOutput]:
    engine.add_request(request)
    for stream in engine._streams.values():
        if (prompt := stream.group.prompt_logprobs) is not None:  # the device has none
            prompt.add(np.zeros((len(request.prompt_token_ids), 500), np.float32), 0, 0, 500)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs


def answer(tokenizer: Tokenizer, scripts: Sequence[Sequence[int]], **fields: Any) -> list[dict[str, Any]]:
    """Returns the choices of an answer, the same whole and streamed."""
    found = []
    for streams in (False, True):
        given_fields = {"prompt": PROMPT, "logprobs": 1, "max_tokens": len(scripts[0]), "n": len(scripts), **fields}
        body, state = CompletionRequest(**given_fields, stream=streams), make_state(tokenizer)
        (request,) = make_requests(body, state, {})
        groups = [PageGroup(60)]
        pages = PageManager(groups, page_size=32, max_chunk=64, enable_prefix_caching=False)
        limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=200, max_prefix_updates=8)
        engine = Engine(Scheduler(limits, pages), ScriptedDevice(groups, scripts), tokenizer=tokenizer)
        reader, writer = AnswerReader(len(scripts)), CompletionWriter(body, "m", state, request)
        updates = [each for output in run(engine, request) for each in reader.read(0, output)]
        if streams:
            pieces = [piece for update in updates for piece in writer.write(update, Account())]
            chunks = [json.loads(piece.removeprefix(b"data: "))["choices"][0] for piece in pieces]
            found.append([join([chunk for chunk in chunks if chunk["index"] == at]) for at in range(len(scripts))])
        else:
            found.append([join([choice]) for choice in writer.fold(updates, Account(), {})["choices"]])
    assert found[0] == found[1], "the stream is the whole answer"
    return found[0]


def join(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    lists = {
        name: [each for chunk in chunks for each in chunk["logprobs"][name]]
        for name in ("tokens", "text_offset", "top_logprobs", "token_logprobs")
    }
    text = "".join(chunk["text"] for chunk in chunks)
    return {"text": text, "finish_reason": chunks[-1]["finish_reason"], **lists}


def check_places(choice: dict[str, Any], specials: Sequence[str] = ()) -> None:
    """The tokens are the text, one behind the other; special ones may have no place in it."""
    text, end = choice["text"], 0
    for token, at in zip(choice["tokens"], choice["text_offset"], strict=True):
        assert at == end
        if token not in specials or text.startswith(token, at):
            assert text.startswith(token, at)
            end += len(token)
    assert end == len(text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("echo", [False, True])
def test_tokens_are_the_text_in_their_places(tokenizers: dict[str, Tokenizer], kind: str, echo: bool) -> None:
    tokenizer = tokenizers[kind]
    scripts = [tokenizer.encode(text, False) for text in (ANSWER, " hello the dog in a  b and the mat")]
    size = min(map(len, scripts))
    for choice, script in zip(answer(tokenizer, scripts, echo=echo, max_tokens=size), scripts, strict=True):
        prompt = tokenizer.encode(PROMPT)
        stream = tokenizer.new_stream(True, prompt)
        text = stream.push_many(script[:size]) + stream.flush()
        assert choice["text"] == (PROMPT if echo else "") + text
        check_places(choice, tokenizer.special_tokens)
        assert any(token.startswith(" ") for token in choice["tokens"])


@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("echo", [False, True])
def test_a_character_in_several_tokens_has_one_place(tokenizers: dict[str, Tokenizer], kind: str, echo: bool) -> None:
    tokenizer, text = tokenizers[kind], "hello 🦆 the 鴨é"
    ids = tokenizer.encode(text, False)
    assert len({at for at in range(len(ids)) if tokenizer.decode_token(ids[at]) == "\ufffd"}) >= 3
    for prompt in (PROMPT, text):
        (choice,) = answer(tokenizer, [ids], echo=echo, prompt=prompt)
        assert choice["text"].endswith(text)
        check_places(choice, tokenizer.special_tokens)
    (cut,) = answer(
        tokenizer, [ids], echo=echo, max_tokens=[tokenizer.decode_token(i) for i in ids].index("\ufffd") + 1
    )
    assert cut["text"].endswith("hello \ufffd")
    check_places(cut, tokenizer.special_tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["cat s", "at, on", "the", "mat!"])
def test_stop_strings_move_no_offset(
    tokenizers: dict[str, Tokenizer], kind: str, echo: bool, include: bool, stop: str
) -> None:
    tokenizer = tokenizers[kind]
    script = tokenizer.encode(ANSWER, False)
    free = answer(tokenizer, [script], echo=echo)[0]
    (choice,) = answer(tokenizer, [script], echo=echo, stop=stop, include_stop_str_in_output=include)
    text, count = choice["text"], len(choice["tokens"])
    begin = len(free["text"]) - len(ANSWER.lstrip())
    end = free["text"].find(stop, begin)
    assert text == (free["text"] if end < 0 else free["text"][: end + len(stop) * include])
    assert choice["finish_reason"] == ("length" if end < 0 else "stop")
    assert choice["tokens"] == free["tokens"][:count]
    assert choice["text_offset"] == [min(at, len(text)) for at in free["text_offset"][:count]]


@pytest.mark.parametrize("kind", KINDS)
def test_an_echo_of_ids_is_that_of_their_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    script = tokenizer.encode(" cat", False)
    by_text = answer(tokenizer, [script], echo=True)
    assert by_text == answer(tokenizer, [script], echo=True, prompt=tokenizer.encode(PROMPT))
    assert by_text[0]["text"].startswith(PROMPT)
    (bare,) = answer(tokenizer, [script], echo=True, add_special_tokens=False)
    assert bare["text"] == by_text[0]["text"]
    check_places(bare)
    if tokenizer.bos_token_id is not None:
        (shown,) = answer(tokenizer, [script], echo=True, prompt=tokenizer.encode(PROMPT), skip_special_tokens=False)
        assert shown["text"].startswith(tokenizer.decode([tokenizer.bos_token_id]))
        check_places(shown)
        (only,) = answer(tokenizer, [script], echo=True, prompt=[tokenizer.bos_token_id])
        assert only["tokens"][0] not in only["text"] and len(only["tokens"]) == 1 + len(script)
        check_places(only, tokenizer.special_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_strings_of_tokenize_are_the_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer, text = tokenizers[kind], "the cat 1234 the"
    state = SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer, max_model_len=99), config=None)
    found = _tokenize(TokenizeRequest(prompt=text, return_token_strs=True), state)  # type: ignore[arg-type]
    strings = found["token_strs"]
    assert len(strings) == found["count"]
    assert "".join(each for each in strings if each not in tokenizer.special_tokens) == text


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_likeliest_tokens_as_asked_for(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    alike = [i for i in range(tokenizer.vocab_size) if tokenizer.decode_token(i).strip() in ("the", "t", "\ufffd")]
    likely = alike[:6] + alike[-6:]
    line = np.full((1, tokenizer.vocab_size), -50, np.float32)
    line[0, likely] = -np.arange(len(likely), dtype=np.float32)
    count, chosen = len(set(likely)), likely[-1]
    assert len({tokenizer.decode_token(i).strip() for i in likely}) < count - 1
    entries = LogprobReader(tokenizer).read(line, 0, chosen, count)
    tokens = CompletionTokens(count, frozenset())
    tokens.add([chosen], [entries])
    shown = tokens.take("", is_last=True)
    assert len(shown["top_logprobs"][0]) == count
    assert shown["top_logprobs"][0][shown["tokens"][0]] == entries[chosen].logprob
    for each in TokenTexts(tokenizer).to_chat([chosen], [entries], count)[0]["top_logprobs"]:
        assert bytes(each["bytes"]).decode(errors="replace") == each["token"]


def test_all_likeliest_tokens_are_all() -> None:
    """-1 once left out the least likely, and tokens without a tokenizer have no place but the text's."""
    line = -np.arange(4, dtype=np.float32)[None]
    tokens = CompletionTokens(-1, frozenset())
    for token_id in (0, 3):
        tokens.add([token_id], [LogprobReader(None).read(line, 0, token_id, -1)])
    shown = tokens.take("", is_last=True)
    names = [f"token_id:{token_id}" for token_id in range(4)]
    assert [list(top) for top in shown["top_logprobs"]] == [names, names]
    assert (shown["tokens"], shown["text_offset"]) == ([names[0], names[3]], [0, 0])


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("kind", ["byte-level", "strip", "sentencepiece"])
def test_tokens_that_end_an_answer_stand_at_its_end(tokenizers: dict[str, Tokenizer], kind: str, skips: bool) -> None:
    tokenizer = tokenizers[kind]
    script = tokenizer.encode(ANSWER, False)
    (whole,) = answer(tokenizer, [script])
    (choice,) = answer(tokenizer, [[*script, tokenizer.eos_token_ids[0]]], skip_special_tokens=skips)
    assert (choice["text"], choice["finish_reason"]) == (whole["text"], "stop")
    assert choice["text_offset"] == [*whole["text_offset"], len(whole["text"])]
    (stopped,) = answer(tokenizer, [script], stop_token_ids=[script[-1]])
    assert stopped["text_offset"] == whole["text_offset"] and len(stopped["text"]) == whole["text_offset"][-1]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_token(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """The first token of a text loses its space; parts of characters add up to them."""
    tokenizer = tokenizers[kind]
    text = "hello the cat" if kind == "metaspace" else "hello the 🦆 cat"
    ids = tokenizer.encode(text, False)
    names = tokenizer.split_text(ids)
    texts = TokenTexts(tokenizer)
    assert "".join(names) == text
    found = [texts.find_bytes(*each) for each in zip(ids, names, strict=True)]
    assert b"".join(map(bytes, found)).decode() == text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_tokens_are_the_text(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    """Broken characters, special tokens and stop strings included."""
    tokenizer = tokenizers[kind]
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=9)
    script, skips, prompt = data.draw(ids), data.draw(st.booleans()), data.draw(ids | st.sampled_from([PROMPT, " a"]))
    echo = data.draw(st.booleans())
    fields = {"prompt": prompt, "echo": echo, "skip_special_tokens": skips, "ignore_eos": True}
    (choice,) = answer(tokenizer, [script], **fields)
    before = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    drops_space = kind == "metaspace" and prompt == " a"  # the library's tokens for it decode to "a"
    text, end, token_ids = choice["text"], 0, [*(before if echo else ()), *script]
    for index, token_id in enumerate(token_ids):
        token, at = choice["tokens"][index], choice["text_offset"][index]
        if index == len(token_ids) - len(script):  # a broken character in front of a special token that is omitted
            end += len(text[end:at]) - len(text[end:at].lstrip("\ufffd"))
        assert at == end or (drops_space and at == end + 1)
        is_omitted = skips or (isinstance(prompt, str) and index < len(token_ids) - len(script))
        if not (is_omitted and token_id in tokenizer.special_ids):
            assert text.startswith(token, at)
            end = at + len(token)
    assert text[end:].strip("\ufffd") == ""
    start = data.draw(st.integers(0, max(0, len(text) - 2)))
    if stop := text[start : start + 3]:
        (cut,) = answer(tokenizer, [script], **fields, stop=stop, include_stop_str_in_output=data.draw(st.booleans()))
        count, size = len(cut["tokens"]), len(cut["text"])
        assert text.startswith(cut["text"]) and cut["tokens"][:-1] == choice["tokens"][: count - 1]
        assert cut["text_offset"] == [min(at, size) for at in choice["text_offset"][:count]]


def test_zero_logprobs_show_the_chosen_token(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["strip"]
    (choice,) = answer(tokenizer, [tokenizer.encode(ANSWER, False)], logprobs=0)
    expected = [{token: value} for token, value in zip(choice["tokens"], choice["token_logprobs"], strict=True)]
    assert choice["top_logprobs"] == expected


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_split_text_is_the_decoded_text(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert "".join(tokenizer.split_text(ids)) == tokenizer.decode(ids)
