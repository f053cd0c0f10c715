"""A load generator for OpenAI-compatible servers: processes that send requests on time and note when chunks arrive.

It imports nothing of the engine, so a worker starts in a fraction of a second and its CPU time is the client's alone.
"""
