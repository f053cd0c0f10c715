"""`jaxserve serve` on a device that answers from a script; templates, caches, readers and writers are the real ones.

Takes the flags of `jaxserve serve`, and `--script FILE`: JSON pairs of a cue and an answer. The pair whose cue comes
last in a prompt answers it. As with a real KV cache, the device knows of a prompt only what was written into its pages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxserve.core.pages import PageGroup
from jaxserve.core.runtime import startup
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.core.scheduler import StepPlan
from jaxserve.engine import build
from jaxserve.presets import demo_model_dir
from jaxserve.tokenizers import load_tokenizer
from jaxserve.tools import cli
from tests.fake_device import FakeDevice, FakeStep

type Script = Sequence[tuple[str, str]]  # cues and answers
NOTHING = "There is nothing to do."  # the answer to a prompt without any cue


class ScriptedDevice(FakeDevice):
    """Keeps the tokens of prompts in pages, as `FakeDevice` does, and samples the tokens of an answer."""

    def __init__(self, groups: Sequence[PageGroup], *, page_size: int, script: Script) -> None:
        super().__init__(groups, page_size=page_size)
        self._tokenizer = load_tokenizer(demo_model_dir())
        self._script, self.wants_edges = script, False  # grammars jump
        self.step_costs: dict[tuple[int, int], float] = {}
        self._answers: dict[int, tuple[int, list[int]]] = {}  # by row: where the answer begins, and its tokens

    def start(self, plan: StepPlan) -> FakeStep:
        self.plans.clear()
        for new_row in plan.new_rows:
            self._answers.pop(new_row.row, None)
        return super().start(plan)

    def warm_thread(self) -> None:
        """Does nothing."""

    def _sample(self, row: int) -> int:
        if row not in self._answers:
            text = self._choose_answer(self._tokenizer.decode(self._read(0, row), False))
            self._answers[row] = self._num_computed[row], self._tokenizer.encode(text, add_special_tokens=False)
        begin, answer = self._answers[row]
        at = self._num_computed[row] - begin
        self._last_token[row] = answer[at] if at < len(answer) else self._tokenizer.eos_token_id
        return self._last_token[row]

    def _choose_answer(self, prompt: str) -> str:
        place, answer = max((prompt.rfind(cue), answer) for cue, answer in self._script)
        return answer if place >= 0 else NOTHING


def install(script: Script) -> None:
    """Lets the engine that is built afterwards run on a `ScriptedDevice` with pages for all its rows."""

    def start_runner(shapes: Shapes, *_: Any, **__: Any) -> tuple[Any, Any]:
        scheduler = shapes.config.scheduler
        num_pages = 1 + scheduler.max_num_seqs * shapes.state.pages_per_row
        plan = startup.plan_cache(
            shapes.model,
            specs=shapes.specs,
            max_chunk=scheduler.max_num_batched_tokens,
            num_devices=1,
            budget=0,
            override=num_pages,
        )
        groups = startup.page_groups(shapes, plan)
        return ScriptedDevice(groups, page_size=shapes.config.cache.page_size, script=script), plan

    startup.start_runner = start_runner  # type: ignore[assignment]
    build.load_params = lambda *_, **__: {}  # type: ignore[assignment]


if __name__ == "__main__":
    place = sys.argv.index("--script")
    install(json.loads(Path(sys.argv[place + 1]).read_text()))
    del sys.argv[place : place + 2]
    sys.exit(cli.main())
