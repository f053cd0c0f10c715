"""The model's generation_config.json in every endpoint that answers: its defaults, and the operator's limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.generation_config import read_generation_defaults
from jaxserve.engine.prompts import RequestFactory
from jaxserve.errors import ConfigError
from jaxserve.presets import demo_model_dir
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.conversation import make_request
from jaxserve.server.launch import make_state
from jaxserve.server.options import ServerConfig
from jaxserve.server.protocol.chat import ChatCompletionRequest
from jaxserve.server.protocol.completions import CompletionRequest
from jaxserve.server.protocol.responses import ResponseRequest
from jaxserve.server.routes import chat, completions, responses
from jaxserve.server.server_state import ServerState
from jaxserve.tokenizers import load_tokenizer
from jaxserve.tokenizers.template import render_template

HELLO = [{"role": "user", "content": "hi"}]
GIVEN = {"max_new_tokens": 40, "min_new_tokens": 5, "temperature": 0.5, "suppress_tokens": [9], "stop_strings": "END"}


@pytest.fixture(scope="module")
def factory() -> RequestFactory:
    tokenizer = load_tokenizer(demo_model_dir())
    return RequestFactory(
        tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=(), seed=0, max_model_len=512, max_logprobs=5
    )


def ask(endpoint: str, factory: RequestFactory, *, is_limit: bool, asked: int | None, **more: Any) -> SamplingParams:
    defaults = read_generation_defaults(GIVEN, end_tokens=(), has_tokenizer=True, is_limit=is_limit)
    engine = SimpleNamespace(defaults=defaults, requests=factory, tokenizer=factory._tokenizer, max_model_len=512)
    config = ServerConfig.from_options()
    preparation = SimpleNamespace(choose_renderer=lambda: render_template)
    state: Any = SimpleNamespace(
        engine=engine,
        config=config,
        tool_parser=None,
        reasoning_parser=None,
        chat_template=None,
        template_variables={},
        preparation=preparation,
        images=None,
    )
    if endpoint == "chat":
        body = ChatCompletionRequest(messages=HELLO, max_tokens=asked, **more)
        return make_request(chat.read_conversation(body, state), state, {}).params
    if endpoint == "responses":
        body = ResponseRequest(input="hi", max_output_tokens=asked, **more)
        return make_request(responses.ResponseReader().read(body, state), state, {}).params
    return completions.make_requests(CompletionRequest(prompt="hi", max_tokens=asked, **more), state, {})[0].params


@pytest.mark.parametrize("endpoint", ["chat", "responses", "completions"])
def test_a_request_that_says_nothing_gets_the_models_defaults(endpoint: str, factory: RequestFactory) -> None:
    params = ask(endpoint, factory, is_limit=False, asked=None)
    assert (params.max_tokens, params.min_tokens, params.temperature) == (40, 5, 0.5)
    assert (params.stop, params.suppress_tokens) == (("END",), (9,))
    params = ask(endpoint, factory, is_limit=False, asked=300, temperature=1.0)
    assert (params.max_tokens, params.temperature) == (300, 1.0), "defaults are no limits"
    assert ask(endpoint, factory, is_limit=False, asked=3).min_tokens == 3


@pytest.mark.parametrize("endpoint", ["chat", "responses", "completions"])
def test_the_operators_file_is_a_limit(endpoint: str, factory: RequestFactory) -> None:
    found = [ask(endpoint, factory, is_limit=True, asked=asked).max_tokens for asked in (None, 7, 300)]
    assert found == [40, 7, 40]


@pytest.mark.parametrize("values", ['{"x": 1, "y": 2}', '{"messages": []}', '{"y": 1}', '{"enable_thinking": 1}'])
def test_default_variables_that_the_template_does_not_read_stop_the_start(values: str) -> None:
    config = ServerConfig.from_options(default_chat_template_kwargs=values)
    state = make_state(EngineConfig.from_options(model="demo"), config)
    state.chat_template = "{{ x }}{{ messages }}{{ enable_thinking }}"
    llm: Any = SimpleNamespace(tokenizer=None)
    with pytest.raises(ConfigError, match=r"^default_chat_template_kwargs: (y|messages|enable_thinking): "):
        state.open(llm)


@pytest.mark.parametrize(
    ("template", "options", "expected"),
    [
        ("{{ messages }}", {}, (None, None)),
        ("{{ messages }}<think>", {}, (None, "qwen3")),
        ("{{ messages }}<think><tool_call>", {}, ("hermes", "qwen3")),
        ("{{ messages }}<think><tool_call>", {"reasoning_parser": "none", "tool_call_parser": "none"}, (None, None)),
        ("{{ messages }}", {"reasoning_parser": "deepseek_r1"}, (None, "deepseek_r1")),
        ("{{ messages }}<|channel|>", {"reasoning_parser": "none"}, ("openai", None)),
        (None, {}, (None, None)),
    ],
)
def test_formats_are_detected_by_the_template(
    template: str | None,
    options: dict[str, str],
    expected: tuple[str | None, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = make_state(EngineConfig.from_options(model="demo"), ServerConfig.from_options(**options))
    state.chat_template = template
    for part in ("_check_defaults", "_log_form"):
        monkeypatch.setattr(ServerState, part, lambda *_: None)
    monkeypatch.setattr(state, "preparation", SimpleNamespace(start=lambda _: None))
    view = SimpleNamespace(describe_cache=dict)
    ready, requests = SimpleNamespace(adapters=None), SimpleNamespace(images=None)
    limits = SimpleNamespace(max_num_seqs=1)
    llm: Any = SimpleNamespace(tokenizer=None, view=view, ready=ready, requests=requests, limits=limits)
    state.open(llm)
    assert (state.tool_parser, state.reasoning_parser) == expected


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_unknown_formats_stop_the_start(option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: must be one of auto, none, .*qwen3.*, got 'qwen9'"):
        make_state(EngineConfig.from_options(model="demo"), ServerConfig.from_options(**{option: "qwen9"}))
