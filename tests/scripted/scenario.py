"""What clients of agents go through: a question with two tools, a list that is cut, and an endless count."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

from tests.scripted.running import call
from tests.server.running import RunningServer

City = Literal["Paris", "Rome"]
ASK = "What is the weather in Paris, and the time?"
REASONING = "I look both up."
ANSWER = "It is 12 degrees at noon."
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Paris"}), ("get_time", {})]
RESULTS = {"get_weather": "12 degrees", "get_time": "noon"}
_CITY: dict[str, Any] = {"properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": name, "description": name, "parameters": {"type": "object", **schema, "additionalProperties": False}}
    for name, schema in (("get_weather", _CITY), ("get_time", {"properties": {}}))
]
TOOLS: list[Any] = [{"type": "function", "function": function} for function in FUNCTIONS]  # as chats have them
LIST, RIVERS, STOP = "List some rivers.", "Seine, Rhine, Danube, Po.", "Danube"
CUT = RIVERS.partition(STOP)[0].rstrip(", ")
COUNT = "Count without an end."
SCRIPT = (
    (ASK, f"<think>{REASONING}</think>\n" + "\n".join(call(name, **given) for name, given in CALLS)),
    *[(result, f"<think>Both are known.</think>{ANSWER}") for result in RESULTS.values()],
    (LIST, RIVERS),
    (COUNT, "one " * 20_000),
)


def describe() -> str:
    """Returns all that suites for Node need, as one JSON text."""
    names = ("ASK", "REASONING", "ANSWER", "CALLS", "RESULTS", "FUNCTIONS", "LIST", "STOP", "CUT", "COUNT")
    return json.dumps({name.lower(): globals()[name] for name in names})


def get_weather(city: City) -> str:
    """The weather in a city."""
    assert city == "Paris"
    return RESULTS["get_weather"]


def get_time() -> str:
    """The time of day."""
    return RESULTS["get_time"]


def count_aborts(server: RunningServer) -> float:
    """Returns how many requests ended because their client left."""
    return server.metric("jaxserve:request_success_total", finished_reason="abort")


def wait_for_abort(server: RunningServer, before: float) -> None:
    """Waits until one more request has ended because its client left."""
    deadline = time.monotonic() + 30
    while count_aborts(server) == before:
        assert time.monotonic() < deadline, "the request of the client that left goes on"
        time.sleep(0.05)
