"""Benchmark of structured output: its cost per token in the real loop, on a device that only takes time.

The device answers a step a fixed time after it was started, with random tokens that its masks and automata allow.
Everything on the host is real: scheduler, masks in threads, matchers, detokenizing. Rows with a JSON schema, and rows
of free text beside a strict tool that is never called, are compared with the same rows without a grammar. Requests
whose answer is one of a few texts are served with automata and with masks.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
from instrument import Instrument, make_parser, read_run

from jaxserve import SamplingParams, StructuredOutputsParams
from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.scheduler import Scheduler, SchedulerLimits, StepOutputs, StepPlan
from jaxserve.core.scheduler.sequence import MASK_LATE
from jaxserve.engine.engine import Engine
from jaxserve.engine.prompts import RequestFactory
from jaxserve.presets import demo_model_dir
from jaxserve.server.tools import ToolSet, constrain_calls
from jaxserve.server.tools.spec import Tool
from jaxserve.token_automaton import TokenAutomaton
from jaxserve.tokenizers import load_tokenizer

PAGE_SIZE, CONTEXT = 64, 4096
SCHEMA = {
    "type": "array",
    "minItems": 200,  # so that no row ends during the measurement
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "kind": {"enum": ["cat", "dog", "bird"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": False,
    },
}


STRICT = ToolSet((Tool("add_people", None, {"type": "object", "properties": {"people": SCHEMA}}, strict=True),))
ANSWERS = StructuredOutputsParams(regex="[A-D][0-9][a-d]?")


class SlowStep:
    """A step that ends `device.seconds` after its start, or when the host samples from it, if that is later."""

    def __init__(self, device: SlowDevice, rows: list[int]) -> None:
        self._device, self._rows = device, rows
        begin = max(time.perf_counter(), device.busy_until)
        device.busy_until = self._end = begin + device.seconds

    def sample(self, mask: Any = None) -> SlowStep:
        self._ids = self._device.draw(self._rows, mask)
        self._end = max(self._end, time.perf_counter())
        return self

    def result(self) -> StepOutputs:
        time.sleep(max(0.0, self._end - time.perf_counter()))
        return StepOutputs(self._ids)


class SlowDevice:
    """Implements `engine.Runner`."""

    num_compiles = 0

    def __init__(self, seconds: float, vocab_size: int) -> None:
        self.seconds, self.busy_until, self.late = seconds, 0.0, 0
        self._vocab_size, self._rng = vocab_size, np.random.default_rng(0)
        self._automata: dict[int, tuple[dict[int, dict[int, int]], int]] = {}  # by row: following states, current state

    def start(self, plan: StepPlan) -> SlowStep:
        for new_row in plan.new_rows:
            self._automata.pop(new_row.row, None)
            if new_row.history is not None and new_row.history.automaton is not None:
                self._automata[new_row.row] = list_following(new_row.history.automaton), 0
        return SlowStep(self, [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)])

    def draw(self, rows: list[int], mask: Any) -> list[int]:
        ids = self._rng.integers(3, self._vocab_size, len(rows)).tolist()
        for index, row in enumerate(rows):
            if row in self._automata:
                following, state = self._automata[row]
                ids[index] = int(self._rng.choice(list(following[state])))
                self._automata[row] = following, following[state][ids[index]]
            elif mask is not None:
                bits = np.unpackbits(mask[index].view(np.uint8), bitorder="little")
                allowed = np.flatnonzero(bits[: self._vocab_size])
                allowed = allowed[allowed >= 3] if (allowed >= 3).any() else allowed  # no row ends while it may go on
                self.late += not len(allowed)
                ids[index] = int(self._rng.choice(allowed)) if len(allowed) else MASK_LATE
        return ids

    def reset(self) -> None:
        raise AssertionError("no step fails here")


def list_following(automaton: TokenAutomaton) -> dict[int, dict[int, int]]:
    """Returns the next state by state and token."""
    following: dict[int, dict[int, int]] = {}
    for state, token, after in automaton.transitions:
        following.setdefault(state, {})[token] = after
    return following


def make_engine(rows: int, seconds: float) -> tuple[Engine, RequestFactory, SlowDevice]:
    """Returns an engine on a slow device, its request factory and the device."""
    tokenizer = load_tokenizer(demo_model_dir())
    device = SlowDevice(seconds, tokenizer.vocab_size)
    limits = SchedulerLimits(
        max_num_seqs=rows,
        max_num_batched_tokens=rows + 4096,
        max_model_len=CONTEXT,
        max_prefix_updates=CONTEXT // PAGE_SIZE,
    )
    pages = PageManager(
        [PageGroup(rows * CONTEXT // PAGE_SIZE + 1)],
        page_size=PAGE_SIZE,
        max_chunk=rows + 4096,
        enable_prefix_caching=False,
    )
    engine = Engine(Scheduler(limits, pages), device, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer)
    requests = RequestFactory(
        tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=(), seed=0, max_model_len=CONTEXT, max_logprobs=0
    )
    return engine, requests, device


def measure_answers(rows: int, seconds: float, count: int, *, has_automaton: bool) -> dict[str, float]:
    """Returns milliseconds per short answer, over `count` answers, `rows` at a time, with an automaton or masks."""
    engine, requests, _ = make_engine(rows, seconds)
    params = SamplingParams(max_tokens=None, structured_outputs=ANSWERS)
    made = [requests.make("Is it so?", params) for _ in range(count)]
    for request in made:
        engine.add_request(request if has_automaton else replace(request, automaton=None))
    start, tokens = time.perf_counter(), 0
    while engine.has_unfinished:
        outputs = engine.step()
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs if output.finished)
    return {"ms_per_answer": 1e3 * (time.perf_counter() - start) / count, "tokens_per_answer": tokens / count}


def measure(rows: int, seconds: float, steps: int, structured: StructuredOutputsParams | None) -> dict[str, float]:
    """Returns milliseconds per step with `rows` rows decoding, and how many masks were late."""
    engine, requests, device = make_engine(rows, seconds)
    params = SamplingParams(max_tokens=None, ignore_eos=True, structured_outputs=structured)
    for _ in range(rows):
        engine.add_request(requests.make("People:", params))
    while len(engine.scheduler.batch.decoding) < rows:
        engine.step()
    for _ in range(4):
        engine.step()
    tokens_before = sum(len(stream.token_ids) for stream in engine.scheduler.batch.by_ticket.values())
    times, cpu = [], time.process_time()
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - start))
    cpu_end = time.process_time()
    tokens = sum(len(stream.token_ids) for stream in engine.scheduler.batch.by_ticket.values()) - tokens_before
    return {
        "ms_per_step": statistics.fmean(times),
        "cpu_ms_per_step": 1e3 * (cpu_end - cpu) / steps,
        "tokens_per_step": tokens / steps,
        "late_rows": device.late,
        "open_rows": len(engine.scheduler.batch),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--ms", type=float, default=20, help="what a step takes the device (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100)
    run = read_run(parser, {"rows": [4], "steps": 10})
    args = run.args
    forms = {
        "a JSON schema on every row": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
        "free text beside a strict tool on every row": constrain_calls(STRICT, "hermes", None, {}),
    }
    found = [compare_forms(run, name, form) for name, form in forms.items()]
    answers = [compare_answers(rows, args.ms / 1e3, args.steps) for rows in args.rows]
    show_answers(run, answers)
    run.save({"schema": found[0], "strict_tool": found[1], "answers": answers})


def compare_forms(run: Instrument, name: str, form: StructuredOutputsParams | None) -> list[dict[str, Any]]:
    """Prints and returns what a step takes with and without a grammar."""
    args, found, lines = run.args, [], []
    for rows in args.rows:
        free, formed = (measure(rows, args.ms / 1e3, args.steps, given) for given in (None, form))
        cost = formed["ms_per_step"] / free["ms_per_step"] - 1
        found.append({"rows": rows, "free": free, "structured": formed, "cost": cost})
        cells = (f"{free['ms_per_step']:.2f}", f"{formed['ms_per_step']:.2f}", f"{cost:+.1%}")
        cpu = f"{free['cpu_ms_per_step']:.2f}", f"{formed['cpu_ms_per_step']:.2f}"
        lines.append((str(rows), *cells, *cpu, f"{formed['tokens_per_step']:.1f}", str(formed["late_rows"])))
    header = ("rows", "free, ms", "structured, ms", "cost", "free, CPU ms", "structured, CPU ms")
    title = f"A step of {args.ms:g} ms, mean of {args.steps} steps, {name}"
    run.show(title, (*header, "tokens per step", "late or jumping rows"), lines, left=())
    return found


def compare_answers(rows: int, seconds: float, steps: int) -> dict[str, Any]:
    """Returns the figures of short answers with automata and with masks."""
    count = max(4, rows * steps // 10)
    masks, automata = (measure_answers(rows, seconds, count, has_automaton=has) for has in (False, True))
    return {"rows": rows, "count": count, "masks": masks, "automata": automata}


def show_answers(run: Instrument, answers: list[dict[str, Any]]) -> None:
    """Prints the figures of short answers."""
    lines = []
    for each in answers:
        masks, automata = each["masks"], each["automata"]
        times = f"{masks['ms_per_answer']:.2f}", f"{automata['ms_per_answer']:.2f}"
        lines.append((str(each["rows"]), str(each["count"]), f"{automata['tokens_per_answer']:.1f}", *times))
    header = "rows", "answers", "tokens of each", "with masks, ms each", "with automata"
    run.show("Answers that are one of a few texts", header, lines, left=())


if __name__ == "__main__":
    main()
