"""One start of an engine, or one build of a bundle, in this process: `python scripts/start_engine.py TASK`.

TASK is a JSON object: `options` of the engine, and perhaps `bundle`, the directory to build instead. The last line on
standard output is a JSON object of figures. Errors that a user can fix are one line, with status 2.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from jaxserve.errors import JaxServeError

PROMPT = (5, 6, 7)
NUM_TOKENS = 16


def start(options: dict[str, Any], begun: float) -> dict[str, Any]:
    """Starts an engine and lets it answer once; returns seconds since `begun`, counts, and the answer's tokens."""
    import jax

    compiled, hits = list[float](), list[str]()

    def hear_end(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":  # also sent where the cache has the program
            compiled.append(seconds)

    def hear(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    jax.monitoring.register_event_duration_secs_listener(hear_end)
    jax.monitoring.register_event_listener(hear)
    from jaxserve import LLM, SamplingParams

    llm = LLM(**options, show_progress=False)
    ready, cpu = time.perf_counter() - begun, time.process_time()
    counts = {"num_compiled": len(compiled) - len(hits), "num_cached": len(hits)}
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    output = llm.generate([{"prompt_token_ids": list(PROMPT)}], params, use_tqdm=False)[0]
    answered = time.perf_counter() - begun
    tokens = list(output.outputs[0].token_ids)
    return {"seconds": ready, "cpu_seconds": cpu, "answer_seconds": answered, "tokens": tokens, **counts}


def build(options: dict[str, Any], folder: Path, begun: float) -> dict[str, Any]:
    """Builds a bundle for this machine's devices; returns seconds since `begun` and its size."""
    from jaxserve.config import EngineConfig
    from jaxserve.engine.bundle import build_bundle
    from jaxserve.engine.model_files import locate_model

    config = EngineConfig.from_options(**options)
    build_bundle(config, locate_model(config.model, need_weights=False), folder, None)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"seconds": time.perf_counter() - begun, "size_bytes": size}


def main() -> int:
    """Does the task of the command line."""
    begun, task = time.perf_counter(), json.loads(sys.argv[1])
    try:
        if "bundle" in task:
            found = build(task["options"], Path(task["bundle"]), begun)
        else:
            found = start(task["options"], begun)
    except JaxServeError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
