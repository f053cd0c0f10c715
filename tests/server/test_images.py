"""Images over HTTP, against an engine on the fake device: what its requests get, and what strangers may send."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.server.images import ServedImages, read_images
from jaxserve.workers import WorkerPoolBusyError
from tests.engine.image_models import MARKED, make_folder
from tests.server.asgi import make_state
from tests.server.image_front import DATA, PART, TEXT, TOKENS, Front, to_block, to_input

MOST_SHOWN = 100  # characters of a wrong value that a refusal quotes; logs quote none


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Front]:
    front = Front(folder, options={"limit_mm_per_prompt": {"image": 4}})
    yield front
    front.close()


@pytest.fixture
def front(shared: Front) -> Front:
    shared.requests.clear()
    return shared


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def refuse(answer: httpx.Response, param: str | None, *words: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.get("param", param) == param, error
    assert all(word in error["message"] for word in words), error


def test_a_chat_has_images_among_its_parts(front: Front) -> None:
    answer = front.chat(TEXT, PART, {"type": "text", "text": "and"}, PART)
    assert answer.status_code == 200, answer.text
    (request,) = front.requests
    assert request.images is not None and len(request.images.items) == 2
    assert request.prompt == f"<|im_start|>user\nwhat is it?{MARKED}and{MARKED}<|im_end|>\n<|im_start|>assistant\n"
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(request.prompt_token_ids) > 2 * TOKENS
    assert len(request.images.places) == 2 * TOKENS


def test_tokens_are_counted_and_shown(front: Front) -> None:
    messages = [{"role": "user", "content": [TEXT, PART]}]
    shown = front.ask("/tokenize", {"messages": messages}).json()
    front.ask("/v1/chat/completions", {"messages": messages})
    assert tuple(shown["tokens"]) == front.requests[0].prompt_token_ids and shown["count"] == len(shown["tokens"])
    smaller = front.ask("/tokenize", {"messages": messages, "mm_processor_kwargs": {"max_pixels": 256}}).json()
    assert smaller["count"] == shown["count"] - TOKENS + 2
    given = [{"role": "user", "content": [{"type": "input_text", "text": "what is it?"}, to_input()]}]
    counted = front.ask("/v1/responses/input_tokens", {"input": given}).json()
    assert counted["input_tokens"] == shown["count"]
    counted = front.ask("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [TEXT, to_block()]}]})
    assert counted.json()["input_tokens"] == shown["count"]
    refuse(front.ask("/tokenize", {"prompt": "a", "mm_processor_kwargs": {"max_pixels": 256}}), "mm_processor_kwargs")


def test_responses_have_images(front: Front) -> None:
    called = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": [to_input(detail="low")]}
    message = {"role": "user", "content": [{"type": "input_text", "text": "see"}, to_input()]}
    answer = front.ask("/v1/responses", {"input": [message, called, result], "instructions": "look"})
    assert answer.status_code == 200, answer.text
    (request,) = front.requests
    assert request.images is not None and len(request.images.items) == 2
    assert answer.json()["usage"]["input_tokens"] == len(request.prompt_token_ids)


def test_messages_have_images(front: Front) -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    turns = [
        {"role": "user", "content": [to_block(cache_control={"type": "ephemeral"}), TEXT, TEXT]},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [TEXT, to_block()]}, TEXT]},
    ]
    answer = front.ask("/v1/messages", {"messages": turns, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    (request,) = front.requests
    assert request.images is not None and len(request.images.items) == 2 and request.prompt is not None
    assert request.prompt.startswith(f"<|im_start|>user\n{MARKED}what is it?\nwhat is it?\nmore<|im_end|>\n")
    assert f"<|im_start|>tool\nwhat is it?{MARKED}<|im_end|>\n<|im_start|>user\nwhat is it?<|im_end|>" in request.prompt


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "PNG, JPEG, WebP or GIF"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,A*A="}}, "is not base64"),
        ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA[:60]}"}}, "cannot be decoded"),
        ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}, "allowed_media_domains"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "allowed_local_media_path"),
        ({"type": "image_url", "image_url": {"url": "gopher://a"}}, "must be a URL of data"),
        ({"type": "image", "image": "AAAA"}, "over HTTP, send image_url"),
        ({"type": "video_url", "video_url": {"url": "data:,"}}, "is video; text is read here, and images"),
        ({"type": "input_audio", "input_audio": {"data": "A" * 40_000}}, "is sound; text is read here, and images"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "vectors"),
        ({**PART, "uuid": "a"}, "'uuid' is not supported"),
    ],
)
def test_what_is_not_read_is_named(front: Front, part: dict[str, Any], words: str) -> None:
    answer = front.chat(TEXT, part)
    assert answer.status_code == 400 and not front.requests
    error = answer.json()["error"]
    assert error["param"].startswith("messages[0].content[1]") and words in error["message"], error


def test_faults_have_the_bodys_names(front: Front) -> None:
    broken = "data:image/png;base64,AAAA"
    asked = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, to_input(broken)]}]}
    refuse(front.ask("/v1/responses", asked), "input[0].content[1]", "is no image")
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": [TEXT, to_block("AAAA")]}]
    refuse(front.ask("/v1/messages", {"messages": turns, "max_tokens": 1}), None, "messages[1].content[1]: is no image")
    source = {"type": "image", "source": {"type": "file", "file_id": "a"}}
    answer = front.ask("/v1/messages", {"messages": [{"role": "user", "content": [source]}], "max_tokens": 1})
    refuse(answer, None, "messages[0].content[0].source.type", "base64 or url")
    document = {"type": "document", "source": {}}
    answer = front.ask("/v1/messages", {"messages": [{"role": "user", "content": [document]}], "max_tokens": 1})
    refuse(answer, None, "must be text or tool_result or image here", "it is a file")


def test_limits_of_images_are_named(front: Front) -> None:
    refuse(front.chat(*[PART] * 5), "messages[0].content[4]", "limit_mm_per_prompt")
    refuse(front.chat(PART, mm_processor_kwargs={"fps": 1}), "mm_processor_kwargs.fps")
    refuse(front.chat(TEXT, mm_processor_kwargs={"max_pixels": 10**9}), "mm_processor_kwargs.max_pixels")
    refuse(front.chat(PART, truncate_prompt_tokens=8), "truncate_prompt_tokens", "images")
    system = [{"role": "system", "content": [PART]}, {"role": "user", "content": "a"}]
    refuse(front.ask("/v1/chat/completions", {"messages": system}), "messages[0].content[0]", "user and tool")


def test_images_that_are_longer_than_the_context_are_named(folder: Path) -> None:
    front = Front(folder, options={"limit_mm_per_prompt": {"image": 40}})
    answer = front.chat(*[PART] * 30)
    front.close()
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 512 tokens, and the images have" in answer.json()["error"]["message"]


def test_other_faults_are_found_before_images_are_decoded(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(*_: Any) -> Any:
        raise AssertionError("images were loaded")

    monkeypatch.setattr(ServedImages, "load", load)
    refuse(front.chat(PART, temperature=-1), "temperature")
    refuse(front.chat(PART, stop=[""] * 4), "stop")


def test_a_placeholder_that_a_client_spells_is_text(front: Front) -> None:
    front.chat({"type": "text", "text": MARKED}, PART)
    (request,) = front.requests
    place = front.state.images.options.tokens.placeholder_id  # type: ignore[union-attr]
    assert request.prompt_token_ids.count(place) == TOKENS
    front.ask("/v1/completions", {"prompt": MARKED})
    assert front.requests[1].images is None and place not in front.requests[1].prompt_token_ids


def test_a_form_and_tools_go_with_images(front: Front) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    front.chat(PART, tools=[tool], tool_choice="required", max_tokens=2)  # the fake device has no masks
    assert front.requests[0].images is not None and front.requests[0].grammar is not None


def test_bytes_are_held_until_the_answer_has_ended(folder: Path) -> None:
    """And no longer: a server that had lost count would refuse everything in the end."""
    front = Front(folder, max_image_bytes_total=40_000)
    counts = front.state.images.counts  # type: ignore[union-attr]
    held: list[int] = []
    stream = front.state.llm.stream  # type: ignore[union-attr]
    front.state.llm.stream = lambda *args, **more: held.append(counts.read_bytes()) or stream(*args, **more)  # type: ignore[union-attr, method-assign, func-returns-value]
    size = 3 * 4 * 4 * 4 * TOKENS
    for _ in range(12):
        assert front.chat(PART).status_code == 200
    assert set(held) == {size} and counts.read_bytes() == 0
    assert (counts.num_images, counts.num_patches) == (12, 12 * 4 * TOKENS)
    answer = front.chat(*[PART] * 9)
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "too_many_image_bytes"
    assert front.chat(TEXT, {"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}).status_code == 400
    assert counts.read_bytes() == 0 and front.chat(PART).status_code == 200
    front.close()


def test_others_images_are_waited_for_in_vain(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(*_: Any, **__: Any) -> Any:
        raise WorkerPoolBusyError("busy")

    assert front.state.images is not None
    monkeypatch.setattr(front.state.images._loader, "load", load)
    answer = front.chat(PART)
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "images_busy"
    assert answer.headers["retry-after"] == "1"


BROKEN = (  # data of images that are refused, each for another reason
    *(DATA[:40], f"{DATA[:200]}*", "A" * 4000),
    base64.b64encode(b"GIF89a" + b"secret" * 40).decode(),
)


@pytest.mark.parametrize("data", [DATA, *BROKEN])
def test_logs_and_refusals_have_no_data(front: Front, caplog: pytest.LogCaptureFixture, data: str) -> None:
    url = f"data:image/png;base64,{data}"
    asked: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {"messages": [user({"type": "image_url", "image_url": {"url": url}})]}),
        ("/v1/chat/completions", {"messages": [user({"type": "image_url", "image_url": {"uri": url}})]}),
        ("/v1/chat/completions", {"messages": [user({"type": "image_url", "image_url": [url]})]}),
        ("/v1/chat/completions", {"messages": [user({"type": url, "image_url": {"url": url}})]}),
        ("/v1/chat/completions", {"messages": [user({**PART, url: url})]}),
        ("/v1/chat/completions", {"messages": [user(PART)], "stop": [url] * 40, "mm_processor_kwargs": {url: 1}}),
        ("/v1/chat/completions", {"messages": url, url: url}),
        ("/v1/chat/completions", {"messages": [user({"type": "image_url", "image_url": {"url": f"x{url}"}})]}),
        ("/v1/responses", {"input": [user(to_input(url))]}),
        ("/v1/responses", {"input": [user({"type": "input_image", "image_url": {"url": url}})]}),
        ("/v1/responses", {"input": [user(to_input(detail=url))]}),
        ("/v1/messages", {"messages": [user(to_block(data))], "max_tokens": 2}),
        ("/v1/messages", {"messages": [user({"type": "image", "source": url})], "max_tokens": 2}),
        ("/v1/messages", {"messages": [user({"type": "image", "source": {"type": data}})], "max_tokens": 2}),
        ("/v1/completions", {"prompt": [{"image": url}]}),
        ("/tokenize", {"messages": [user(PART)], "prompt": url}),
    ]
    with caplog.at_level(logging.DEBUG):
        answers = [front.ask(path, body) for path, body in asked]
    assert caplog.text.count("POST /v1/chat/completions") >= 8, "these are logged"
    assert all(answer.status_code == 400 or data == DATA for answer in answers)
    assert data[:32] not in caplog.text
    pieces = {data[at : at + MOST_SHOWN] for at in range(len(data) - MOST_SHOWN)}
    assert not [answer.text for answer in answers if any(piece in answer.text for piece in pieces)]


def test_metrics_count_images(front: Front) -> None:
    from jaxserve.server.metrics.exposition import render

    front.chat(PART)
    text = render(front.state.metrics, None, None, "ready")[0].decode()
    assert 'jaxserve:image_bytes{engine="0",model_name="demo"} 0.0' in text
    assert "jaxserve:images_total{" in text and "jaxserve:image_patches_total{" in text


def test_a_large_image_is_accepted_by_default() -> None:
    """One of 20 MiB in base64, with the rest of its body."""
    assert make_state().config.limits.max_body_bytes > 4 * -(-(20 << 20) // 3) + 2**20


def test_a_model_without_a_tower_reads_no_images() -> None:
    with pytest.raises(InvalidRequestError, match="served for text"):
        read_images(None, [{"role": "user", "content": [PART]}])
    with pytest.raises(InvalidRequestError, match="served for text"):
        read_images(None, [{"role": "user", "content": "a"}], {"max_pixels": 1})
    messages = [{"role": "user", "content": "a"}]
    assert read_images(None, messages, {}) == (messages, [])
