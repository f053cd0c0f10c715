"""The OpenAI-compatible HTTP server: protocol, routes, streaming, and what becomes of a model's calls and reasoning."""
