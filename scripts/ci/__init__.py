"""What CI runs, and what it need not run again: `python3 -m scripts.ci`. The standard library only."""
