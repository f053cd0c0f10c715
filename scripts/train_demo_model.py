"""Trains the demo model that ships in the package, on text that it generates itself, and exports it.

A step takes about a second of one core with AMX. A run that was stopped resumes from its newest checkpoint when it is
started again with the same arguments; with `--steps` no larger than that checkpoint's, it only exports. `--init` begins
with the weights of an older demo model, whatever its vocabulary. The C library takes memory anew in each step, which is
a fifth of the time, unless these are set: MALLOC_MMAP_MAX_=0 MALLOC_ARENA_MAX=1 MALLOC_TRIM_THRESHOLD_=100000000000
MALLOC_TOP_PAD_=1000000000.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from demo_lm.answering import answer_exam
from demo_lm.exam import list_tool_problems
from demo_lm.export import export_checkpoint, load_checkpoint
from demo_lm.model import DemoModel
from demo_lm.scoring import export_scores, list_problems, show_scores
from demo_lm.tokens import load_tokenizer
from demo_lm.training import Settings, run_training
from rich.console import Console

_SHOWN = 10  # wrong answers that are printed


def main() -> int:
    """Trains, exports and examines the exported model; returns 0 if every threshold is reached."""
    arguments = _parse_arguments()
    console = Console()
    settings = Settings(
        arguments.directory, arguments.steps, arguments.seed, check_every=arguments.check_every, init=arguments.init
    )
    config, params, tokenizer_path = run_training(settings, console)
    if arguments.export is None:
        return 0
    export_checkpoint(arguments.export, config, params, tokenizer_path)
    size = (arguments.export / "model.safetensors").stat().st_size
    console.print(f"exported to {arguments.export}: {size / 1e6:.1f} MB of weights", highlight=False)
    return _examine(arguments.export, console)


def _examine(directory: Path, console: Console) -> int:
    """Examines the exported model, whose weights are rounded to bfloat16."""
    config, params = load_checkpoint(directory)
    tokenizer = load_tokenizer(directory / "tokenizer.model")
    with console.status("the exam: greedy answers to unseen questions"):
        scores = answer_exam(DemoModel(config), params, tokenizer, [*list_problems(), *list_tool_problems()])
    console.print(show_scores(scores))
    for problem, answer in scores.wrong[:_SHOWN]:
        console.print(
            json.dumps({"question": problem.question, "expected": problem.expected, "answer": answer}), soft_wrap=True
        )
    console.print(json.dumps(export_scores(scores)["skills"]))
    return 0 if scores.passes() else 1


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--directory", type=Path, default=Path("demo_training"), help="tokenizer, checkpoints, log (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=1500, help="steps of 4096 tokens (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and documents (%(default)s)")
    parser.add_argument(
        "--check-every", type=int, default=150, help="steps from one checkpoint to the next (%(default)s)"
    )
    parser.add_argument("--init", type=Path, help="begin with the weights of this exported checkpoint, not at random")
    parser.add_argument("--export", type=Path, help="write a Hugging Face checkpoint here and examine it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
