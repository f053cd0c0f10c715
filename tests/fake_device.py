"""A device that can be computed by hand: it stores token ids in pages and samples a hash of what it reads back.

It obeys plans exactly as the real step does: page tables and positions live here, decode rows take the token that was
sampled last. A lost page, a stale table entry or a page shared by accident shows as a different token. So does a copy
to or from the host that is used before its step's results were taken. Slots with a copy in flight refuse another.

It drafts, too, if it is told how. A step of several tokens a row writes the drafts, right or wrong, and draws at each
position; the slots that the scheduler promised for that must be there.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.core.pages import PageGroup
from jaxserve.core.pages.manager import CHUNK_EDGE
from jaxserve.core.runtime.buckets import Bucket
from jaxserve.core.runtime.step_counts import StepCounts
from jaxserve.core.scheduler import StepOutputs, StepPlan
from jaxserve.core.scheduler.sequence import MASK_LATE
from jaxserve.core.scheduler.step_plan import StateSave


def next_token(token_ids: Sequence[int], windows: Sequence[int | None], vocab_size: int) -> int:
    """What the fake device samples after `token_ids`, computed from the tokens themselves."""
    visible = [token_ids if window is None else token_ids[-window:] for window in windows]
    return (
        zlib.crc32(b"|".join(array("q", ids).tobytes() for ids in visible) + bytes([len(token_ids) % 251])) % vocab_size
    )


def embed_alone(prompt: Sequence[int], windows: Sequence[int | None]) -> list[float]:
    """What the fake device gives as a prompt's embedding."""
    return _hash([prompt if window is None else prompt[-window:] for window in windows], len(prompt))


def _hash(visible: Sequence[Sequence[int]], length: int) -> list[float]:
    code = zlib.crc32(b"|".join(array("q", ids).tobytes() for ids in visible) + bytes([length % 251]))
    return [float(code % 4096), float(code // 4096 % 4096)]  # that float32 holds


def continue_alone(prompt: Sequence[int], num_tokens: int, windows: Sequence[int | None], vocab_size: int) -> list[int]:
    """What a request gets when nothing else is in the world."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(next_token(ids, windows, vocab_size))
    return ids[len(prompt) :]


class FakeFuture:
    def __init__(self, outputs: StepOutputs, error: Exception | None = None, host: FakeHost | None = None) -> None:
        self._outputs, self._error, self._host = outputs, error, host

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    def result(self) -> StepOutputs:
        if self._error is not None:
            raise self._error
        if self._host is None:
            return self._outputs
        return replace(self._outputs, failed_copies=self._host.end())


Page = dict[int, int]  # offset -> token id


class FakeHost:
    """Host slots. Copies begin with a step, and end, or fail, when its results are taken."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.slots: dict[tuple[int, int], Page] = {}  # (group, slot)
        self._begun: deque[tuple[dict[tuple[int, int], Page], dict[tuple[int, int], tuple[int, Page]]]] = deque()
        self.loading: set[tuple[int, int]] = set()  # (group, page)
        self.arrived: dict[tuple[int, int], Page] = {}  # (group, page)

    def begin(self, saves: dict[tuple[int, int], Page], loads: list[tuple[int, int, int]]) -> None:
        busy = {slot for begun in self._begun for copies in begun for slot in copies}
        used = [*saves, *((group, slot) for group, _, slot in loads)]
        assert len(used) == len(set(used)) and not busy & set(used), "a slot with a copy in flight is used"
        for slot in saves:
            self.slots.pop(slot, None)  # overwritten from now on
        pages = {(group, page) for group, page, _ in loads}
        assert len(pages) == len(loads) and not pages & self.loading, "a page is loaded twice at once"
        self.loading |= pages
        self._begun.append((saves, {(g, slot): (page, self.slots[g, slot]) for g, page, slot in loads}))

    def end(self) -> frozenset[tuple[int, int]]:
        saves, loads = self._begun.popleft()
        fails = self._device.copy_fails
        failed = {slot for slot in saves if fails("save")} | {slot for slot in loads if fails("load")}
        self.slots |= {slot: page for slot, page in saves.items() if slot not in failed}
        for (group, slot), (page, content) in loads.items():
            self.loading.remove((group, page))
            if (group, slot) in failed:
                del self.slots[group, slot]
            else:
                self.arrived[group, page] = dict(content)
        return frozenset(failed)


class FakeStep:
    """Samples when it is asked to: a row with a late mask keeps its last token."""

    def __init__(
        self,
        device: FakeDevice,
        work: list[tuple[int, bool]],
        error: Exception | None = None,
        width: int = 1,
        num_drafts: int = 0,
        saves: Sequence[StateSave] = (),
    ) -> None:
        self._device, self._work, self._error, self._width = device, work, error, width
        self._saves = saves  # of recurrent states, behind the step
        self._num_drafts = num_drafts  # to make for the next step

    def sample(self, mask: Any = None) -> FakeFuture:
        if self._error is not None:
            return FakeFuture(StepOutputs([]), self._error)
        longest = [self._width] * len(self._work) if mask is None else count_lines(mask, len(self._work))
        late = [not most for most in longest]
        runs, lines = [], []
        embeddings = self._device.embed(self._work)
        for (row, samples), is_late, most in zip(self._work, late, longest, strict=True):
            run = [MASK_LATE if is_late else -1 if row in self._device.poison_rows else 0], [(0.0, 0.0)]
            if samples and not is_late:
                if self._device.drafter is not None:
                    run = self._device.verify(row, most)
                else:
                    run = self._device.sample_run(row, 1 if mask is not None else self._device.draw_length(self._width))
            runs.append(run[0])
            lines += run[1]
        ids = [token_id for run in runs for token_id in run]
        counts = None if len(ids) == len(runs) else [len(run) for run in runs]
        logprobs = None
        if any(self._device.wants_logprobs[row] for row, _ in self._work):
            logprobs = np.array(lines, np.float32), np.array([(i, i ^ 1) for i in ids]), np.full(len(ids), 3)
        sampled = [row if samples and not is_late else None for (row, samples), is_late in zip(self._work, late)]  # noqa: B905
        self._device.save_states(self._saves, self._width)
        drafts = None if self._device.drafter is None else self._device.draft(sampled, self._num_drafts)
        outputs = StepOutputs(ids, counts, logprobs=logprobs, embeddings=embeddings, drafts=drafts)
        return FakeFuture(outputs, host=self._device.host)


def make_drafter(kind: str) -> Callable[[list[int]], list[int]]:
    """Returns a drafter that is always "right", always "wrong", or right, wrong or silent at "random"."""
    drawn = random.Random(kind)
    if kind == "right":
        return lambda ids: ids
    if kind == "wrong":
        return lambda ids: [token_id ^ 1 for token_id in ids]
    return lambda ids: [drawn.choice([token_id, token_id, token_id, token_id ^ 1, -4]) for token_id in ids]


def count_lines(mask: Any, num_rows: int) -> list[int]:
    """How many tokens each row may sample: its leading lines that allow any."""
    allows = np.asarray(mask).reshape(num_rows, -1, np.asarray(mask).shape[-1]).any(-1)
    return [int(np.cumprod(row).sum()) for row in allows]


class FakeDevice:
    """Implements `engine.Runner`. A row that samples brings `draw_length(width)` tokens, where it has slots.

    With a `drafter` it brings its accepted drafts and one token more. The drafter is told the tokens that will come and
    returns as many drafts, below zero where there is none.
    """

    def __init__(self, groups: Sequence[PageGroup], *, page_size: int, vocab_size: int = 1009) -> None:
        self.groups, self.page_size, self.vocab_size = groups, page_size, vocab_size
        self.fail_next: Exception | None = None
        self.poison_rows: set[int] = set()
        self.weights = b""  # what `write_params` was given
        self.wants_edges = True
        self.draw_length: Callable[[int], int] = lambda width: width
        self.drafter: Callable[[list[int]], list[int]] | None = None
        self.max_drafts = 0
        self.drafts_always = True  # whatever the plan says, as lookups do
        self.num_lookahead_tokens = 0
        self.copy_fails: Callable[[str], bool] = lambda kind: False  # "save" or "load"
        self.keeps_states = False  # rows have a recurrent state: the tokens that it has seen
        self.plans: list[StepPlan] = []
        self.counts = StepCounts()
        self.num_programs, self.num_compiles = 1, 0
        self.reset()

    def reset(self) -> None:
        self._memory: dict[tuple[int, int], Page] = defaultdict(dict)  # (group, page)
        self.host = FakeHost(self)
        self._tables: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)  # (group, row) -> index -> page
        self._num_computed: dict[int, int] = {}
        self._begun: dict[int, int] = {}  # in front of the step under way
        self.states: dict[int, list[int]] = {}  # by row
        self.snapshots: dict[int, list[int]] = {}  # by slot
        self._last_token: dict[int, int] = {}
        self._wants_embedding: dict[int, bool] = {}
        self._most: dict[int, int] = {}  # by row: prompt and output together
        self._drafts: dict[int, list[int]] = {}  # by row: for the next step
        self._verified: dict[int, list[int]] = {}  # by row: of the step under way
        self._num_made = 0
        self.wants_logprobs: dict[int, bool] = {}

    def write_params(self, updates: Mapping[str, Any]) -> None:
        self.weights = repr(sorted(updates.items())).encode()

    def start(self, plan: StepPlan) -> FakeStep:
        self.plans.append(plan)
        self.counts.count(Bucket(plan.num_tokens // plan.width, plan.num_rows), plan.num_tokens, plan.width)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            return FakeStep(self, [], error)
        entries = [update[:3] for update in plan.page_updates]
        assert len(entries) == len(set(entries)), "one table entry is written twice in a step"
        for new_row in plan.new_rows:
            for group in range(len(self.groups)):
                self._tables[group, new_row.row].clear()
        for group, row, index, page in plan.page_updates:
            assert 0 < page < self.groups[group].num_pages
            self._tables[group, row][index] = page
        for new_row in plan.new_rows:
            self._num_computed[new_row.row] = new_row.num_computed_tokens
            self._last_token.pop(new_row.row, None)
            self._wants_embedding[new_row.row] = new_row.wants_embedding
            self._most[new_row.row] = new_row.max_num_tokens
            self.wants_logprobs[new_row.row] = new_row.params.logprobs is not None
            self.states[new_row.row] = []
        for row, slot in plan.state_loads:
            self.states[row] = list(self.snapshots[slot])
        rows = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        assert len(rows) == len(set(rows)), "one row works twice in a step"
        work = [(row, (self._last_token[row],), True) for row in plan.decode_rows]
        work += [(chunk.row, chunk.token_ids, chunk.is_last) for chunk in plan.chunks]
        for chunk in plan.chunks:
            if len(chunk.token_ids) == 1 and chunk.start == self._num_computed[chunk.row] - 1:
                self._num_computed[chunk.row] -= 1  # computed again, because its mask was late
                continue
            assert chunk.start == self._num_computed[chunk.row], "the host and the device disagree on positions"
            assert not self.wants_edges or chunk.start % CHUNK_EDGE == 0, "no grammar jumps here"
        self._copy_pages(plan)
        self._begun = dict(self._num_computed)
        for row, token_ids, _ in work:
            self._write(row, token_ids)
        assert plan.width == 1 or not plan.chunks
        if self.drafter is not None:
            self._write_drafts([row for row, _, samples in work if samples], plan.width)
            self._num_made = self.max_drafts if self.drafts_always else plan.num_drafts
        todo = [(row, samples) for row, _, samples in work]
        return FakeStep(self, todo, width=plan.width, num_drafts=self._num_made, saves=plan.state_saves)

    def save_states(self, saves: Sequence[StateSave], width: int) -> None:
        """Copies the states of rows to snapshots. With drafts only the device knows which rows are due."""
        for row, slot, point in saves:
            state = self.states[row]
            if self.drafter is None:
                assert len(state) == point, "a snapshot of other tokens"
            elif len(state) != point and (width == 1 or not self._begun[row] < point <= len(state)):
                continue
            self.snapshots[slot] = state[:point]

    def _write_drafts(self, rows: list[int], width: int) -> None:
        """Writes the drafts behind each row's last token, as a forward pass does before it knows which are right."""
        assert width <= self._num_made + 1, "more is verified than was drafted"
        for row in rows:
            start = self._num_computed[row]
            end = max(start, min(start + width - 1 + self.num_lookahead_tokens, self._most[row] - 1))
            drafts = [*self._drafts.pop(row, [])[: width - 1], *[-4] * self.max_drafts][: end - start]
            for position in range(start, end):
                for group in range(len(self.groups)):
                    page = self._tables[group, row].get(position // self.page_size)
                    assert page is not None, "a draft has no slot"
                    assert (group, page) not in self.host.loading, "a page that is being loaded is written"
                    if position - start < len(drafts):
                        self._memory[group, page][position % self.page_size] = drafts[position - start]
            self._verified[row] = drafts[: width - 1]

    def _copy_pages(self, plan: StepPlan) -> None:
        """Pages that have arrived are written first, then saves read, and no load may be seen before it has arrived."""
        self._memory |= self.host.arrived
        self.host.arrived = {}
        saves = {(group, slot): dict(self._memory[group, page]) for group, page, slot in plan.page_saves}
        assert all(len(page) == self.page_size for page in saves.values()), "only full pages are saved"
        assert len(saves) == len(plan.page_saves), "two pages are saved to one slot"
        for group, page, _ in plan.page_loads:
            self._memory.pop((group, page), None)
        self.host.begin(saves, list(plan.page_loads))

    def _write(self, row: int, token_ids: Sequence[int]) -> None:
        start = self._num_computed[row]
        for group in range(len(self.groups)):
            for position, token_id in enumerate(token_ids, start):
                page = self._tables[group, row][position // self.page_size]
                assert (group, page) not in self.host.loading, "a page that is being loaded is written"
                self._memory[group, page][position % self.page_size] = token_id
        self._num_computed[row] = start + len(token_ids)
        if self.keeps_states:
            assert len(self.states[row]) == start, "the state is not that behind the tokens so far"
            self.states[row] += token_ids

    def _read(self, group: int, row: int) -> list[int]:
        stop, window = self._num_computed[row], self.groups[group].window
        start = 0 if window is None else max(0, stop - window)
        table = self._tables[group, row]
        return [self._memory[group, table[p // self.page_size]][p % self.page_size] for p in range(start, stop)]

    def embed(self, work: list[tuple[int, bool]]) -> np.ndarray | None:
        """One line per row of the step; NaN where nobody asked, None where nobody did at all."""
        lines = np.full((len(work), 2), np.nan, np.float32)
        asked = [(index, row) for index, (row, samples) in enumerate(work) if samples and self._wants_embedding[row]]
        for index, row in asked:
            visible = [self._read(group, row) for group in range(len(self.groups))]
            lines[index] = _hash(visible, self._num_computed[row])
        return lines if asked else None

    def sample_run(self, row: int, length: int) -> tuple[list[int], list[tuple[float, float]]]:
        """Samples up to `length` tokens one after the other, and how likely each and its neighbour are.

        Whatever is planned, the row's next step has a slot for its last token: so far does the run go at most. With
        recurrent states it is of the planned length, as that of a loop: ids behind the row's last token mean nothing.
        """
        ids, lines = [], []
        while True:
            token = self._sample(row)
            ids.append(token)
            lines.append((-float(token % 89) - self._num_computed[row] / 256, -float(token % 83)))
            position = self._num_computed[row]
            if token < 0 or len(ids) == length:
                return ids, lines
            if self.keeps_states:
                if position == self._most[row] - 1:
                    missing = length - len(ids)
                    return ids + [0] * missing, lines + [(0.0, 0.0)] * missing
            elif not (self._has_slot(row, position) and self._has_slot(row, position + 1)):
                return ids, lines
            self._write(row, (token,))

    def _has_slot(self, row: int, position: int) -> bool:
        return all(position // self.page_size in self._tables[group, row] for group in range(len(self.groups)))

    def verify(self, row: int, most: int) -> tuple[list[int], list[tuple[float, float]]]:
        """Samples up to `most` tokens, as long as they are the row's drafts, and one more."""
        ids: list[int] = []
        lines: list[tuple[float, float]] = []
        drafts = self._verified[row]
        while True:
            (token,), line = self.sample_run(row, 1)
            ids.append(token)
            lines += line
            if len(ids) >= most or len(ids) > len(drafts) or token != drafts[len(ids) - 1]:
                return ids, lines
            self._write(row, (token,))

    def draft(self, rows: Sequence[int | None], count: int) -> list[list[int]]:
        """Makes `count` drafts for each row that has sampled."""
        none = [-4] * self.max_drafts
        for row in rows:
            if row is not None:
                assert self.drafter is not None
                self._drafts[row] = [*self.drafter(self._look_ahead(row, count)), *none][: self.max_drafts]
        return [none if row is None else self._drafts[row] for row in rows]

    def _look_ahead(self, row: int, count: int) -> list[int]:
        """The tokens that follow the row's last one."""
        known = [self._read(group, row) for group in range(len(self.groups))]
        ids = [self._last_token[row]]
        for number in range(1, count + 1):
            visible = [
                tokens + ids if group.window is None else (tokens + ids)[-group.window :]
                for tokens, group in zip(known, self.groups, strict=True)
            ]
            ids.append(self._hash_token(visible, self._num_computed[row] + number))
        return ids[1:]

    def _sample(self, row: int) -> int:
        visible = [self._read(group, row) for group in range(len(self.groups))]
        if self.keeps_states:
            assert all(self.states[row][-len(tokens) :] == tokens for tokens in visible), "another text's state"
        token = self._last_token[row] = self._hash_token(visible, self._num_computed[row])
        return -1 if row in self.poison_rows else token

    def _hash_token(self, visible: Sequence[Sequence[int]], length: int) -> int:
        data = b"|".join(array("q", ids).tobytes() for ids in visible) + bytes([length % 251])
        return zlib.crc32(data + self.weights) % self.vocab_size
