"""A panic in a library in Rust is answered in OpenAI's words, and the next request is served."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.core.layers.pooling import LAST
from jaxserve.engine.generation_config import GenerationDefaults
from jaxserve.engine.prompts import RequestFactory
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.app import make_app
from jaxserve.tokenizers import load_tokenizer
from tests.engine.helpers import make_engine
from tests.server.asgi import Answer, Client, make_scope, make_state, wrap_engine
from tests.tokenizers.test_failures import make_panicking, panic

PATHS = ["/tokenize", "/v1/completions", "/v1/embeddings"]


class Front:
    """The whole application in front of an engine that only prepares requests."""

    def __init__(self, folder: Path) -> None:
        make_panicking(folder)
        self.tokenizer: Any = load_tokenizer(folder)
        model = SimpleNamespace(max_model_len=64, vocab_size=50, embedding_size=8, generates=True, pooler=LAST)
        options: dict[str, Any] = {"eos_token_ids": (), "seed": 0, "max_model_len": 64, "max_logprobs": 5}
        state = make_state()
        state.llm = wrap_engine(
            make_engine()[0],
            tokenizer=self.tokenizer,
            shapes=SimpleNamespace(model=model),
            requests=RequestFactory(self.tokenizer, vocab_size=50, **options),
            defaults=GenerationDefaults(SamplingParams()),
        )
        self._app = make_app(state)

    def ask(self, path: str, **body: Any) -> Answer:
        """Sends a body and returns the answer."""

        async def run() -> Answer:
            client, content = Client(), json.dumps(body).encode()
            client._body = [{"type": "http.request", "body": content, "more_body": False}]
            headers = [("content-type", "application/json"), ("content-length", str(len(content)))]
            return await asyncio.wait_for(client.ask(self._app, make_scope(path, headers=headers)), 10)

        return asyncio.run(run())

    def check_serves(self) -> None:
        """The next request is answered."""
        answer = self.ask("/tokenize", prompt="hello", add_special_tokens=False)
        assert answer.status == 200 and json.loads(answer.body)["tokens"] == [1]


@pytest.fixture
def front(tmp_path: Path) -> Front:
    return Front(tmp_path)


def test_decoding_panics(front: Front) -> None:
    answer = front.ask("/detokenize", tokens=[1, 0])
    assert answer.status == 400 and answer.error["param"] == "token_ids"
    assert "index out of bounds" in answer.error["message"]
    front.check_serves()


@pytest.mark.parametrize("path", PATHS)
def test_encoding_panics(front: Front, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front.tokenizer, "_encode_plain", panic)
    name = "input" if path == "/v1/embeddings" else "prompt"
    answer = front.ask(path, **{name: "hello"})
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == name and "`tokenizers`" in answer.error["message"]
    monkeypatch.undo()
    front.check_serves()


@pytest.mark.parametrize("path", PATHS)
def test_any_other_panic_is_a_500_in_json(front: Front, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the event loop and in a thread of it: `encode` stands for whatever nobody foresaw."""
    monkeypatch.setattr(front.tokenizer, "encode", panic, raising=True)
    answer = front.ask(path, **{"input" if path == "/v1/embeddings" else "prompt": "hello"})
    assert answer.status == 500 and answer.headers["content-type"] == "application/json"
    assert answer.error["type"] == "server_error" and answer.error["code"] == "internal_error"
    assert "bounds" not in answer.error["message"], "what it was is in the log"
    monkeypatch.undo()
    front.check_serves()
