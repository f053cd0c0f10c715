"""Stores to shared memory that the async proxy may not see, in the PTX of kernels.

wgmma and TMA read shared memory through another proxy than ordinary stores, which become visible to it by
`fence.proxy.async`. Without one a kernel is nearly always right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(.*?^\{$(.*?)^\}$", re.MULTILINE | re.DOTALL)
# The compiler's labels begin with "$". Those of inline assembly are loops that wait for a barrier.
_LABEL = re.compile(r"^(\$\w+):")
_BRANCH = re.compile(r"^\s*(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$\w+)")
_TABLE = re.compile(r"\bbrx\.idx\b")
_END = re.compile(r"^\s*(?:ret|exit);")
_STORE = re.compile(r"\bst\.(?:volatile\.)?shared|\bstmatrix\b|\bst\.async\b")
_FENCE = re.compile(r"\bfence\.proxy\.async\b")
# What reads through the other proxy, and arrivals, behind which another warp may begin to. An arrival that expects
# bytes belongs to a copy into shared memory, and tells nobody that something was stored.
_READ = re.compile(
    r"\b(wgmma\.mma_async|cp\.async\.bulk\S*\.global\.shared::cta|cp\.reduce\.async\.bulk|mbarrier\.arrive(?!\.expect_tx))"
)


@dataclass
class _Block:
    """Instructions that run one behind the other, and where they go on."""

    lines: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)


def list_unfenced(ptx: str) -> dict[str, list[str]]:
    """By kernel, the instructions that some way through it reaches from a store to shared memory without a fence.

    Whatever was stored, and wherever: a store that only ordinary loads read counts too, so a kernel fences before each
    arrival and each read.
    """
    found: dict[str, list[str]] = {}
    for name, body in _ENTRY.findall(ptx):
        found.setdefault(name, []).extend(_find_unfenced(_cut(body)))
    return found


def _cut(body: str) -> dict[str, _Block]:
    """The blocks of a kernel by label; those without one have a number."""
    blocks = {"": _Block()}
    last = blocks[""]

    def begin(name: str) -> _Block:
        return blocks.setdefault(name, _Block())

    for line in body.splitlines():
        if found := _LABEL.match(line):
            last.targets.append(found[1])
            last = begin(found[1])
        elif found := _BRANCH.match(line):
            last.targets.append(found[2])
            behind = f"#{len(blocks)}"
            if found[1]:
                last.targets.append(behind)
            last = begin(behind)
        elif _END.match(line):
            last = begin(f"#{len(blocks)}")
        else:
            last.lines.append(line)
    return blocks


def _find_unfenced(blocks: dict[str, _Block]) -> list[str]:
    found: list[str] = []
    reached: dict[str, bool] = {}  # whether a store may be pending where a block begins
    waiting = [("", False)]
    while waiting:
        name, is_pending = waiting.pop()
        if reached.get(name, False) or (name in reached and not is_pending):
            continue
        reached[name] = is_pending
        for line in blocks[name].lines:
            if _TABLE.search(line):
                found.append("a jump by a table, whose ways are not followed")
            if _FENCE.search(line):
                is_pending = False
            elif is_pending and (read := _READ.search(line)):
                found.append(read[1])
            elif _STORE.search(line):
                is_pending = True
        waiting += [(target, is_pending) for target in blocks[name].targets]
    return list(dict.fromkeys(found))
