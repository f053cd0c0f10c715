"""Rank 0 as a Python program: answers, and answers again after each change of weights. Prints the tokens as JSON.

python tests/nodes/planner.py OPTIONS PROMPTS CHECKPOINT...    (the first two are JSON)

A prompt may have `pictures`, each [height, width, seed].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from jaxserve import LLM, SamplingParams
    from tests.e2e.image_prompts import picture
    from tests.nodes.strict import refuse_collectives

    options, prompts, checkpoints = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    refuse_collectives()
    params = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=1, seed=7, max_tokens=60, ignore_eos=True),
    ]

    for prompt in prompts:
        if isinstance(prompt, dict) and (pictures := prompt.pop("pictures", None)):
            prompt["multi_modal_data"] = {"image": [picture(*each) for each in pictures]}

    def answer(llm: LLM) -> list[Any]:
        """Token ids of each prompt with each of the parameters."""
        requests = [(prompt, each) for prompt in prompts for each in params]
        outputs = llm.generate([prompt for prompt, _ in requests], [each for _, each in requests])
        return [list(output.outputs[0].token_ids) for output in outputs]

    llm = LLM(**options)
    found = [answer(llm)]
    compiles = llm.ready.runner.num_compiles
    for checkpoint in checkpoints:
        llm.update_weights(checkpoint)
        found.append(answer(llm))
    counts = llm.ready.engine.scheduler.counts
    shown = {"ids": found, "compiles": llm.ready.runner.num_compiles - compiles}
    shown |= {"hits": counts.prefix_hits, "preemptions": counts.num_preemptions}
    shown |= {"accepted": counts.num_accepted_tokens, "images": llm.ready.runner.counts.tower_images}
    print("FOUND " + json.dumps(shown))
