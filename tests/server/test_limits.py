"""Everything at exactly its limit is served, and one beyond it is refused with the field that says so."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.refusals import CHAT, EMBED, HELLO, RESPOND, TEXT, check_error
from tests.server.refusals.refusal import JSON

CONTEXT = 1024  # max_model_len of the server
FULL = [5] * CONTEXT

# A path, a body at a limit, the field that is beyond it with the change, and that change.
LIMITS: list[tuple[str, dict[str, Any], str, Any]] = [
    (EMBED, {"input": FULL}, "input", [*FULL, 5]),
    (EMBED, {"input": [FULL, FULL[1:]]}, "input", [FULL, [*FULL, 5]]),
    (TEXT, {"prompt": FULL, "max_tokens": 0, "echo": True}, "prompt", [*FULL, 5]),
    (TEXT, {"prompt": FULL, "max_tokens": 0, "echo": True, "logprobs": 1}, "prompt", [*FULL, 5]),
    (TEXT, {"prompt": FULL, "max_tokens": 0, "prompt_logprobs": 1}, "prompt", [*FULL, 5]),
    (TEXT, {"prompt": FULL, "max_tokens": 1, "prompt_logprobs": 1}, "prompt", [*FULL, 5]),
    (TEXT, {"prompt": FULL, "max_tokens": 5, "echo": True, "logprobs": 1}, "prompt", [*FULL, 5]),
    (TEXT, {"prompt": FULL[1:], "max_tokens": 1}, "prompt", FULL),
    (TEXT, {"prompt": FULL[1:], "max_tokens": 2**31 - 1}, "max_tokens", 2**31),
    (TEXT, {"prompt": "a", "max_tokens": 1, "n": 32}, "n", 33),
    (TEXT, {"prompt": ["a"] * 32, "max_tokens": 1}, "prompt", ["a"] * 33),
    (TEXT, {"prompt": "a", "max_tokens": 1, "logprobs": 20}, "logprobs", 21),
    (TEXT, {"prompt": "a", "max_tokens": 1, "prompt_logprobs": 20}, "prompt_logprobs", 21),
    (TEXT, {"prompt": "a", "max_tokens": 1, "stop": ["a"] * 16}, "stop", ["a"] * 17),
    (TEXT, {"prompt": "a", "max_tokens": 1, "stop_token_ids": [5] * 256}, "stop_token_ids", [5] * 257),
    (TEXT, {"prompt": "a", "max_tokens": 1, "bad_words": ["b"] * 32}, "bad_words", ["b"] * 33),
    (TEXT, {"prompt": "a", "max_tokens": 3, "min_tokens": 3}, "min_tokens", 4),
    (TEXT, {"prompt": "a", "max_tokens": 1, "seed": 2**63 - 1}, "seed", 2**63),
    (TEXT, {"prompt": "a", "max_tokens": 1, "priority": 2**31 - 1}, "priority", 2**31),
    (TEXT, {"prompt": "a", "max_tokens": 1, "user": "u" * 512}, "user", "u" * 513),
    (TEXT, {"prompt": "a", "max_tokens": 1, "cache_salt": "s" * 256}, "cache_salt", "s" * 257),
    (
        TEXT,
        {"prompt": "a", "max_tokens": 1, "logit_bias": {str(number): 0 for number in range(300)}},
        "logit_bias",
        {str(number): 0 for number in range(301)},
    ),
    *(
        (TEXT, {"prompt": "a", "max_tokens": 1, name: most}, name, beyond)
        for name, most, beyond in (
            ("temperature", 100, 100.1),
            ("top_p", 1, 1.01),
            ("min_p", 1, 1.01),
            ("presence_penalty", 2, 2.1),
            ("frequency_penalty", -2, -2.1),
            ("repetition_penalty", 2, 2.1),
            ("top_k", -1, -2),
        )
    ),
    (CHAT, {"messages": HELLO, "max_tokens": 1, "logprobs": True, "top_logprobs": 20}, "top_logprobs", 21),
    (CHAT, {"messages": HELLO, "max_tokens": 1, "metadata": {"a": "v" * 512}}, "metadata.a", {"a": "v" * 513}),
    (RESPOND, {"input": "hi", "max_output_tokens": 1}, "max_output_tokens", 0),
    (EMBED, {"input": "hi", "dimensions": 256}, "dimensions", 257),
    ("/detokenize", {"tokens": FULL}, "tokens", [*FULL, 5]),
]


def ask(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    return http.post(path, content=json.dumps(body).encode(), headers=JSON)


def test_what_is_at_its_limit_is_served_and_what_is_beyond_is_refused(http: httpx.Client) -> None:
    for path, body, param, beyond in LIMITS:
        answer = ask(http, path, body)
        assert answer.status_code == 200, (path, str(body)[:200], answer.text[:200])
        refused = ask(http, path, {**body, param.partition(".")[0]: beyond})
        assert check_error(refused)["param"] == param, (path, param, refused.text)


@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_that_fills_the_context_is_scored(http: httpx.Client, n: int) -> None:
    """The scores are those of the same tokens in a shorter request's prompt, whole and streamed."""
    body = {"prompt": FULL, "max_tokens": 0, "echo": True, "logprobs": 1, "n": n}
    whole = ask(http, TEXT, body).json()
    short = ask(http, TEXT, {**body, "prompt": FULL[:-1]}).json()
    assert whole["usage"]["completion_tokens"] == 0 and whole["usage"]["prompt_tokens"] == CONTEXT
    assert len(whole["choices"]) == n
    for choice, other in zip(whole["choices"], short["choices"], strict=True):
        scores = choice["logprobs"]["token_logprobs"]
        assert len(scores) == CONTEXT and scores[0] is None and choice["finish_reason"] == "length"
        assert scores[1:-1] == pytest.approx(other["logprobs"]["token_logprobs"][1:], abs=1e-4)
    streamed: dict[int, list[float | None]] = {}
    for line in ask(http, TEXT, {**body, "stream": True}).text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                streamed.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
    assert streamed == {choice["index"]: choice["logprobs"]["token_logprobs"] for choice in whole["choices"]}


def test_as_many_tokens_as_fit_fill_the_context_where_no_answer_needs_room(http: httpx.Client) -> None:
    long = {"truncate_prompt_tokens": -1}
    embedded = ask(http, EMBED, {"input": [5] * 1100, **long}).json()
    assert embedded["usage"]["prompt_tokens"] == CONTEXT
    for changes, count in (({"max_tokens": 0, "echo": True}, CONTEXT), ({"max_tokens": 1}, CONTEXT - 1)):
        answer = ask(http, TEXT, {"prompt": [5] * 1100, **long, **changes}).json()
        assert answer["usage"]["prompt_tokens"] == count


@pytest.mark.parametrize("n", [1, 2])
def test_a_form_of_the_answer_changes_no_score_of_a_full_prompt(http: httpx.Client, n: int) -> None:
    """The grammar forces tokens at once, and there is no room for one."""
    body = {"prompt": FULL, "max_tokens": 5, "prompt_logprobs": 0, "n": n}
    plain = ask(http, TEXT, body).json()["choices"]
    form = {"choice": ["a long text that is forced"]}
    forced = ask(http, TEXT, {**body, "structured_outputs": form}).json()["choices"]
    for choice, other in zip(plain, forced, strict=True):
        assert (other["text"], other["finish_reason"]) == ("", "length")
        assert choice["prompt_logprobs"] == other["prompt_logprobs"]
