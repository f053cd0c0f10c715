"""Refusals of a server whose chat template shows neither calls nor reasoning, in each protocol's words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.server.conversation import make_request
from jaxserve.server.options import ServerConfig
from jaxserve.server.protocol.chat import ChatCompletionRequest
from jaxserve.server.protocol.messages import MessagesRequest
from jaxserve.server.protocol.responses import ResponseRequest
from jaxserve.server.routes import chat, messages, responses
from jaxserve.tokenizers.template import render_template

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


@pytest.fixture
def state() -> Any:
    return SimpleNamespace(
        engine=SimpleNamespace(tokenizer=None, max_model_len=512),
        config=ServerConfig.from_options(),
        tool_parser=None,
        reasoning_parser=None,
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
        template_variables={},
        images=None,
        preparation=SimpleNamespace(choose_renderer=lambda: render_template),
    )


def test_tools_that_the_model_may_choose(state: Any) -> None:
    function = {"name": "f", "parameters": SCHEMA}
    body = ChatCompletionRequest(messages=HELLO, tools=[{"type": "function", "function": function}])
    with pytest.raises(InvalidRequestError, match=r"^tool_choice: 'auto' needs a model that can call tools") as chats:
        make_request(chat.read_conversation(body, state), state, {})
    item = ResponseRequest(input="hi", tools=[{"type": "function", **function}])
    with pytest.raises(InvalidRequestError) as items:
        make_request(responses.ResponseReader().read(item, state), state, {})
    assert str(items.value) == str(chats.value)
    message = MessagesRequest(messages=HELLO, max_tokens=5, tools=[{"name": "f", "input_schema": SCHEMA}])
    with pytest.raises(InvalidRequestError, match=r"^tool_choice\.type: auto needs a model that can call tools"):
        messages.read_conversation({}, message, state)


def test_reasoning(state: Any) -> None:
    message = MessagesRequest(messages=HELLO, max_tokens=5, thinking={"type": "enabled"})
    with pytest.raises(InvalidRequestError, match=r"^thinking\.type: this model never reasons"):
        messages.read_conversation({}, message, state)
