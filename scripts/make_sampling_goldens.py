"""Makes `tests/goldens/sampling.npz`: the outputs of transformers' logits processors for random logits.

Run in the reference environment, like `make_reference_goldens.py`: `make sampling-goldens`. `--check` compares with the
existing file instead of writing it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

FILE = Path(__file__).parents[1] / "tests" / "goldens" / "sampling.npz"
ROWS, VOCAB, LENGTH = 6, 331, 12
BAD_WORDS = [[5], [7, 9], [1, 2, 3]]


def make_goldens() -> dict[str, np.ndarray]:
    """Returns the inputs and the outputs of each processor, by name."""
    rng = np.random.default_rng(7)
    logits = (3 * rng.standard_normal((ROWS, VOCAB))).astype(np.float32)
    tokens = rng.integers(0, 40, (ROWS, LENGTH))  # few different tokens, so that they repeat
    tokens[1, -1:], tokens[2, -2:] = [7], [1, 2]  # beginnings of bad words
    ids, scores = torch.tensor(tokens), torch.tensor(logits)
    bias = {(int(token),): float(value) for token, value in zip(range(10, 20), rng.uniform(-5, 5, 10), strict=True)}
    processors = {
        "repetition": RepetitionPenaltyLogitsProcessor(1.3),
        "bias": SequenceBiasLogitsProcessor(bias),
        "bad_words": NoBadWordsLogitsProcessor(BAD_WORDS, eos_token_id=torch.tensor([0])),
        "top_k": TopKLogitsWarper(20),
        "top_p": TopPLogitsWarper(0.8),
        "min_p": MinPLogitsWarper(0.05),
    }
    found = {name: process(ids, scores.clone()).numpy() for name, process in processors.items()}
    found |= {"logprobs": torch.log_softmax(scores, -1).numpy(), "logits": logits, "tokens": tokens}
    return found | {"bias_ids": np.array([key[0] for key in bias]), "bias_values": np.array(list(bias.values()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    made = make_goldens()
    if not args.check:
        np.savez_compressed(FILE, **made)
        print(f"{FILE.name}: {len(made)} arrays")
        return
    with np.load(FILE) as stored:
        wrong = [name for name in made if not np.allclose(made[name], stored[name], rtol=1e-6, equal_nan=True)]
    sys.exit(f"different: {', '.join(wrong)}" if wrong else None)


if __name__ == "__main__":
    main()
