"""The runner of CI, which leaves out what has passed: `python3 -m scripts.ci`. The standard library only."""
