"""The demo model's tokenizer: trained here with sentencepiece, and the chat format built on its control tokens."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path

import sentencepiece as spm

from demo_lm.corpus import Conversation, draw_conversation

VOCAB_SIZE = 1536
BOS, EOS, USER, ASSISTANT, SYSTEM = "<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
UNK_ID, BOS_ID, EOS_ID, USER_ID, ASSISTANT_ID, SYSTEM_ID = range(6)
USER_WEIGHT = 0.1  # share of the loss that a token of the user's side counts

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('The demo model knows the roles system, user and assistant.') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Jinja text of the chat format; `encode_conversation` must agree with it token by token."""


def train_tokenizer(path: Path, *, seed: int = 0, num_documents: int = 20_000) -> None:
    """Learns a byte-pair vocabulary from the corpus and writes the sentencepiece model to `path`.

    Digits stay single pieces, unknown characters fall back to bytes, text is neither normalized nor given a leading
    space, and the chat tokens are control pieces: no text that a user types can become one.
    """
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=_list_texts(random.Random(seed), num_documents),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        split_digits=True,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        hard_vocab_limit=True,
        unk_id=UNK_ID,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        bos_piece=BOS,
        eos_piece=EOS,
        control_symbols=[USER, ASSISTANT, SYSTEM],
        required_chars="".join(chr(code) for code in range(33, 127)),
        num_threads=1,
        minloglevel=2,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())


def load_tokenizer(path: Path) -> spm.SentencePieceProcessor:
    """Reads the model and checks that its special ids are the ones that this package counts on (else ValueError)."""
    tokenizer = spm.SentencePieceProcessor(model_file=str(path))
    expected = {BOS: BOS_ID, EOS: EOS_ID, USER: USER_ID, ASSISTANT: ASSISTANT_ID, SYSTEM: SYSTEM_ID}
    for piece, token_id in expected.items():
        if tokenizer.piece_to_id(piece) != token_id:
            raise ValueError(f"{path}: piece {piece!r} has id {tokenizer.piece_to_id(piece)}, not {token_id}")
    return tokenizer


def encode_prompt(tokenizer: spm.SentencePieceProcessor, question: str) -> list[int]:
    """The ids of one user message up to the point where the assistant speaks."""
    return [BOS_ID, USER_ID, *tokenizer.encode(question), EOS_ID, ASSISTANT_ID]


def encode_conversation(
    tokenizer: spm.SentencePieceProcessor, conversation: Conversation
) -> tuple[list[int], list[float]]:
    """Token ids, and the weight of each in the loss: 1 for the assistant's and for plain text, little elsewhere."""
    ids, weights = [BOS_ID], [0.0]

    def add(tokens: list[int], weight: float) -> None:
        ids.extend(tokens)
        weights.extend([weight] * len(tokens))

    if conversation.text:
        add([*tokenizer.encode(conversation.text), EOS_ID], 1.0)
    if conversation.system:
        add([SYSTEM_ID, *tokenizer.encode(conversation.system), EOS_ID], 0.0)
    for question, answer in conversation.turns:
        add([USER_ID, *tokenizer.encode(question), EOS_ID, ASSISTANT_ID], USER_WEIGHT)
        add([*tokenizer.encode(answer), EOS_ID], 1.0)
    return ids, weights


def _list_texts(rng: random.Random, count: int) -> Iterator[str]:
    for _ in range(count):
        conversation = draw_conversation(rng)
        yield from filter(None, (conversation.system, conversation.text))
        for question, answer in conversation.turns:
            yield question
            yield answer
