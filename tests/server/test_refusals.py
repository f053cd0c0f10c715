"""Each row of the table over real HTTP: OpenAI's error, the same for streams, and nobody else's answer changes."""

from __future__ import annotations

import httpx
import pytest

from tests.server.refusals import REFUSALS, Refusal, check_refusal
from tests.server.refusals.refusal import GOOD

PATHS = [*GOOD, "other"]
pytestmark = pytest.mark.usefixtures("untouched")


def list_rows(path: str) -> list[Refusal]:
    return [row for row in REFUSALS if row.path == path or (path == "other" and row.path not in GOOD)]


@pytest.mark.parametrize("path", PATHS)
def test_the_table(http: httpx.Client, path: str) -> None:
    rows = list_rows(path)
    assert len(rows) >= 15
    for row in rows:
        check_refusal(row.send(http), row)


@pytest.mark.parametrize("path", [path for path, (model, _) in GOOD.items() if "stream" in model.model_fields])
def test_a_stream_is_refused_before_it_begins(http: httpx.Client, path: str) -> None:
    """One row of each field and code: streams take the same way to the engine."""
    kinds = {
        (row.param, row.code): row
        for row in list_rows(path)
        if isinstance(row.body, dict) and row.param != "stream_options" and "stream" not in row.body
    }
    assert len(kinds) > 10
    for row in kinds.values():
        check_refusal(row.send(http, stream=True), row)
