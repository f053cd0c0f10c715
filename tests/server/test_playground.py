"""The playground in a real browser, against a small server that speaks the same protocol as ours."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from importlib import resources
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]

POLICY = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
MARKUP = '<img src=x onerror="window.hacked=1"> <b>bold</b> **bold**'
TEXTS = {"markup": [MARKUP], "long": [f"word{at} " for at in range(2000)]}  # of answers, by the question
WORDS = ["A ", "cache ", "of ", "keys."]
NUM_ROWS, NUM_RUNNING = 8, 3
PAGE_MAP = "3" * 4 + "2" * 16 + "1" * 10 + "0" * 34
# How many bars a vertical line crosses near the right edge: opaque runs taller than a rule.
COUNT_BARS = """canvas => {
  const x = canvas.width - 6, data = canvas.getContext("2d").getImageData(x, 0, 1, canvas.height).data;
  let bars = 0, run = 0;
  for (let y = 0; y <= canvas.height; y++) {
    if (y < canvas.height && data[4 * y + 3] === 255) run += 1;
    else { if (run >= 10) bars += 1; run = 0; }
  }
  return bars;
}"""
COUNT_COLORS = """canvas => {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
}"""


class MockServer:
    """What the page sees of a server: the protocol, with answers and an engine that tests decide."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.health: dict[str, Any] = {"status": "ready"}
        self.drops_live = False
        self.chats: list[dict[str, Any]] = []
        self.completions: list[dict[str, Any]] = []
        self.num_aborted = self.num_live = 0
        self.app = FastAPI()
        self.app.add_api_route("/", lambda: read_page("index.html"))
        self.app.add_api_route("/playground/{name}", read_page)
        self.app.add_api_route("/health", lambda: JSONResponse(self.health, self.status))
        self.app.add_api_route("/v1/models", self.list_models)
        self.app.add_api_route("/live", self.watch)
        self.app.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        self.app.add_api_route("/v1/completions", self.complete, methods=["POST"])
        self.app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        self.server = uvicorn.Server(
            uvicorn.Config(self.app, port=0, log_level="warning", timeout_graceful_shutdown=1, lifespan="off")
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    @property
    def status(self) -> int:
        return 200 if self.health["status"] == "ready" else 503

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def refuse(self, http: Request) -> JSONResponse | None:
        """The answer to a request without the right key."""
        if self.key is None or http.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return make_error(401, "Incorrect API key provided.", code="invalid_api_key")

    async def list_models(self, http: Request) -> Response:
        return self.refuse(http) or JSONResponse({"object": "list", "data": [{"id": "demo", "object": "model"}]})

    async def tokenize(self, http: Request) -> Response:
        return self.refuse(http) or JSONResponse({"tokens": [1, 2, 3]})

    async def watch(self, http: Request) -> Response:
        async def look() -> AsyncIterator[str]:
            self.num_live += 1
            for step in range(10_000):
                yield f"data: {json.dumps(make_look(step))}\n\n"
                if self.drops_live and step == 3:
                    return
                await asyncio.sleep(0.05)

        return self.refuse(http) or StreamingResponse(look(), media_type="text/event-stream")

    async def complete(self, http: Request) -> Response:
        body = await http.json()
        self.completions.append(body)
        ends = [{"index": at, "text": "x", "finish_reason": "length"} for at in range(len(body["prompt"]))]
        events = [json.dumps({"choices": [end]}) for end in ends]
        return Response("".join(f"data: {each}\n\n" for each in [*events, "[DONE]"]), media_type="text/event-stream")

    async def chat(self, http: Request) -> Response:
        if (refusal := self.refuse(http)) is not None:
            return refusal
        body = await http.json()
        self.chats.append(body)
        if body.get("temperature", 1) > 2:
            return make_error(400, "temperature must be at most 2, got 3", param="temperature", code="invalid_value")
        return StreamingResponse(self.answer(body["messages"][-1]["content"]), media_type="text/event-stream")

    async def answer(self, question: str) -> AsyncIterator[str]:
        words, is_whole = TEXTS.get(question, WORDS), False
        deltas = [{"reasoning_content": "Let me see."}] if question == "think" else []
        deltas += [{"content": word} for word in words]
        try:
            yield make_chunk({"role": "assistant", "content": ""})
            for delta in deltas:
                await asyncio.sleep(0.02)
                yield make_chunk(delta)
            yield make_chunk({}, "stop")
            usage = {"prompt_tokens": 7, "completion_tokens": len(words), "total_tokens": 7 + len(words)}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
            is_whole = True
        finally:
            self.num_aborted += not is_whole


def read_page(name: str) -> Response:
    content = (resources.files("jaxserve.server") / "playground" / name).read_bytes()
    kind = {"html": "text/html", "js": "text/javascript", "css": "text/css"}[name.rpartition(".")[2]]
    return Response(content, media_type=kind, headers={"content-security-policy": POLICY})


def make_error(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return JSONResponse({"error": error}, status)


def make_chunk(delta: dict[str, Any], reason: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': reason}]})}\n\n"


def make_look(step: int) -> dict[str, Any]:
    """Three rows run; the middle one is in its prompt."""
    running = [
        {"row": row, "id": f"ab12c{row}", "prompt": 34, "computed": 34, "tokens": 34 + step, "phase": "decode"}
        for row in range(NUM_RUNNING)
    ]
    running[1] |= {"phase": "prefill", "tokens": 34}
    names = ("prompt_tokens", "generation_tokens", "requests", "steps", "useful_tokens", "padded_tokens")
    return {
        "time": 100 + 0.25 * step,
        "model": "demo",
        "state": "ready",
        "rows": {"max": NUM_ROWS, "running": running, "waiting": 2},
        "pages": {
            "total": 64,
            "used": 20,
            "cached": 10,
            "page_size": 32,
            "map": "3" * 4 + "2" * 16 + "1" * 10 + "0" * 34,
        },
        "counters": dict.fromkeys(names, 10 * step) | {"prefix_queries": 40 * step, "prefix_hits": 10 * step},
        "latency": {"ttft_ms": {"p50": 12.5, "p99": 80}, "itl_ms": {"p50": None, "p99": None}},
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[MockServer]:
    server = MockServer()
    server.thread.start()
    deadline = time.monotonic() + 20
    while not server.server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    yield server
    server.server.should_exit = True
    server.server.force_exit = True
    server.thread.join(10)


@pytest.fixture
def page(browser: Any, server: MockServer) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1400, "height": 900}, color_scheme="light")
    context.set_default_timeout(10_000)
    yield context.new_page()
    context.close()


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_until(page: Any, expression: str) -> None:
    """Polls from here: the page's policy keeps the browser from evaluating text by itself."""
    deadline = time.monotonic() + 10
    while not page.evaluate(expression) and time.monotonic() < deadline:
        page.wait_for_timeout(20)
    assert page.evaluate(expression), expression


def test_loads_without_errors_or_foreign_requests(page: Any, server: MockServer) -> None:
    said, urls = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: urls.append(request.url))
    page.goto(server.url)
    page.wait_for_selector("#state[data-state=ready]")
    wait_until(page, "document.getElementById('model').textContent === 'demo'")
    assert said == []
    assert f"{server.url}/live" in urls
    assert [url for url in urls if not url.startswith((server.url, "data:"))] == []


def test_streams_an_answer_with_the_settings_chosen(page: Any, server: MockServer) -> None:
    page.goto(server.url)
    wait_until(page, "document.getElementById('model').textContent === 'demo'")
    page.click("#settings summary")
    page.fill("[name=system]", "Be brief.")
    page.fill("[name=temperature]", "0.5")
    page.fill("[name=max_tokens]", "9")
    page.fill("[name=stop]", "END\n\\n\\n")
    page.select_option("[name=form]", "json_schema")
    page.fill("[name=schema]", '{"type": "object"}')
    ask(page, "think")
    page.wait_for_selector(".turn.assistant .ttft")
    assert page.inner_text(".turn.assistant .text") == "".join(WORDS)
    assert page.text_content(".reasoning p") == "Let me see."
    assert page.inner_text(".facts .tokens") == f"{len(WORDS)} tokens"
    assert page.inner_text("#chosen") == "system, temperature 0.5, max_tokens 9, stop, json_schema"
    assert server.chats[0] == {
        "model": "demo",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "think"}],
        "temperature": 0.5,
        "max_tokens": 9,
        "stop": ["END", "\n\n"],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "playground", "schema": {"type": "object"}},
        },
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    page.click("#reset")
    ask(page, "again")
    page.wait_for_selector(".turn:nth-child(4) .ttft")
    roles = [message["role"] for message in server.chats[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert "temperature" not in server.chats[1]
    page.click(".again")
    wait_until(page, "document.querySelectorAll('.turn .ttft').length === 2")
    assert server.chats[2] == server.chats[1]
    page.click("#clear")
    assert page.locator(".turn").count() == 0


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stops_an_answer(page: Any, server: MockServer, way: str) -> None:
    page.goto(server.url)
    ask(page, "long")
    wait_until(page, "document.querySelector('.turn.assistant .text')?.textContent.includes('word3 ')")
    if way == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    page.wait_for_selector("#send")
    assert page.inner_text(".facts .reason") == "stopped"
    assert page.locator(".error").count() == 0
    deadline = time.monotonic() + 10
    while not server.num_aborted and time.monotonic() < deadline:
        page.wait_for_timeout(20)
    assert server.num_aborted == 1


def test_shows_errors_and_asks_again(page: Any, server: MockServer) -> None:
    page.goto(server.url)
    page.click("#settings summary")
    page.fill("[name=temperature]", "3")
    ask(page, "hello")
    page.wait_for_selector(".error")
    assert page.inner_text(".error .message") == "temperature must be at most 2, got 3"
    assert page.inner_text(".error .where") == "HTTP 400, invalid_request_error, param temperature, invalid_value"
    page.fill("[name=temperature]", "")
    page.click(".error .again")
    page.wait_for_selector(".turn.assistant .ttft")
    assert page.locator(".error").count() == 0
    page.select_option("[name=form]", "json_schema")
    page.fill("[name=schema]", "{")
    ask(page, "hello")
    page.wait_for_selector(".error")
    assert "The JSON schema is not valid JSON" in page.inner_text(".error .message")
    assert len(server.chats) == 2


def test_asks_for_the_key_and_goes_on_with_it(page: Any, server: MockServer) -> None:
    server.key = "sk-right"
    page.goto(server.url)
    page.wait_for_selector("#key-form")
    ask(page, "hello")
    page.wait_for_selector(".error")
    page.fill("#key", "sk-wrong")
    page.press("#key", "Enter")
    wait_until(page, "document.getElementById('key-why').textContent.includes('does not know this key')")
    page.fill("#key", "sk-right")
    page.press("#key", "Enter")
    page.wait_for_selector(".turn.assistant .ttft")
    wait_until(page, f"document.getElementById('running').textContent === '{NUM_RUNNING}'")
    assert not page.is_visible("#key-form")
    assert page.evaluate("[sessionStorage['jaxserve.key'], JSON.stringify(localStorage)]") == ["sk-right", "{}"]


def test_text_of_the_model_stays_text(page: Any, server: MockServer) -> None:
    page.goto(server.url)
    ask(page, "markup")
    page.wait_for_selector(".turn.assistant .ttft")
    assert page.inner_text(".turn.assistant .text") == MARKUP
    assert page.locator(".turn img, .turn .text b").count() == 0
    assert page.evaluate("window.hacked") is None


def test_draws_the_engine(page: Any, server: MockServer) -> None:
    page.goto(server.url)
    page.click("#span label:nth-of-type(2)")
    wait_until(page, f"({COUNT_BARS})(document.getElementById('timeline')) === {NUM_RUNNING - 1}")
    # The row in its prompt is hatched: no opaque run, and still not empty.
    assert page.eval_on_selector("#timeline", COUNT_COLORS) > 20
    assert page.eval_on_selector("#pages", COUNT_COLORS) >= 4
    texts = {name: page.inner_text(f"#{name}") for name in ("running", "row-max", "waiting", "pages-3", "pages-0")}
    assert texts == {"running": "3", "row-max": "8", "waiting": "2", "pages-3": "4", "pages-0": "34"}
    wait_until(page, "document.getElementById('rate').textContent === '40'")
    tiles = [page.inner_text(f"#{name}") for name in ("padding", "prefix", "ttft", "ttft-note", "itl")]
    assert tiles == ["50%", "25%", "13ms", "p99 80 ms", "\u2013"]
    page.focus("#timeline")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#readout").startswith("row 1 \u00b7 ab12c1 \u00b7 prefill \u00b7 34 prompt + 0 new tokens")
    box = page.locator("#timeline").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 6, box["y"] + 17)
    wait_until(page, "document.getElementById('readout').textContent.startsWith('row 0 \u00b7 ab12c0 \u00b7 decode')")


def test_comes_back_to_a_lost_live_view(page: Any, server: MockServer) -> None:
    server.drops_live = True
    page.goto(server.url)
    deadline = time.monotonic() + 10
    while server.num_live < 3 and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    assert server.num_live >= 3


def test_shows_how_far_the_start_is(page: Any, server: MockServer) -> None:
    progress = {"title": "Compiling programs", "done": 3, "total": 12, "note": "forward, 64 tokens"}
    server.health = {"status": "warming", "progress": progress}
    page.goto(server.url)
    page.wait_for_selector("#start")
    assert page.inner_text("#start p") == "Compiling programs 3 of 12, forward, 64 tokens"
    assert page.evaluate("document.getElementById('start-progress').position") == 0.25
    assert page.inner_text("#state-text") == "warming"
    server.health = {"status": "ready"}
    page.wait_for_selector("#start", state="hidden")
    wait_until(page, f"document.getElementById('running').textContent === '{NUM_RUNNING}'")


def test_sends_forty_prompts(page: Any, server: MockServer) -> None:
    page.goto(server.url)
    wait_until(page, "document.getElementById('model').textContent === 'demo'")
    page.click("#load")
    wait_until(page, "document.getElementById('load-note').textContent === '40 of 40 finished'")
    assert sum(len(body["prompt"]) for body in server.completions) == 40
    assert len({body["max_tokens"] for body in server.completions}) == 4
    assert server.completions[0]["prompt"][0] == [1, 2, 3]


def test_needs_no_mouse(page: Any, server: MockServer) -> None:
    page.goto(server.url)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the message field"
    page.keyboard.press("Enter")
    wait_until(page, "document.activeElement.id === 'prompt'")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.assistant .ttft")
    assert server.chats[0]["messages"][-1]["content"] == "one\ntwo"
    page.keyboard.press("Shift+Tab")  # the settings' summary, then back over the message to Send
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    page.keyboard.press("Enter")
    assert page.is_visible("[name=temperature]")
    names = page.eval_on_selector_all(
        "button, input, select, textarea",
        "all => all.filter(e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).map(e => e.outerHTML)",
    )
    assert names == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_a_phone_in_both_themes(browser: Any, server: MockServer, scheme: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    page.goto(server.url)
    page.click("#settings summary")
    page.click("#key-open")
    ask(page, "markup" * 40)
    page.wait_for_selector(".turn.assistant .ttft")
    wait_until(page, f"({COUNT_COLORS})(document.getElementById('timeline')) > 20")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    chat, engine = (page.locator(name).bounding_box() for name in ("#chat", "#engine"))
    assert chat["y"] + chat["height"] <= engine["y"]
    read = "getComputedStyle(document.body).backgroundColor"
    colors = {"light": "rgb(245, 245, 242)", "dark": "rgb(13, 15, 17)"}
    assert page.evaluate(read) == colors[scheme]
    other = "dark" if scheme == "light" else "light"
    while page.inner_text("#theme-name") != other:
        page.click("#theme")
    assert page.evaluate(read) == colors[other]
    page.reload()
    assert page.evaluate(read) == colors[other]
    context.close()
