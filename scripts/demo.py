"""The demo: a hundred questions answered at once, then one workload served in three ways and compared.

1. About a hundred prompts for the model that ships in the package, with a live view of the engine. Stories are sampled,
   each with its own seed; everything else is greedy, in the same batch. So are the same questions to the base model and
   to its two LoRA adapters.
2. A workload with exponential prompt and output lengths: one at a time, in static batches, and continuously batched.
   Static batches are the naive baseline: in order of arrival, prompts are padded to the longest of the batch and every
   row runs to the batch's longest answer. Programs and kernels are the same. Only requested tokens count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from batching import Served, serve
from rich.console import Console
from rich.live import Live
from rich.table import Table

from jaxserve import LLM, LoRARequest, RequestOutput
from jaxserve.errors import ConfigError
from jaxserve.tools.bench.demo_questions import GREEDY, Question, make_questions
from jaxserve.tools.bench.plots import Line, check_plot_target, draw_lines, save_figure
from jaxserve.tools.bench.prompts import BenchRequest
from jaxserve.tools.cli.bench_common import make_table

ROWS = 32
ANSWERS_SHOWN = 2  # per skill
ADAPTERS = tuple(LoRARequest(name, number, f"demo:{name}") for number, name in enumerate(("subtraction", "pirate"), 1))
Ask = tuple[Question, LoRARequest | None]  # a question, and the adapter that answers it
ASKED_OF_ALL = ("What is 84 - 37?", "What is a KV cache?")
WAYS = {
    "one-at-a-time": "one at a time",
    "static": f"static batches of {ROWS}",
    "continuous": "continuous batching",
}


class LiveView:
    """A table of the engine's state, drawn a few times a second while it works."""

    def __init__(self, llm: LLM, total: int) -> None:
        self._ready, self._total = llm.ready, total
        self._start = time.perf_counter()
        self.done = 0

    def __rich__(self) -> Table:
        scheduler, counts = self._ready.engine.scheduler, self._ready.runner.counts
        pool = scheduler.pages.pools[0]
        steps = ", ".join(f"{bucket}: {number}" for bucket, number in sorted(counts.steps.items()))
        table = Table(title="jaxserve", min_width=64)
        table.add_column("now")
        table.add_column("", justify="right")
        table.add_row("requests finished", f"{self.done} of {self._total}")
        table.add_row("rows running / waiting", f"{len(scheduler.batch)} / {len(scheduler.waiting)}")
        table.add_row(
            "KV pages in use / cached / all", f"{pool.num_referenced} / {pool.num_cached} / {pool.num_pages - 1}"
        )
        rate = counts.useful_tokens / (time.perf_counter() - self._start)
        table.add_row("tokens computed per second", f"{rate:,.0f}")
        table.add_row("steps by bucket", steps or "none yet")
        table.add_row("useful / padded tokens", f"{counts.useful_tokens / max(1, counts.padded_tokens):.2f}")
        return table


def answer_live(llm: LLM, asks: Sequence[Ask], console: Console) -> list[RequestOutput]:
    """Answers all questions at once and shows the engine meanwhile."""
    ready = llm.ready
    requests = [
        ready.requests.make_chat([{"role": "user", "content": question.text}], question.params, lora_request=adapter)
        for question, adapter in asks
    ]
    for request in requests:
        ready.engine.add_request(request)
    view, outputs = LiveView(llm, len(requests)), {}
    with Live(view, console=console, refresh_per_second=8):
        while ready.engine.has_unfinished:
            outputs.update((output.request_id, output) for output in ready.engine.step() if output.finished)
            view.done = len(outputs)
    console.print()
    return [outputs[request.request_id] for request in requests]


def show_adapted(asks: Sequence[Ask], outputs: Sequence[RequestOutput], console: Console) -> None:
    """Prints what the base model and its adapters answered to the same questions, in one batch."""
    rows = [
        (
            question.text if adapter is None else "",
            "the base model" if adapter is None else adapter.lora_name,
            output.outputs[0].text.strip(),
        )
        for (question, adapter), output in zip(asks, outputs, strict=True)
    ]
    console.print(make_table("One batch, three models", ("question", "answered by", "answer"), rows, left=(0, 1, 2)))


def make_load(count: int, vocab_size: int, rng: random.Random) -> list[BenchRequest]:
    """Returns requests with exponential prompt and output lengths."""
    requests = []
    for _ in range(count):
        num_prompt = min(8 + int(rng.expovariate(1 / 48)), 384)
        num_output = min(4 + int(rng.expovariate(1 / 60)), 320)
        ids = tuple(rng.randrange(10, vocab_size) for _ in range(num_prompt))
        requests.append(BenchRequest(ids, None, num_prompt, num_output))
    return requests


def compare(llm: LLM, requests: Sequence[BenchRequest], console: Console) -> list[Served]:
    """Serves the workload in three ways and prints one table."""
    results = []
    for way, name in WAYS.items():
        with console.status(f"serving {name} ..."):
            results.append(serve(llm, requests, way, rows=ROWS))
    best = results[-1]
    rows = []
    for result in results:
        p50, p99 = (statistics.quantiles(result.latencies, n=100)[q] for q in (49, 98))
        factor = "" if result is best else f"{best.rate / result.rate:.1f}x"
        times = f"{result.seconds:.1f}", f"{result.rate:,.0f}", f"{p50:.2f} s", f"{p99:.2f} s"
        rows.append((WAYS[result.way], *times, factor))
    title = f"{len(requests)} requests, {best.num_tokens:,} output tokens, {ROWS} rows, measured just now"
    header = "", "seconds", "tokens/s", "p50 latency", "p99 latency", "slower by"
    console.print(make_table(title, header, rows, left=(0,)))
    return results


def plot(results: Sequence[Served], path: Path) -> None:
    """Draws the requests finished over time, one stepped line per way."""
    count, tokens = len(results[0].ends), results[0].num_tokens
    title = f"The same programs, served three ways\n{count} requests, {tokens:,} output tokens, {ROWS} rows"
    lines = [
        Line(f"{WAYS[each.way]}: all after {max(each.ends):.1f} s", [0.0, *sorted(each.ends)], range(count + 1))
        for each in results
    ]
    x_label = "seconds since all requests arrived"
    save_figure(draw_lines(title, x_label, "requests finished", lines, steps=True), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=100, help="prompts answered live (default: 100)")
    parser.add_argument("--num-requests", type=int, default=128, help="requests of the compared load (default: 128)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the comparison as a .png or .svg")
    args = parser.parse_args()
    if args.plot is not None:
        try:
            check_plot_target(str(args.plot))
        except ConfigError as error:
            parser.error(str(error))
    console, rng = Console(), random.Random(args.seed)
    start = time.perf_counter()
    adapted = {"enable_lora": True, "max_loras": len(ADAPTERS), "max_lora_rank": 8}
    llm = LLM(max_num_seqs=ROWS, enable_prefix_caching=True, compile="all", **adapted)
    console.print(f"Ready after {time.perf_counter() - start:.1f} s; nothing is compiled from here on.")
    questions = make_questions(args.num_prompts, rng)
    asked_of_all = [Question("", text, GREEDY) for text in ASKED_OF_ALL]
    of_all: list[Ask] = [(question, adapter) for question in asked_of_all for adapter in (None, *ADAPTERS)]
    outputs = answer_live(llm, [*of_all, *((question, None) for question in questions)], console)
    shown: Counter[str] = Counter()
    for question, output in zip(questions, outputs[len(of_all) :], strict=True):
        shown[question.skill] += 1
        if shown[question.skill] <= ANSWERS_SHOWN:
            console.print(f"[bold]> {question.text}[/]\n{output.outputs[0].text.strip()}", highlight=False)
    show_adapted(of_all, outputs[: len(of_all)], console)
    results = compare(llm, make_load(args.num_requests, llm.ready.shapes.model.vocab_size, rng), console)
    if args.plot is not None:
        plot(results, args.plot)
        console.print(f"The plot is in {args.plot}.")


if __name__ == "__main__":
    main()
