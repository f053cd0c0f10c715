"""The playground in a real browser, against a small server that speaks the same protocol as ours."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.mock_server import CALLS, MARKUP, NUM_RUNNING, WORDS, MockServer

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]

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


def test_shows_calls_runs_them_and_sends_their_results(page: Any, server: MockServer) -> None:
    page.goto(server.url)
    wait_until(page, "document.getElementById('model').textContent === 'demo'")
    page.click("#settings summary")
    page.select_option("[name=tools]", "both")
    ask(page, "call")
    page.wait_for_selector(".turn:nth-child(3) .ttft")
    assert page.inner_text("#chosen") == "tools"
    assert page.locator(".call b").all_inner_texts() == ["add", "lookup"]
    assert page.locator(".call code").all_inner_texts() == ['{"a": 2, "b": 40}', '{"term": "a wug"}']
    assert page.locator(".call .result").all_inner_texts() == ["42", "Error: no entry for a wug"]
    assert page.inner_text(".turn:nth-child(3) .text") == "".join(WORDS)
    assert [tool["function"]["name"] for tool in server.chats[0]["tools"]] == ["add", "lookup"]
    question, called, *results = server.chats[1]["messages"]
    assert question == {"role": "user", "content": "call"}
    assert [call["function"]["arguments"] for call in called["tool_calls"]] == ["".join(part) for _, part in CALLS]
    assert results == [
        {"role": "tool", "tool_call_id": "call_0", "content": "42"},
        {"role": "tool", "tool_call_id": "call_1", "content": "Error: no entry for a wug"},
    ]
    ask(page, "again")
    page.wait_for_selector(".turn:nth-child(5) .ttft")
    roles = [message["role"] for message in server.chats[2]["messages"]]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "user"]


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
    assert page.inner_text(".turn.assistant .text") == MARKUP.replace("**", "")
    assert page.locator(".turn .text strong").all_inner_texts() == ["bold"]
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
    assert page.inner_text("#readout").endswith(" s \u00b7 tenant crawler \u00b7 tier flex")
    sharing = "priority 1, default 1, flex 1 \u00b7 chat 1, crawler 1 (+2 waiting)"
    assert page.inner_text("#sharing") == sharing
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
    assert {body["model"] for body in server.completions} == {"demo"} and page.is_hidden("#models")


def test_chooses_among_models(page: Any, server: MockServer) -> None:
    server.models = ["demo", "pirate"]
    page.goto(server.url)
    page.select_option("#models", "pirate")
    assert page.is_hidden("#model")
    ask(page, "hello")
    page.wait_for_selector(".turn.assistant .ttft")
    assert server.chats[0]["model"] == "pirate" and page.inner_text(".turn.assistant .who") == "pirate"
    page.click("#load")
    wait_until(page, "document.getElementById('load-note').textContent === '40 of 40 finished'")
    assert sorted(body["model"] for body in server.completions) == ["demo", "demo", "pirate", "pirate"]


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
