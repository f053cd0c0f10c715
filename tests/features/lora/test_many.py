"""Many adapters through few slots of a real engine: nothing is compiled, drained or kept, and no step waits for one."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import LLM, LoRARequest
from jaxserve.core.runtime.tee import TeeRunner
from jaxserve.core.scheduler import StepPlan
from jaxserve.core.scheduler.step_plan import StepOutputs
from jaxserve.request import Request
from tests.e2e.helpers import greedy, make_llm
from tests.features.lora.adapter_files import AdapterSpec, write_adapter
from tests.golden_cases import load_case

CASE = load_case("llama_gqa")
ADAPTERS, FOLDERS, SLOTS, OUTSTANDING = 1000, 25, 4, 8
PROMPT = {"prompt_token_ids": [7, 9, 11, 13]}


class InFlight:
    """Notes the writes of slots, and how many steps were in flight when a plan had any."""

    def __init__(self) -> None:
        self.num_steps, self.num_writes, self.at_writes = 0, 0, list[int]()

    def start(self, plan: StepPlan) -> None:
        if plan.adapter_writes:
            self.at_writes.append(self.num_steps)
            self.num_writes += len(plan.adapter_writes)
        self.num_steps += 1

    def finish(self, step_id: int, outputs: StepOutputs) -> None:
        self.num_steps -= 1

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def write_folders(folder: Path, count: int) -> list[str]:
    found = []
    for number in range(count):
        spec = AdapterSpec(1 + number % 8, seed=number, alpha=16.0, size=0.2)
        found.append(str(write_adapter(CASE.path, folder / str(number), spec)))
    return found


def measure(llm: LLM) -> tuple[int, int]:
    """Arrays on the device, and their bytes."""
    gc.collect()
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


@pytest.mark.thorough
def test_a_thousand_adapters_pass_through_four_slots(tmp_path: Path) -> None:
    folders = write_folders(tmp_path, FOLDERS)
    llm = make_llm(
        CASE,
        enable_lora=True,
        max_loras=SLOTS,
        max_lora_rank=8,
        compile="all",
        max_num_seqs=8,
        precompile_bs_paddings=[8],
    )
    ready = llm.ready
    engine, store, in_flight = ready.engine, ready.adapters, InFlight()
    assert store is not None
    expected = [
        llm.generate(PROMPT, greedy(3), lora_request=LoRARequest(f"alone {number}", number, folder), use_tqdm=False)
        for number, folder in enumerate(folders, ADAPTERS + 1)
    ]
    tokens = [outputs[0].outputs[0].token_ids for outputs in expected]
    assert len(set(map(tuple, tokens))) > FOLDERS // 2
    engine.runner = TeeRunner(engine.runner, in_flight)
    programs = ready.runner.num_programs

    def make() -> Iterator[Request]:
        for number in range(1, ADAPTERS + 1):
            wanted = LoRARequest(f"a{number}", number, folders[number % FOLDERS])
            yield ready.requests.make(PROMPT, greedy(3), lora_request=wanted, request_id=f"{number}")

    requests, waiting, sizes = make(), 0, list[tuple[int, int]]()
    done, is_base = 0, 0
    while done < ADAPTERS:
        if not is_base:  # there is always a row that decodes, so a step in flight that could be drained
            engine.add_request(ready.requests.make(PROMPT, greedy(100, ignore_eos=True), request_id=f"base {done}"))
            is_base = 1
        for request in itertools.islice(requests, OUTSTANDING - waiting):
            engine.add_request(request)
            waiting += 1
        for output in engine.step():
            if not output.finished:
                continue
            if output.request_id.startswith("base"):
                is_base = 0
                continue
            assert output.outputs[0].token_ids == tokens[int(output.request_id) % FOLDERS]
            waiting, done = waiting - 1, done + 1
            assert store.num_live <= SLOTS + OUTSTANDING + 1
            if done in (100, ADAPTERS - 100):
                sizes.append(measure(llm))
    assert in_flight.num_writes >= ADAPTERS
    assert in_flight.at_writes.count(0) < len(in_flight.at_writes) / 10, "steps in flight are waited for"
    assert sizes[0] == sizes[1], "memory grows"
    assert (ready.runner.num_programs, ready.runner.num_compiles) == (programs, 0)


def test_steps_go_on_while_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = write_folders(tmp_path, 2)
    llm = make_llm(CASE, enable_lora=True, max_loras=2, max_lora_rank=8)
    ready = llm.ready
    store, found = ready.adapters, list[Request]()
    assert store is not None
    wanted = [LoRARequest(f"a{number}", number, folder) for number, folder in enumerate(folders, 1)]
    read, is_reading, may_read = store._read, threading.Event(), threading.Event()

    def read_slowly(folder: Path) -> Any:
        if folder == Path(folders[1]):
            is_reading.set()
            assert may_read.wait(60)
        return read(folder)

    monkeypatch.setattr(store, "_read", read_slowly)
    loading = threading.Thread(target=lambda: found.append(make(wanted[1])))

    def make(adapter: LoRARequest | None) -> Request:
        return ready.requests.make(PROMPT, greedy(6), lora_request=adapter)

    assert make(wanted[0]).adapter is not None  # it is read; only one is at a time
    loading.start()
    assert is_reading.wait(60)
    before = llm.generate([PROMPT] * 2, greedy(6), lora_request=[None, wanted[0]], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in before] == [6, 6] and not found
    may_read.set()
    loading.join(60)
    assert found[0].adapter is not None and store.counts.loads == 2
