"""Transformers' answers for a golden case: logits, greedy tokens, margins, and checks on both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .checkpoint import build_config, build_model, fix_rope_length
from .spec import NEW_TOKENS, Case

MIN_MARGIN = 1e-3  # in logits
MIN_MARGIN_RATIO = 3e-4  # of the largest |logit|: three times the tolerance of the parity tests
MIN_ROUTER_GAP = 1e-3  # between the last expert that a token goes to and the next, in router logits
MAX_NOISE = 1e-5  # cached steps against one whole pass, as a share of the largest |logit|
MIN_DISTINCT = 12.0  # different tokens among the 64 of a continuation, on average
MIN_ABLATION = 0.02  # an option must move some logit by this share of the largest |logit|


class UnsuitableSeed(Exception):
    """The weights of this seed make a poor test; the message says why."""


@dataclass
class Recording:
    """Answers of one model for all prompts of a case.

    `logits[i]` is f32 [len(positions[i]), V] over the sequence prompt + continuation: the row of position p
    scores the token at p + 1. `greedy` is int32 [prompts, 64]; `margins` f32 of the same shape holds the gap
    between the best and the second logit at each greedy step.
    """

    prompts: list[np.ndarray]
    positions: list[np.ndarray]
    logits: list[np.ndarray]
    greedy: np.ndarray
    margins: np.ndarray
    largest_logit: float
    noise: float
    router_gap: float

    @property
    def distinct(self) -> float:
        """Mean number of different tokens in a continuation."""
        return float(np.mean([len(set(row.tolist())) for row in self.greedy]))


def draw_prompts(case: Case, vocab_size: int, seed: int) -> list[np.ndarray]:
    """Random token ids (the special ids 0..2 left out) of the lengths the case asks for."""
    rng = np.random.default_rng([seed, 1])
    return [rng.integers(3, vocab_size, size=length).astype(np.int32) for length in case.prompt_lengths]


def choose_positions(prompt_length: int) -> np.ndarray:
    """Positions whose logits are stored: a few of the prompt with both ends, two of the continuation."""
    last = prompt_length - 1
    prompt = {0, last // 3, 2 * last // 3, max(last - 1, 0), last}
    return np.array(sorted(prompt | {last + NEW_TOKENS // 4, last + NEW_TOKENS - 1}), dtype=np.int32)


@torch.no_grad()
def decode_greedily(model: Any, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """64 greedy steps with the KV cache, end-of-sequence ignored.

    Returns tokens int32 [64], margins f32 [64] and the logits of each step f32 [64, V].
    """
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    past = None
    steps = []
    for _ in range(NEW_TOKENS):
        out = model(input_ids=ids, past_key_values=past, use_cache=True)
        past = out.past_key_values
        steps.append(out.logits[0, -1].numpy())
        ids = out.logits[:, -1].argmax(dim=-1, keepdim=True)
    logits = np.stack(steps)
    best = np.sort(logits, axis=-1)[:, -2:]
    return logits.argmax(-1).astype(np.int32), best[:, 1] - best[:, 0], logits


@torch.no_grad()
def score(model: Any, token_ids: np.ndarray) -> np.ndarray:
    """Logits f32 [T, V] of one pass over the whole sequence, without a cache."""
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    return model(input_ids=ids, use_cache=False).logits[0].numpy()


def record(model: Any, prompts: list[np.ndarray]) -> Recording:
    """Continues every prompt greedily, then scores each whole sequence in a single pass."""
    positions, logits, tokens, margins = [], [], [], []
    largest = noise = 0.0
    gaps = watch_routers(model)
    for prompt in prompts:
        continuation, margin, steps = decode_greedily(model, prompt)
        whole = score(model, np.concatenate([prompt, continuation[:-1]]))
        largest = max(largest, float(np.abs(whole).max()))
        noise = max(noise, float(np.abs(whole[len(prompt) - 1 :] - steps).max()))
        positions.append(choose_positions(len(prompt)))
        logits.append(whole[positions[-1]].astype(np.float32))
        tokens.append(continuation)
        margins.append(margin)
    return Recording(
        prompts,
        positions,
        logits,
        np.stack(tokens),
        np.stack(margins),
        largest,
        noise / largest,
        min(gaps, default=np.inf),
    )


def watch_routers(model: Any) -> list[float]:
    """Returns a list to which every pass of a router adds the smallest gap between chosen and next experts."""
    gaps: list[float] = []

    def watch(module: Any, inputs: Any, outputs: Any) -> None:
        logits, _, experts = outputs
        # Gemma 4's router gives probabilities, whose logarithms differ as logits do.
        logits = logits.log() if hasattr(module, "per_expert_scale") else logits
        scores, scale = logits.float(), 1.0
        correction = getattr(module, "e_score_correction_bias", inputs[1] if len(inputs) > 1 else None)
        if correction is not None:
            scores, scale = scores.sigmoid() + correction, 4.0  # a sigmoid's slope is 1/4 at most
            if getattr(module, "topk_group", 1) < getattr(module, "num_group", 1):
                groups = scores.view(len(scores), module.num_group, -1)
                judged = groups.topk(2, dim=-1).values.sum(-1)
                gaps.append(scale * measure_gap(judged, module.topk_group))
                is_best = judged >= judged.topk(module.topk_group).values[:, -1:]
                scores = torch.where(is_best[:, :, None], groups, -1e9).flatten(1)
        gaps.append(scale * measure_gap(scores, experts.shape[-1]))

    for module in model.modules():
        if type(module).__name__.endswith(("TopKRouter", "Gemma4TextRouter")):
            module.register_forward_hook(watch)
    return gaps


def measure_gap(scores: torch.Tensor, top_k: int) -> float:
    """The smallest gap of any row between its last chosen score and the next."""
    ordered = scores.sort(dim=-1, descending=True).values
    return float((ordered[:, top_k - 1] - ordered[:, top_k]).min())


def check_recording(recording: Recording) -> None:
    """Raises UnsuitableSeed for near-ties, ill-conditioned weights or monotonous continuations."""
    margin = float(recording.margins.min())
    needed = max(MIN_MARGIN, MIN_MARGIN_RATIO * recording.largest_logit)
    if margin < needed:
        raise UnsuitableSeed(f"smallest margin {margin:.2e} < {needed:.2e}")
    if recording.router_gap < MIN_ROUTER_GAP:
        raise UnsuitableSeed(f"smallest gap of a router {recording.router_gap:.2e} < {MIN_ROUTER_GAP:.2e}")
    if recording.noise > MAX_NOISE:
        raise UnsuitableSeed(f"cached and whole passes differ by {recording.noise:.1e} of the largest logit")
    if recording.distinct < MIN_DISTINCT:
        raise UnsuitableSeed(f"only {recording.distinct:.1f} different tokens per continuation")


def check_ablations(case: Case, model: Any, recording: Recording) -> float:
    """Raises UnsuitableSeed unless every ablated config moves the logits; returns the smallest movement.

    The movement is the largest |difference| over the longest sequence, as a share of the largest |logit|.
    """
    tokens = np.concatenate([recording.prompts[-1], recording.greedy[-1, :-1]])
    whole = score(model, tokens)
    smallest = float("inf")
    for overrides in case.ablations:
        other = build_model(build_config(case, overrides))
        other.load_state_dict(model.state_dict())
        if "rope_parameters" not in overrides:
            fix_rope_length(other, case.rope_seq_len)
        moved = float(np.abs(score(other, tokens) - whole).max()) / recording.largest_logit
        if moved < MIN_ABLATION:
            raise UnsuitableSeed(f"{overrides} moves the logits by {moved:.4f} only")
        smallest = min(smallest, moved)
    return smallest


def write_recording(case: Case, recording: Recording, path: Path) -> None:
    """Stores a recording as compressed npz; the keys are those `tests/golden_cases.py` reads."""
    arrays: dict[str, np.ndarray] = {
        "greedy": recording.greedy,
        "margins": recording.margins.astype(np.float32),
        "weights_dtype": np.array(case.dtype),
        "compute_dtype": np.array("float32"),
    }
    for i, prompt in enumerate(recording.prompts):
        arrays[f"prompt_{i}"] = prompt
        arrays[f"positions_{i}"] = recording.positions[i]
        arrays[f"logits_{i}"] = recording.logits[i]
    np.savez_compressed(path, allow_pickle=False, **arrays)
