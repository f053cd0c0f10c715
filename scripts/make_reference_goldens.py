"""Builds tests/goldens: tiny random checkpoints and what Hugging Face transformers answers for them.

Runs in the reference environment (`make reference-env`; Python 3.11, torch, transformers), never in CI:

    .venv-reference/bin/python scripts/make_reference_goldens.py            # rebuild everything
    .venv-reference/bin/python scripts/make_reference_goldens.py --only llama_gqa gemma2
    .venv-reference/bin/python scripts/make_reference_goldens.py --check    # compare the files with transformers

All arithmetic is f32 with eager attention; 16-bit checkpoints are widened when loaded. Seeds are searched so that
no greedy step is a near-tie, the weights are well conditioned and every option of a case moves its logits.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from reference_goldens.cases import ALL_CASES
from reference_goldens.checkpoint import (
    build_config,
    build_model,
    fill_weights,
    fix_rope_length,
    load_checkpoint,
    save_checkpoint,
)
from reference_goldens.record import (
    Recording,
    UnsuitableSeed,
    check_ablations,
    check_recording,
    draw_prompts,
    record,
    score,
    write_recording,
)
from reference_goldens.spec import MAX_MODEL_LEN, NEW_TOKENS, Case

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "tests" / "goldens"
MAX_BYTES = 12_000_000
MAX_SEEDS = 400
CHECK_TOLERANCE = 1e-5


def find_seed(case: Case, first_seed: int) -> tuple[int, Any, float]:
    """The first seed from `first_seed` on whose weights make a sound test, its model, and its smallest ablation."""
    reasons: list[str] = []
    for seed in range(first_seed, first_seed + MAX_SEEDS):
        model = build_model(build_config(case))
        fill_weights(case, model, seed)
        fix_rope_length(model, case.rope_seq_len)
        try:
            recording = record(model, draw_prompts(case, model.config.vocab_size, seed))
            check_recording(recording)
            return seed, model, check_ablations(case, model, recording)
        except UnsuitableSeed as error:
            reasons.append(str(error))
    raise RuntimeError(f"{case.name}: no sound seed in {MAX_SEEDS}; the last reasons: {reasons[-5:]}")


def build_case(case: Case, out: Path, first_seed: int) -> dict[str, Any]:
    """Writes one case below `out` and returns its manifest entry; answers come from the files, read back."""
    seed, drawn, moved = find_seed(case, first_seed)
    folder = out / case.name
    save_checkpoint(case, drawn, folder)
    model = load_checkpoint(folder, case)
    for name, value in drawn.state_dict().items():
        if not torch.equal(value, model.state_dict()[name]):
            raise RuntimeError(f"{case.name}: {name} changed on its way through the file")
    recording = record(model, draw_prompts(case, model.config.vocab_size, seed))
    check_recording(recording)
    if case.legacy_config:
        compare_legacy(case, folder, model, recording)
    write_recording(case, recording, folder / "golden.npz")
    return describe(case, folder, seed, recording, moved)


def compare_legacy(case: Case, folder: Path, model: Any, recording: Recording) -> None:
    """Raises unless config_legacy.json gives the same logits, bit for bit, as config.json."""
    old = load_checkpoint(folder, case, "config_legacy.json")
    tokens = np.concatenate([recording.prompts[-1], recording.greedy[-1]])
    if not np.array_equal(score(model, tokens), score(old, tokens)):
        raise RuntimeError(f"{case.name}: config_legacy.json is not the same model")


def describe(case: Case, folder: Path, seed: int, recording: Recording, moved: float) -> dict[str, Any]:
    """The manifest entry of a finished case."""
    entry: dict[str, Any] = {
        "family": case.family,
        "covers": case.covers,
        "seed": seed,
        "weights_dtype": case.dtype,
        "compute_dtype": "float32",
        "prompt_lengths": list(case.prompt_lengths),
        "max_model_len": MAX_MODEL_LEN,
        "rope_seq_len": case.rope_seq_len,
        "shards": len(list(folder.glob("*.safetensors"))),
        "legacy_config": case.legacy_config,
        "min_margin": round(float(recording.margins.min()), 6),
        "largest_logit": round(recording.largest_logit, 3),
        "noise": float(f"{recording.noise:.2g}"),
        "distinct_tokens": round(recording.distinct, 1),
        "smallest_ablation": round(moved, 4) if case.ablations else None,
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
    }
    margin, noise = entry["min_margin"], entry["noise"]
    print(
        f"{case.name:24s} seed {seed:4d}  margin {margin:.4f}  |logit| {entry['largest_logit']:6.2f}"
        f"  noise {noise:.1e}  distinct {entry['distinct_tokens']:4.1f}  ablation {entry['smallest_ablation']}"
        f"  {entry['shards']} file(s)  {entry['bytes'] / 1000:.0f} kB",
        flush=True,
    )
    return entry


def check_case(case: Case, out: Path) -> bool:
    """Whether the installed transformers reproduces the stored answers of `case`."""
    folder = out / case.name
    stored = np.load(folder / "golden.npz")
    prompts = [stored[f"prompt_{i}"] for i in range(len(case.prompt_lengths))]
    fresh = record(load_checkpoint(folder, case), prompts)
    worst = max(float(np.abs(fresh.logits[i] - stored[f"logits_{i}"]).max()) for i in range(len(prompts)))
    same = np.array_equal(fresh.greedy, stored["greedy"])
    print(f"{case.name:24s} tokens {'equal' if same else 'DIFFER'}  logits within {worst:.1e}", flush=True)
    return same and worst <= CHECK_TOLERANCE * fresh.largest_logit


def write_manifest(out: Path, entries: dict[str, Any]) -> None:
    """Merges `entries` into manifest.json and refuses a folder above the size limit."""
    path = out / "manifest.json"
    known = json.loads(path.read_text())["cases"] if path.exists() else {}
    order = [case.name for case in ALL_CASES if case.name in {**known, **entries}]
    manifest = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "attention": "eager",
        "greedy_tokens": NEW_TOKENS,
        "cases": {name: {**known, **entries}[name] for name in order},
    }
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    total = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"{len(order)} cases, {total / 1e6:.2f} MB")
    if total > MAX_BYTES:
        raise SystemExit(f"goldens are {total} bytes, the limit is {MAX_BYTES}")


def parse_arguments() -> argparse.Namespace:
    """Command line flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the goldens")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names of the cases to build")
    parser.add_argument("--seed", type=int, default=0, help="first seed to try")
    parser.add_argument("--check", action="store_true", help="compare the files with transformers, write nothing")
    return parser.parse_args()


def main() -> None:
    """Builds or checks the cases asked for."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    names = arguments.only or [case.name for case in ALL_CASES]
    unknown = set(names) - {case.name for case in ALL_CASES}
    if unknown:
        raise SystemExit(f"unknown cases: {', '.join(sorted(unknown))}")
    chosen = [case for case in ALL_CASES if case.name in names]
    if arguments.check:
        failed = [case.name for case in chosen if not check_case(case, arguments.out)]
        if failed:
            raise SystemExit(f"not reproduced: {', '.join(failed)}")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    entries = {case.name: build_case(case, arguments.out, arguments.seed) for case in chosen}
    write_manifest(arguments.out, entries)


if __name__ == "__main__":
    main()
