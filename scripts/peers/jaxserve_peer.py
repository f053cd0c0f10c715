"""jaxserve itself; job["options"] are options of the engine. Run by the interpreter that compares."""

from __future__ import annotations

from typing import Any

import protocol


def load(job: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the function that runs requests, and facts."""
    import jax

    from jaxserve import LLM, SamplingParams, __version__

    options = {
        "dtype": job["dtype"],
        "max_num_seqs": job["rows"],
        "max_model_len": job["max_model_len"],
        "enable_prefix_caching": False,
        "compile": "all",
        "skip_tokenizer_init": True,
        "show_progress": False,
        **job["options"],
    }
    llm = LLM(job["model"], **options)

    runner = llm.ready.runner

    def run(requests: list[dict[str, Any]]) -> dict[str, Any]:
        before = runner.num_compiles
        prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in requests]
        params = [
            SamplingParams(
                temperature=0, max_tokens=request["max_tokens"], ignore_eos=job["ignore_eos"], detokenize=False
            )
            for request in requests
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        return {"outputs": ids, "num_compiled": runner.num_compiles - before}

    return run, {"library": f"jaxserve {__version__}, jax {jax.__version__}", "dtype": options["dtype"]}


if __name__ == "__main__":
    protocol.main(load)
