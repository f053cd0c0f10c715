"""Rank 0 as a Python program that loads adapters while it serves. Prints the tokens and the refusals as JSON.

python tests/nodes/adapter_planner.py OPTIONS    (JSON; paths of adapters are below the current directory)
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from pathlib import Path

PATHS = ("first", "missing", "cut", "different", "second", "first")
"""Loads of one adapter after another; on the other node, three of them are not what they are here."""

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from jaxserve import LLM, LoRARequest, SamplingParams
    from jaxserve.errors import WeightsError
    from jaxserve.request import Request
    from tests.nodes.strict import refuse_collectives

    refuse_collectives()
    ready = LLM(**json.loads(sys.argv[1])).ready
    engine, store, requests, refusals = ready.engine, ready.adapters, queue.SimpleQueue[Request | None](), {}
    assert store is not None
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def load_all() -> None:
        """Replaces the adapter `one` by each path in turn and has a request for it, then unloads it."""
        for path in PATHS:
            wanted = LoRARequest("one", 1, path)
            try:
                store.find(wanted, anew=True)
            except WeightsError as error:
                refusals[path] = str(error)
                continue
            requests.put(ready.requests.make("What is 84 - 37?", params, lora_request=wanted))
        store.remove("one")
        requests.put(None)

    def serve() -> list[list[int]]:
        """Runs steps until all is loaded and answered; a request of the base model is always there."""
        number, is_loading, tokens, names = 0, True, dict[str, list[int]](), list[str]()
        while is_loading or engine.has_unfinished:
            if is_loading and not engine.scheduler.batch.decoding:
                engine.add_request(ready.requests.make("Tell me a story.", params))
                number += 1
            while not requests.empty():
                if (request := requests.get()) is None:
                    is_loading = False
                    continue
                engine.add_request(request)
                names.append(request.request_id)
            for output in engine.step():
                if output.finished:
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
        return [tokens[name] for name in names]

    before = ready.runner.num_compiles
    threading.Thread(target=load_all, daemon=True).start()
    found = {"ids": serve(), "refusals": refusals, "compiles": ready.runner.num_compiles - before}
    print("FOUND " + json.dumps(found))
