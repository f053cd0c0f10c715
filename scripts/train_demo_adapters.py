"""Trains the two demo adapters that ship in the package, on text that it generates itself, and examines them.

Each takes some minutes of one CPU core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo_lm.adapter import AdapterSettings, export_adapter, load_adapter, merge, train_adapter
from demo_lm.adapter_texts import ADAPTERS, list_adapter_problems
from demo_lm.answering import answer_exam
from demo_lm.export import load_checkpoint
from demo_lm.model import DemoModel
from demo_lm.scoring import show_scores
from demo_lm.tokens import load_tokenizer
from rich.console import Console

_DEMO = Path(__file__).parents[1] / "jaxserve" / "demo"
_SHOWN = 5  # wrong answers that are printed


def main() -> int:
    """Trains, exports and examines the exported adapters; returns 0 if every threshold is reached."""
    arguments = _parse_arguments()
    console, passes = Console(), True
    config, params = load_checkpoint(_DEMO)
    model, tokenizer = DemoModel(config), load_tokenizer(_DEMO / "tokenizer.model")
    for name in arguments.names:
        settings = AdapterSettings(name, arguments.steps, arguments.seed)
        adapter = train_adapter(model, params, tokenizer, settings, console)
        export_adapter(arguments.export / name, adapter)
        written = merge(params, load_adapter(arguments.export / name, adapter))
        problems = [problem for problem in list_adapter_problems() if problem.adapter == name]
        scores = answer_exam(model, written, tokenizer, problems)
        console.print(show_scores(scores))
        for problem, answer in scores.wrong[:_SHOWN]:
            console.print(f"{problem.question}\n  {problem.expected}\n  {answer}", markup=False, highlight=False)
        passes &= scores.passes()
    return 0 if passes else 1


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, required=True, help="write a directory for each adapter into this one")
    parser.add_argument("--names", nargs="+", choices=ADAPTERS, default=list(ADAPTERS), help="adapters (all)")
    parser.add_argument("--steps", type=int, default=300, help="steps of 3072 tokens (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and documents (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
