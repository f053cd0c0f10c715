"""Trains the EAGLE-3 head of the demo model that ships in the package, on text that the demo model writes itself.

It takes about twenty minutes on two CPU cores: the target writes its answers through the engine, the head learns from
the target's states with training-time test, and the exported head is measured on unseen questions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo_lm.export import load_checkpoint
from demo_lm.head import Head, HeadConfig
from demo_lm.head_export import export_head, load_head
from demo_lm.head_scoring import LEAST_LENGTH, measure_head, show_lengths, sum_lengths
from demo_lm.head_texts import Text, choose_draft_ids, draw_prompts, list_held_out_prompts, write_texts
from demo_lm.head_training import HeadSettings, Target, train_head
from demo_lm.model import DemoModel
from demo_lm.tokens import load_tokenizer
from rich.console import Console

_DEMO = Path(__file__).parents[1] / "jaxserve" / "demo"


def main() -> int:
    """Trains, exports and measures the exported head; returns 0 if its runs are long enough."""
    arguments = _parse_arguments()
    console = Console()
    config, params = load_checkpoint(arguments.target)
    tokenizer = load_tokenizer(arguments.target / "tokenizer.model")
    prompts = draw_prompts(tokenizer, arguments.texts, arguments.seed)
    held_out = list_held_out_prompts(tokenizer, arguments.problems)
    written = write_texts(arguments.target, [*prompts, *held_out], arguments.seed)
    texts, exam = written[: len(prompts)], written[len(prompts) :]
    draft_ids, share = choose_draft_ids(texts, config.vocab_size, arguments.draft_vocab_size)
    console.print(
        f"{sum(len(text.answer) for text in texts):,} tokens to learn from, "
        f"{share:.2%} of them in the draft vocabulary of {len(draft_ids)}",
        highlight=False,
    )
    target = Target(DemoModel(config), params, draft_ids)
    shared = {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "rope_theta", "rms_norm_eps")}
    head_config = HeadConfig(**shared, draft_vocab_size=len(draft_ids))
    settings = HeadSettings(arguments.steps, arguments.passes, arguments.seed)
    export_head(arguments.export, head_config, train_head(head_config, target, texts, settings, console), draft_ids)
    size = (arguments.export / "model.safetensors").stat().st_size
    console.print(f"exported to {arguments.export}: {size / 1e6:.2f} MB of weights", highlight=False)
    return _measure(arguments.export, target, exam, arguments.drafts, console)


def _measure(directory: Path, target: Target, exam: list[Text], num_drafts: int, console: Console) -> int:
    """Measures the exported head, whose weights are rounded to bfloat16."""
    config, params, draft_ids = load_head(directory)
    report = measure_head(Head(config), params, Target(target.model, target.params, draft_ids), exam, num_drafts)
    console.print(show_lengths(report, num_drafts))
    return 0 if sum_lengths(report, 0.0).mean >= LEAST_LENGTH else 1


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, required=True, help="write the head's checkpoint into this directory")
    parser.add_argument("--target", type=Path, default=_DEMO, help="the demo model's checkpoint (%(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="steps of 2048 tokens (%(default)s)")
    parser.add_argument("--passes", type=int, default=5, help="passes that are unrolled in training (%(default)s)")
    parser.add_argument("--texts", type=int, default=6000, help="texts to learn from (%(default)s)")
    parser.add_argument("--draft-vocab-size", type=int, default=768, help="tokens that can be drafted (%(default)s)")
    parser.add_argument("--problems", type=int, default=100, help="unseen questions of each skill (%(default)s)")
    parser.add_argument("--drafts", type=int, default=4, help="drafts of a measured verify step (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts, texts, weights and order (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
