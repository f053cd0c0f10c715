"""One engine on several hosts: rank 0 plans, the others make the same calls."""
