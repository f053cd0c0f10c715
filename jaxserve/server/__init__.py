"""The OpenAI-compatible HTTP server: protocol, routes, streaming, tool calls and reasoning."""
