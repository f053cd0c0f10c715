"""Texts that the target writes itself, through the engine: what its head learns from and is measured on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece as spm

from demo_lm.corpus import Conversation, draw_conversation, draw_turn
from demo_lm.packing import Document
from demo_lm.scoring import list_problems
from demo_lm.tokens import BOS_ID, encode_open, encode_prompt

_MAX_TOKENS = 160
_TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # of the texts to learn from, in turn
_STORY_EVERY = 7  # one more in so many prompts asks for a story: they are the hardest to draft, and rare in the corpus


@dataclass(frozen=True)
class Prompt:
    """What the target is to continue, and how."""

    skill: str
    ids: tuple[int, ...]
    temperature: float


@dataclass(frozen=True)
class Text:
    """A prompt, and what the target wrote, the token of the end included if it came."""

    prompt: Prompt
    answer: tuple[int, ...]

    def make_document(self) -> Document:
        """All ids; the target's own have weight 1, those of the prompt 0."""
        return [*self.prompt.ids, *self.answer], [0.0] * len(self.prompt.ids) + [1.0] * len(self.answer)


def draw_prompts(tokenizer: spm.SentencePieceProcessor, count: int, seed: int) -> list[Prompt]:
    """Conversations of the training side, each up to its last answer; half of them for greedy answers."""
    rng = random.Random(f"head:{seed}")
    prompts = []
    for index in range(count):
        is_story = index % _STORY_EVERY == _STORY_EVERY - 1
        drawn = _ask_for_story(rng) if is_story else draw_conversation(rng)
        ids = [BOS_ID]  # plain text begins with nothing else
        if drawn.messages:
            thinks = "reasoning_content" in drawn.messages[-1]
            ids = encode_open(tokenizer, Conversation(drawn.messages[:-1], drawn.tools), thinks=thinks)
        prompts.append(Prompt("any", tuple(ids), _TEMPERATURES[index % len(_TEMPERATURES)]))
    return prompts


def _ask_for_story(rng: random.Random) -> Conversation:
    question, answer = draw_turn(rng, "story")
    return Conversation(({"role": "user", "content": question}, {"role": "assistant", "content": answer}))


def list_held_out_prompts(tokenizer: spm.SentencePieceProcessor, per_skill: int) -> list[Prompt]:
    """Questions of the exam, which training never shows, and stories of another seed: each greedy and at temperature 1.

    Stories share their wordings with training, but no two sampled ones are alike.
    """
    rng = random.Random("head: held out")
    asked = [(problem.skill, problem.question) for problem in list_problems(per_skill, per_skill)]
    glossary = [each for each in asked if each[0] == "glossary"]
    asked = [each for each in asked if each[0] != "glossary"]
    asked += rng.sample(glossary, min(per_skill, len(glossary)))
    asked += [("story", draw_turn(rng, "story")[0]) for _ in range(per_skill)]
    return [
        Prompt(skill, tuple(encode_prompt(tokenizer, question)), temperature)
        for temperature in (0.0, 1.0)
        for skill, question in asked
    ]


def write_texts(target: Path, prompts: Sequence[Prompt], seed: int) -> list[Text]:
    """The target's answers, in the order of the prompts, by the engine. Loads the target anew."""
    from jaxserve import LLM, SamplingParams

    llm = LLM(str(target))
    params = [
        SamplingParams(temperature=prompt.temperature, seed=seed + index, max_tokens=_MAX_TOKENS)
        for index, prompt in enumerate(prompts)
    ]
    outputs = llm.generate([{"prompt_token_ids": list(prompt.ids)} for prompt in prompts], params)
    return [Text(prompt, tuple(output.outputs[0].token_ids)) for prompt, output in zip(prompts, outputs, strict=True)]


def choose_draft_ids(texts: Sequence[Text], vocab_size: int, size: int) -> tuple[np.ndarray, float]:
    """The `size` tokens that the answers have most often, ascending, int32; and their share of the answers' tokens.

    If the answers have fewer, the lowest ids of the others fill up.
    """
    counts = Counter(token_id for text in texts for token_id in text.answer)
    ranked = sorted(range(vocab_size), key=lambda token_id: (-counts[token_id], token_id))
    chosen = sorted(ranked[:size])
    share = sum(counts[token_id] for token_id in chosen) / max(sum(counts.values()), 1)
    return np.asarray(chosen, np.int32), share
