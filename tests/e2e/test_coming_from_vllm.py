"""docs/coming-from-vllm.md is code: its blocks run, its tables are those of the code.

`python -m tests.e2e.test_coming_from_vllm` writes the tables.
"""

from __future__ import annotations

import re

import pytest

import jaxserve
from jaxserve.server.protocol.chat import ChatCompletionRequest
from jaxserve.server.protocol.fields import StreamOptions
from jaxserve.server.protocol.pooling import RerankRequest
from jaxserve.server.protocol.tokens import EmbeddingRequest
from jaxserve.vllm_names import ARGUMENTS, ATTRIBUTES, MODULES, OBJECTS
from jaxserve.vllm_options import OTHER_NAMES, VLLM_OPTIONS, VllmOption
from tests.doc_pages import DOCS, make_table, put_tables, run_blocks

pytestmark = pytest.mark.docs

PATH = DOCS / "coming-from-vllm.md"
PAGE = PATH.read_text()


def show_values(option: VllmOption) -> str:
    if not option.instead:
        return "any"
    return ", ".join(f"`{value!r}`" for value in option.harmless or ()) or "-"


def show_none(option: VllmOption) -> str:
    return ", ".join(f"`{value!r}`" for value in (None, *(option.harmless or ())))


def make_tables() -> dict[str, str]:
    options = [(f"`{name}`", show_values(each), each.instead or "-") for name, each in VLLM_OPTIONS.items()]
    names = [(f"`{name}`", f"`{ours}`") for name, ours in OTHER_NAMES.items()]
    foreign = [(f"`jaxserve.{name}`", advice) for name, advice in MODULES.items()]
    foreign += [(f"`from jaxserve import {name}`", advice) for name, advice in OBJECTS.items()]
    foreign += [(f"`LLM.{name}`", advice) for name, advice in ATTRIBUTES.items()]
    foreign += [(f"`{name}=`, other than {show_none(each)}", each.instead) for name, each in ARGUMENTS.items()]
    return {
        "names": make_table(("vLLM", "Here"), foreign),
        "options": make_table(("vLLM", "Accepted", "Otherwise"), options),
        "sglang": make_table(("There", "Here"), names),
    }


def test_tables_are_those_of_the_code() -> None:
    assert put_tables(PAGE, make_tables()) == PAGE, "python -m tests.e2e.test_coming_from_vllm writes them"


def test_names_of_the_page_exist() -> None:
    for names in re.findall(r"from jaxserve import ([\w, ]+)", PAGE[: PAGE.index("<!-- names -->")]):
        assert all(getattr(jaxserve, name.strip()) for name in names.split(","))
    fields = re.findall(r"^\| (`.*?) \|", PAGE[PAGE.index("## Bodies") :], flags=re.M)
    known = {*ChatCompletionRequest.model_fields, *ChatCompletionRequest.foreign, *EmbeddingRequest.foreign}
    known |= {*RerankRequest.model_fields, *RerankRequest.foreign}
    known |= {f"stream_options.{name}" for name in StreamOptions.model_fields}
    names = {name for row in fields for name in re.findall(r"`([\w.]+)", row)}
    assert len(names) > 8 and names <= known


def test_blocks_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(PATH, monkeypatch)
    printed = capsys.readouterr().out
    assert "= 50" in printed and "jaxserve:prefix_cache_hits" in printed and "'Hello, my name is' -> " in printed


if __name__ == "__main__":
    PATH.write_text(put_tables(PAGE, make_tables()))
