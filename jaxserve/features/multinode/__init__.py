"""One engine on several nodes: rank 0 plans, the others make the same calls."""
