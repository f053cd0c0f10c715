"""The playground's Markdown: what it shapes, and that everything else stays as it was written."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")
SCRIPT = """
import { parseBlocks, parseSpans } from "./markdown.mjs";
import { readFileSync } from "node:fs";
const parse = { blocks: parseBlocks, spans: parseSpans };
console.log(JSON.stringify(JSON.parse(readFileSync(0)).map(([kind, text]) => parse[kind](text))));
"""


def paragraph(text: str) -> dict[str, str]:
    return {"kind": "paragraph", "text": text}


CASES: list[tuple[str, str, Any]] = [
    ("blocks", "", []),
    ("blocks", "one\ntwo", [paragraph("one\ntwo")]),
    (
        "blocks",
        "```py\na = 1\n\n# b\n```\nafter",
        [{"kind": "code", "language": "py", "text": "a = 1\n\n# b"}, "after"],
    ),
    ("blocks", "````\n```\n````", [{"kind": "code", "language": "", "text": "```"}]),
    ("blocks", "```\ncut off", [{"kind": "code", "language": "", "text": "cut off"}]),
    ("blocks", "## A title ##", [{"kind": "heading", "level": 2, "text": "A title"}]),
    ("blocks", "#include <a>", [paragraph("#include <a>")]),
    ("blocks", "- a\n- b\n  more", [{"kind": "list", "isOrdered": False, "start": 1, "items": ["a", "b\nmore"]}]),
    ("blocks", "3. c\n4. d", [{"kind": "list", "isOrdered": True, "start": 3, "items": ["c", "d"]}]),
    ("blocks", "1.5 is a number\n-1 too", [paragraph("1.5 is a number\n-1 too")]),
    ("spans", "use `a*b*c` and ``a`b``", ["use ", ["code", ["a*b*c"]], " and ", ["code", ["a`b"]]]),
    ("spans", "**bold *and* `code`**", [["strong", ["bold ", ["em", ["and"]], " ", ["code", ["code"]]]]]),
    ("spans", "2 * 3 * 4 ** 5 and snake_case_name", ["2 * 3 * 4 ** 5 and snake_case_name"]),
    ("spans", "<img src=x onerror=alert(1)>", ["<img src=x onerror=alert(1)>"]),
]


def test_what_is_shaped_and_what_is_not(tmp_path: Path) -> None:
    source = files("jaxserve.server").joinpath("playground", "markdown.js").read_text()
    assert "innerHTML" not in source, "nothing of a model is markup"
    (tmp_path / "markdown.mjs").write_text(source)
    (tmp_path / "run.mjs").write_text(SCRIPT)
    asked = json.dumps([[kind, text] for kind, text, _ in CASES])
    assert NODE is not None
    done = subprocess.run([NODE, "run.mjs"], cwd=tmp_path, input=asked, capture_output=True, text=True, check=True)
    for (kind, text, expected), found in zip(CASES, json.loads(done.stdout), strict=True):
        wanted = [paragraph(each) if isinstance(each, str) and kind == "blocks" else each for each in expected]
        for block in found:
            if kind == "blocks":
                block.pop("isClosed", None)
        assert found == wanted, text
