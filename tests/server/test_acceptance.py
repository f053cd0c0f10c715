"""What answers tell of their drafts, in vLLM's form, and when they tell nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.scheduler import Commit
from jaxserve.errors import ConfigError
from jaxserve.request import RequestMetrics
from jaxserve.server.acceptance import describe_acceptance
from jaxserve.server.app import make_app
from jaxserve.server.options import ServerConfig
from tests.server.asgi import Client, make_scope
from tests.server.test_live import Served, serve

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4}
SUMMARY = {
    "mean_acceptance_length": 2.25,
    "draft_acceptance_rate": 5 / 14,
    "acceptance_histogram": [1, 1, 2, 0, 0],
    "acceptance_histogram_by_draft_length": {"2": [0, 0, 1], "4": [1, 1, 1, 0, 0]},
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 5,
    "num_draft_tokens": 14,
    "num_spec_tokens": 4,
}
STEPS = ((4, 1), (4, 2), (2, 2), (4, 0))
BY_STEP = {"per_step_accepted": [1, 2, 2, 0], "per_step_drafted": [4, 4, 2, 4]}
NOTHING = {
    "mean_acceptance_length": 1.0,
    "draft_acceptance_rate": 0.0,
    "acceptance_histogram": [0, 0, 0],
    "acceptance_histogram_by_draft_length": {},
    "num_spec_steps": 0,
    "num_accepted_draft_tokens": 0,
    "num_draft_tokens": 0,
    "num_spec_tokens": 2,
}


def test_the_form() -> None:
    metrics = RequestMetrics(0, 0, 0, 0, num_draft_tokens=14, num_accepted_tokens=5, verified=STEPS)
    assert describe_acceptance(metrics, 4, is_detailed=False) == SUMMARY
    assert describe_acceptance(metrics, 4, is_detailed=True) == SUMMARY | BY_STEP
    assert describe_acceptance(RequestMetrics(0, 0, 0, 0), 2, is_detailed=False) == NOTHING


def draft(served: Served) -> None:
    """Counts drafts as if each step but the first had verified some."""
    commit, left = served.engine.scheduler.commit, iter(((0, 0), *STEPS))

    def count(*step: Any) -> Commit:
        made = commit(*step)
        for sequence in made.sequences:
            drafts, accepted = next(left, (0, 0))
            if drafts:
                sequence.verified.append((drafts, accepted))
        return made

    served.engine.scheduler.commit = count  # type: ignore[method-assign, assignment]


def ask(level: str, engine: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    """Returns the answer, or the chunks of a stream."""
    config = ServerConfig.from_options(per_request_spec_decode_metrics=level, access_log=False)

    async def request() -> bytes:
        with serve() as served:
            draft(served)
            served.state.config, served.state.engine_config = config, EngineConfig.from_options(**engine)
            body = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
            client = Client()
            client._body[0]["body"] = json.dumps(body | changes).encode()
            scope = make_scope("/v1/completions", headers=[("content-type", "application/json")])
            answer = await client.ask(make_app(served.state), scope)
            assert answer.status == 200, answer.body
            return answer.body

    text = asyncio.run(asyncio.wait_for(request(), timeout=20)).decode()
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line and "[DONE]" not in line]
    return [json.loads(event) for event in events]


@pytest.mark.parametrize(("level", "more"), [("summary", {}), ("detailed", BY_STEP)])
def test_answers_tell_their_drafts(level: str, more: dict[str, Any]) -> None:
    (answer,) = ask(level, {"speculative_config": DRAFTS})
    assert answer["metrics"] == {"speculative_decoding": SUMMARY | more}


def test_a_stream_tells_them_with_its_usage() -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = ask("summary", {"speculative_config": DRAFTS}, **stream)
    assert last["metrics"] == {"speculative_decoding": SUMMARY} and last["usage"]["completion_tokens"] == 5
    assert chunks and not any("metrics" in chunk for chunk in chunks)
    assert not any("metrics" in chunk for chunk in ask("summary", {"speculative_config": DRAFTS}, stream=True))


def test_when_there_is_nothing_to_tell() -> None:
    (answer,) = ask("none", {"speculative_config": DRAFTS})
    assert "metrics" not in answer
    (answer,) = ask("summary", {})
    assert answer["metrics"] == {"speculative_decoding": None}
    for several in ({"n": 2}, {"prompt": [[1, 2], [3, 4]]}):
        (answer,) = ask("summary", {"speculative_config": DRAFTS}, **several)
        assert answer["metrics"] == {"speculative_decoding": None}


def test_other_levels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"per_request_spec_decode_metrics: .*none, summary, detailed, got 'all'"):
        ServerConfig.from_options(per_request_spec_decode_metrics="all")
