"""The whole application in front of an engine that reads images on the fake device, and bodies for it."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from PIL import Image

from jaxserve.core.layers.pooling import LAST
from jaxserve.engine.generation_config import GenerationDefaults
from jaxserve.engine.thread import EngineThread
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.app import make_app
from jaxserve.server.server_state import Phase, ServerState
from tests.engine.helpers import make_engine
from tests.engine.image_models import draw, make_factory
from tests.server.asgi import make_state, wrap_engine

TOKENS = 24  # of `draw()`
TEXT = {"type": "text", "text": "what is it?"}


def to_data(image: Image.Image, form: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, form)
    return base64.b64encode(file.getvalue()).decode()


DATA = to_data(draw())
URL = f"data:image/png;base64,{DATA}"
PART: dict[str, Any] = {"type": "image_url", "image_url": {"url": URL}}


def to_content(body: Any) -> dict[str, Any]:
    """What httpx takes for a body, which may be JSON already."""
    if not isinstance(body, str | bytes):
        return {"json": body}
    return {"content": body, "headers": {"content-type": "application/json"}}


class Front:
    """The whole application. `requests` are those that the engine got."""

    def __init__(self, folder: Path, *, options: dict[str, Any] | None = None, **server: Any) -> None:
        self.state: ServerState = make_state(Phase.STARTING, **server)
        model = SimpleNamespace(max_model_len=512, vocab_size=400, generates=True, pooler=LAST, causal=True)
        factory = make_factory(folder, **(options or {}))
        engine, _ = make_engine(rows=8, num_pages=200, image_rows=1024)
        llm = wrap_engine(
            engine,
            tokenizer=factory._tokenizer,
            shapes=SimpleNamespace(model=model, config=SimpleNamespace(cache=None)),
            requests=factory,
            defaults=GenerationDefaults(SamplingParams(temperature=0, max_tokens=2)),
            adapters=None,
        )
        llm._thread = EngineThread(engine, None)
        view = {"describe_cache": dict, "refuse_if_full": lambda *_, **__: None, "seconds_to_admit": lambda: 1}
        llm.view = SimpleNamespace(**view)  # type: ignore[assignment]
        self.requests: list[Request] = []
        stream = llm.stream
        llm.stream = lambda requests, **more: self.requests.extend(requests) or stream(requests, **more)  # type: ignore[method-assign, func-returns-value]
        self.state.open(llm)
        self.state.phase = Phase.READY
        self._app = make_app(self.state)

    def ask(self, path: str, body: Any) -> httpx.Response:
        """Sends a body and returns the answer."""
        return self.ask_many([(path, body)])[0]

    def ask_many(self, asked: list[tuple[str, Any]]) -> list[httpx.Response]:
        """Sends bodies at once."""
        return asyncio.run(self.send(asked))

    async def send(self, asked: list[tuple[str, Any]]) -> list[httpx.Response]:
        """Sends bodies at once, from a loop that may do other things."""
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            return list(await asyncio.gather(*(client.post(path, **to_content(body)) for path, body in asked)))

    def chat(self, *parts: Any, **more: Any) -> httpx.Response:
        return self.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": list(parts)}], **more})

    def close(self) -> None:
        self.state.end_processes()
        assert self.state.llm is not None
        self.state.llm._thread.shutdown()


def to_input(url: str = URL, **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **more}


def to_block(data: str = DATA, **more: Any) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}, **more}
