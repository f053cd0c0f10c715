"""The demo model's tokenizer: trained here with sentencepiece, and the chat format built on its control tokens."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece as spm

from demo_lm.corpus import Conversation, draw_conversation

VOCAB_SIZE = 1536
BOS, EOS, USER, ASSISTANT, SYSTEM = "<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
UNK_ID, BOS_ID, EOS_ID, USER_ID, ASSISTANT_ID, SYSTEM_ID = range(6)
THINK, THINK_ID = "<think>", 12  # one of `MARKS`, whose ids follow
USER_WEIGHT = 0.1  # share of the loss that a token of the user's side counts

MARKS = (
    "<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
"""Pieces of their own, but text: answers show them."""
SPACE = "\u2581"
"""A piece of its own as well, so that a word has the same pieces behind a space and behind a quote: then it can be
copied token by token, from a question into an argument."""

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- set begin = 0 %}
{%- if tools %}
    {{- '<|system|>' }}
    {%- if messages[0].role == 'system' %}
        {%- set begin = 1 %}
        {{- messages[0].content + '\\n' }}
    {%- endif %}
    {{- '<tools>\\n' }}
    {%- for tool in tools %}
        {{- (tool.function | tojson) + '\\n' }}
    {%- endfor %}
    {{- '</tools><|end|>' }}
{%- endif %}
{%- for message in messages[begin:] %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role not in ['assistant', 'tool'] %}
            {{- raise_exception('A result needs the call that it answers before it.') }}
        {%- endif %}
        {{- '<|user|>' if loop.first or loop.previtem.role != 'tool' else '\\n' }}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|end|>' if loop.last or loop.nextitem.role != 'tool' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) }}
            {{- ', "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- elif message.role in ['system', 'user'] %}
        {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- raise_exception('The demo model knows the roles system, user, assistant and tool.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}"""
"""Jinja text of the chat format; `write_parts` must agree with it letter by letter."""


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
        user_defined_symbols=[*MARKS, SPACE],
        required_chars="".join(chr(code) for code in range(33, 127)),
        num_threads=1,
        minloglevel=2,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())


def load_tokenizer(path: Path) -> spm.SentencePieceProcessor:
    """Reads the model and checks that its special ids are the ones that this package counts on (else ValueError)."""
    tokenizer = spm.SentencePieceProcessor(model_file=str(path))
    expected = {BOS: BOS_ID, EOS: EOS_ID, USER: USER_ID, ASSISTANT: ASSISTANT_ID, SYSTEM: SYSTEM_ID, THINK: THINK_ID}
    for piece, token_id in expected.items():
        if tokenizer.piece_to_id(piece) != token_id:
            raise ValueError(f"{path}: piece {piece!r} has id {tokenizer.piece_to_id(piece)}, not {token_id}")
    return tokenizer


def encode_prompt(tokenizer: spm.SentencePieceProcessor, question: str) -> list[int]:
    """The ids of one user message up to the point where the assistant speaks."""
    return encode_open(tokenizer, Conversation(({"role": "user", "content": question},)))


def encode_open(
    tokenizer: spm.SentencePieceProcessor, conversation: Conversation, *, thinks: bool = False
) -> list[int]:
    """The ids of a conversation up to the point where the assistant speaks, or begins to think."""
    ids = [*encode_conversation(tokenizer, conversation)[0], ASSISTANT_ID]
    return [*ids, *tokenizer.encode("<think>\n")] if thinks else ids


def encode_conversation(
    tokenizer: spm.SentencePieceProcessor, conversation: Conversation
) -> tuple[list[int], list[float]]:
    """Token ids, and the weight of each in the loss: 1 for the assistant's and for plain text, little elsewhere."""
    if conversation.text:
        text = [*tokenizer.encode(conversation.text), EOS_ID]
        return [BOS_ID, *text], [0.0, *([1.0] * len(text))]
    ids, weights = [BOS_ID], [0.0]
    parts = write_parts(conversation)
    for number, (role, text) in enumerate(parts, 1):
        body = [*tokenizer.encode(text), EOS_ID]
        ids += [_ROLES[role], *body]
        if role != "assistant":
            weights += [USER_WEIGHT if role == "user" else 0.0] * (len(body) + 1)
        elif conversation.imposed and number == len(parts):
            weights += [0.0, *_weigh_values(tokenizer, body)]
        else:
            given = _count_given(body)
            weights += [USER_WEIGHT, *([0.0] * given), *([1.0] * (len(body) - given))]
    return ids, weights


def _count_given(body: Sequence[int]) -> int:
    """How many tokens of an answer its prompt brings: the mark that begins reasoning, with its line."""
    return 2 if body[0] == THINK_ID else 0


_ROLES = {"user": USER_ID, "assistant": ASSISTANT_ID, "system": SYSTEM_ID}


def write_parts(conversation: Conversation) -> list[tuple[str, str]]:
    """The turns of a conversation as the chat template writes them: whose each is, and its text."""
    messages, parts = list(conversation.messages), []
    if conversation.tools:
        lead = messages.pop(0)["content"] + "\n" if messages[0]["role"] == "system" else ""
        functions = "".join(json.dumps(tool["function"], ensure_ascii=False) + "\n" for tool in conversation.tools)
        parts.append(("system", f"{lead}<tools>\n{functions}</tools>"))
    for before, message in zip([None, *messages], messages, strict=False):
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if before is not None and before["role"] == "tool":
                text = f"{parts.pop()[1]}\n{text}"
            parts.append(("user", text))
        elif message["role"] == "assistant":
            parts.append(("assistant", _write_answer(message)))
        else:
            parts.append((message["role"], message["content"]))
    return parts


def _write_answer(message: Mapping[str, Any]) -> str:
    reasoning, text = message.get("reasoning_content"), message["content"]
    for call in message.get("tool_calls", ()):
        name, arguments = (json.dumps(call["function"][key], ensure_ascii=False) for key in ("name", "arguments"))
        lead = "\n" if text else ""
        text += f'{lead}<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
    return f"<think>\n{reasoning}\n</think>\n\n{text}" if reasoning else text


def _weigh_values(tokenizer: spm.SentencePieceProcessor, body: Sequence[int]) -> list[float]:
    """Weight 1 for the tokens of a JSON text's values, 0 for its keys and what is between: a grammar forces these."""
    weights, in_value = [], False
    for token_id in body:
        piece = tokenizer.id_to_piece(token_id)
        weights.append(1.0 if in_value else 0.0)
        in_value = piece.endswith(":") if not in_value else not piece.endswith((",", "}", "{", "\n"))
    return weights


def _list_texts(rng: random.Random, count: int) -> Iterator[str]:
    for _ in range(count):
        conversation = draw_conversation(rng)
        if conversation.text:
            yield conversation.text
        for _, text in write_parts(conversation):
            yield from filter(None, text.split("\n"))
