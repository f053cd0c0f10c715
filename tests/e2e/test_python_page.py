"""docs/python.md is code: its blocks run, its table of options is the code's, and no public name is missing.

`python -m tests.e2e.test_python_page` writes the table.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest

import jaxserve
from jaxserve import errors
from jaxserve.config import EngineConfig
from jaxserve.engine.request_options import ChatArguments, EncodeArguments, ScoreArguments
from jaxserve.options import list_options
from tests.doc_pages import DOCS, make_table, put_tables, run_blocks

pytestmark = pytest.mark.docs

PATH = DOCS / "python.md"
PAGE = PATH.read_text()


def make_tables() -> dict[str, str]:
    rows = []
    for _, option in list_options(EngineConfig):
        default = "" if option.default is None else f"`{option.default!r}`"
        also = "".join(f"; also `{alias}`" for alias in option.metadata["aliases"])
        rows.append((f"`{option.name}`", default, option.metadata["help"] + also))
    return {"options": make_table(("Option", "Default", "Meaning"), rows)}


def test_the_table_is_that_of_the_code() -> None:
    assert put_tables(PAGE, make_tables()) == PAGE, "python -m tests.e2e.test_python_page writes it"


def test_no_public_name_is_missing() -> None:
    prose = re.sub(r"```python\n.*?```", "", PAGE, flags=re.S)
    known = {name for code in re.findall(r"`([^`]+)`", prose) for name in re.findall(r"\w+", code)}
    wanted = set(jaxserve.__all__)
    for kind in (jaxserve.LLM, jaxserve.AsyncLLM):
        wanted |= {name for name in vars(kind) if not name.startswith("_")} - {"ready"}
    for method in (jaxserve.LLM.generate, jaxserve.LLM.chat, jaxserve.LLM.embed, jaxserve.LLM.score):
        wanted |= inspect.signature(method).parameters.keys() - {"self", "arguments"}
    wanted |= ChatArguments.__optional_keys__ | EncodeArguments.__optional_keys__ | ScoreArguments.__optional_keys__
    for value in (
        jaxserve.SamplingParams,
        jaxserve.StructuredOutputsParams,
        jaxserve.BeamSearchParams,
        jaxserve.PoolingParams,
    ):
        wanted |= {field.name for field in fields(value)}
    wanted |= {field.name for field in fields(jaxserve.CompletionOutput)}
    wanted |= {name for name, kind in vars(errors).items() if inspect.isclass(kind) and name.endswith("Error")}
    assert sorted(name for name in wanted - known if not name.startswith("_")) == []


def test_blocks_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(PATH, monkeypatch)
    answer, told = capsys.readouterr().out.splitlines()[:2]
    assert answer.endswith("so the sum = 50 stop") and told.strip()


if __name__ == "__main__":
    PATH.write_text(put_tables(PAGE, make_tables()))
