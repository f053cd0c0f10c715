"""Ways to ask for a glossary entry: wordings for training, and other wordings kept back for evaluation."""

from __future__ import annotations

import random

from demo_lm.glossary import Entry

TEMPLATES = (
    "What is {t}?",
    "What does {t} mean?",
    "What is meant by {t}?",
    "What's {t}?",
    "What are we talking about when we say {t}?",
    "What exactly does {t} refer to?",
    "What should I know about {t}?",
    "What is the meaning of {t}?",
    "What is {t} in an inference engine?",
    "When serving language models, what is {t}?",
    "In jaxserve, what is {t}?",
    "In the context of language models, what does {t} mean?",
    "Explain {t}.",
    "Explain {t} to me.",
    "Explain {t} in one sentence.",
    "Explain {t} to a beginner.",
    "Can you explain {t}?",
    "Could you explain what {t} is?",
    "Please explain {t} in simple words.",
    "Define {t}.",
    "How do you define {t}?",
    "Give me a definition of {t}.",
    "Give a short explanation of {t}.",
    "Describe {t}.",
    "Can you describe {t} for me?",
    "Tell me about {t}.",
    "Tell me what {t} is.",
    "Tell me more about {t}, please.",
    "I keep reading about {t}. What is it?",
    "I heard about {t}, what does that mean?",
    "I do not understand {t}.",
    "I want to learn about {t}.",
    "Help me understand {t}.",
    "Remind me what {t} is.",
    "Teach me about {t}.",
    "Do you know what {t} is?",
    "Who can tell me what {t} means?",
    "How would you describe {t} in a few words?",
    "The manual mentions {t}. Explain it.",
    "My teacher asked me about {t}. What do I answer?",
    "A question about {t}: what is it?",
    "Let me ask about {t}.",
    "{t}?",
    "{t}",
    "{t}, please",
    "{t}: what is it?",
    "{t} means what?",
)
"""Wordings of training; `{t}` is one of the entry's names."""

HELD_OUT_TEMPLATES = (
    "How would you explain {t} to a friend?",
    "Could I get a short description of {t}?",
    "I am new here: what exactly is {t}?",
    "My colleague mentioned {t} yesterday, what did she mean?",
    "Write one sentence that defines {t}.",
    "Summarize {t} in a line.",
    "Someone asked me about {t}, what should I say?",
    "Is there a simple definition of {t}?",
    "I wonder what {t} could be.",
    "And what about {t}?",
)
"""Wordings that training never uses."""

_OPENERS = (
    "Hi! ", "Hello, ", "Hey, ", "Please: ", "Quick question: ", "One more question: ", "Okay. ", "So, ", "Sorry, ",
    "I have a question. ", "I am reading the manual. ", "We talked about serving. ", "My friend is new here. ",
    "Yesterday I read a paper. ", "In simple words: ", "Could you help? ", "Briefly: ", "For my notes: ",
)  # fmt: skip
_CLOSERS = (
    " Thanks!", " Thank you.", " Please be brief.", " One sentence, please.", " Keep it short.", " I am new to this.",
    " I am curious.", " It is for a talk.", " My boss wants to know.", " I never heard of it.",
)  # fmt: skip


def list_training_questions(entry: Entry) -> tuple[str, ...]:
    """Every undisturbed question that training may ask for `entry`."""
    filled = [template.format(t=name) for template in TEMPLATES for name in entry.names]
    return tuple(_capitalize(question) for question in (*filled, *entry.asks))


def list_held_out_questions(entry: Entry) -> tuple[str, ...]:
    """Every question kept for evaluation: held-out templates times names, then the entry's own `unseen`."""
    filled = [template.format(t=name) for template in HELD_OUT_TEMPLATES for name in entry.names]
    return tuple(_capitalize(question) for question in (*filled, *entry.unseen))


def draw_question(rng: random.Random, entry: Entry) -> str:
    """A training question for `entry`, disturbed so that the model learns to look for the term and not for the wording.

    Never returns one of the held-out questions of `entry`, whatever the case of its letters.
    """
    own = not entry.names or rng.random() < 0.35
    text = rng.choice(entry.asks) if own else rng.choice(TEMPLATES).format(t=rng.choice(entry.names))
    question = _disturb(rng, _capitalize(text))
    held_out = {other.lower() for other in list_held_out_questions(entry)}
    return _capitalize(text) if question.lower() in held_out else question


def _disturb(rng: random.Random, question: str) -> str:
    """Adds an opener or a closer, drops filler words, changes case or end mark, each now and then."""
    if rng.random() < 0.15:
        question = _drop_filler(rng, question)
    if rng.random() < 0.25:
        opener = rng.choice(_OPENERS)
        question = opener + question[:1].lower() + question[1:] if rng.random() < 0.5 else opener + question
    if rng.random() < 0.15:
        question += rng.choice(_CLOSERS)
    if rng.random() < 0.2:
        question = question[:1].lower() + question[1:]
    elif rng.random() < 0.05:
        question = question.lower()
    if rng.random() < 0.15:
        question = question.rstrip("?.!")
    return question or "?"


# fmt: off
_FILLER = frozenset((
    "what", "is", "does", "mean", "the", "a", "an", "me", "about", "you", "i", "to", "we", "are", "explain", "please",
    "can", "could", "tell", "do", "when", "of", "in", "and", "it",
))
# fmt: on


def _drop_filler(rng: random.Random, question: str) -> str:
    """Loses each filler word with probability one half; the words that carry the subject stay."""
    words = question.split(" ")
    kept = [word for word in words if word.lower().strip("?.,:") not in _FILLER or rng.random() < 0.5]
    return " ".join(kept) or question


def _capitalize(text: str) -> str:
    """First letter upper case, except for names that are written as code."""
    is_code = "_" in text.partition(" ")[0] or text.startswith("jaxserve")
    return text if is_code else text[:1].upper() + text[1:]
