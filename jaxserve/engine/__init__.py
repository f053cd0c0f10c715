"""The loop over scheduler and device, and the two faces that users import: `LLM` and `AsyncLLM`."""
