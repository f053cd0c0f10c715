"""What OpenAI's client asks of each kind of cluster."""

from __future__ import annotations

import openai
from openai.types.chat import ChatCompletionChunk


def stream_sum(client: openai.OpenAI) -> list[ChatCompletionChunk]:
    """Asks the demo model for a sum, asserts that it is right, and returns the chunks of the answer."""
    chunks = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is 123 + 45?"}],
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    found = list(chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in found if chunk.choices).endswith("168")
    return found
