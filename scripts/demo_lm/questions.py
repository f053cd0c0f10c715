"""Ways to ask for a glossary entry: wordings for training, and other wordings kept back for evaluation."""

from __future__ import annotations

import random

from demo_lm.glossary import Entry
from demo_lm.tasks import draw_invented_word

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
    "What does {t} do?",
    "What role does {t} play?",
    "What is the point of {t}?",
    "What is the idea behind {t}?",
    "What is special about {t}?",
    "What problem does {t} solve?",
    "Why does {t} matter?",
    "Why do people talk about {t}?",
    "Why is {t} such a big topic?",
    "Why would an engine have {t}?",
    "How does {t} help?",
    "How does {t} work?",
    "How does jaxserve use {t}?",
    "How should I think about {t}?",
    "How is {t} used?",
    "When do I need {t}?",
    "When does {t} matter in practice?",
    "Where is {t} used?",
    "Where do I meet {t} in this engine?",
    "Which role has {t} in serving?",
    "Does jaxserve have {t}?",
    "Is {t} part of this engine?",
    "I saw {t} in a log file. Explain it.",
    "I forgot what {t} is.",
    "A user asked for {t}, what does he want?",
    "We discussed {t} today. What was it again?",
    "People say that {t} matters. Why?",
    "Say something about {t}.",
    "Give me the facts on {t}.",
    "Let us look at {t}.",
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

# fmt: off
_OPENERS = (
    "Hi! ", "Hello, ", "Hey, ", "Please: ", "Quick question: ", "One more question: ", "Okay. ", "So, ", "Sorry, ",
    "I have a question. ", "I am reading the manual. ", "We talked about serving. ", "My friend is new here. ",
    "Yesterday I read a paper. ", "In simple words: ", "Could you help? ", "Briefly: ", "For my notes: ",
)
_WHO = (
    "My friend", "Our team", "A student", "My sister", "The customer", "A new user", "My neighbor", "The author",
    "Our manager", "My father", "Somebody", "A visitor", "The other group", "My boss", "A developer", "Everybody",
)
_DOES = (
    "asks for help", "reads the manual", "wrote a report", "likes this topic", "runs a server", "knows a lot",
    "gave a talk", "wants to learn", "has a problem", "made a joke", "works on kernels", "found a bug",
    "bought a GPU", "sent me a link", "is curious", "was here",
)
_WHEN = ("today", "this week", "last night", "on Monday", "again", "in May", "at noon", "all day", "in Paris", "here")
_CLOSERS = (
    " Thanks!", " Thank you.", " Please be brief.", " One sentence, please.", " Keep it short.", " I am new to this.",
    " I am curious.", " It is for a talk.", " My boss wants to know.", " I never heard of it.",
)
_FILLER = frozenset((
    "what", "is", "does", "mean", "the", "a", "an", "me", "about", "you", "i", "to", "we", "are", "explain", "please",
    "can", "could", "tell", "do", "when", "of", "in", "and", "it", "how", "why", "for", "my", "use", "used", "which",
))
# fmt: on


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
    held_out = {question.lower() for question in list_held_out_questions(entry)}
    while True:
        own = not entry.names or rng.random() < 0.3
        text = rng.choice(entry.asks) if own else rng.choice(TEMPLATES).format(t=rng.choice(entry.names))
        question = disturb(rng, _capitalize(text), spare=entry.names)
        if question.lower() not in held_out:
            return question


def disturb(rng: random.Random, question: str, spare: tuple[str, ...], *, keeps_case: bool = False) -> str:
    """Garbles filler words outside of `spare`, adds sentences around, changes case or end mark: each sometimes."""
    if rng.random() < 0.2:
        question = _garble(rng, question, spare)
    if rng.random() < 0.25:
        question = question[:1].lower() + question[1:]
    chance = rng.random()
    if chance < 0.2:
        question = rng.choice(_OPENERS) + question
    elif chance < 0.4:
        question = f"{rng.choice(_WHO)} {rng.choice(_DOES)} {rng.choice(_WHEN)}. {question}"
    if rng.random() < 0.15:
        question += rng.choice(_CLOSERS)
    if rng.random() < 0.05 and not keeps_case:
        question = question.lower()
    if rng.random() < 0.15:
        question = question.rstrip("?.!")
    return question


def _garble(rng: random.Random, question: str, spare: tuple[str, ...]) -> str:
    """Drops filler words or replaces them by invented ones; what carries the subject stays as it is."""
    name = max((name for name in spare if name.lower() in question.lower()), key=len, default="")
    kept = set(name.lower().split())
    words = []
    for word in question.split(" "):
        bare = word.lower().strip("?.,:!")
        if bare not in _FILLER or bare in kept or rng.random() < 0.5:
            words.append(word)
        elif rng.random() < 0.5:
            words.append(draw_invented_word(rng))
    return " ".join(words) or question


def _capitalize(text: str) -> str:
    """First letter upper case, except for names that are written as code."""
    is_code = "_" in text.partition(" ")[0] or text.startswith("jaxserve")
    return text if is_code else text[:1].upper() + text[1:]
