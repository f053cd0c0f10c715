"""A real server whose model answers from a script, and what clients ask it."""
