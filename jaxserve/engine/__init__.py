"""The loop over scheduler and device, and its two public classes: `LLM` and `AsyncLLM`."""
