"""What every library of agents goes through: a question with two tools, a list that is cut, and an endless count."""

from __future__ import annotations

import time
from typing import Literal

from tests.agents.running import call
from tests.server.running import RunningServer

City = Literal["Paris", "Rome"]
ASK = "What is the weather in Paris, and the time?"
REASONING = "I look both up."
ANSWER = "It is 12 degrees at noon."
RESULTS = {"get_weather": "12 degrees", "get_time": "noon"}
LIST, RIVERS, STOP = "List some rivers.", "Seine, Rhine, Danube, Po.", "Danube"
CUT = RIVERS.partition(STOP)[0].rstrip(", ")
COUNT = "Count without an end."
SCRIPT = (
    (ASK, f"<think>{REASONING}</think>\n" + call("get_weather", city="Paris") + "\n" + call("get_time")),
    *[(result, f"<think>Both are known.</think>{ANSWER}") for result in RESULTS.values()],
    (LIST, RIVERS),
    (COUNT, "one " * 20_000),
)


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
