"""Recurrent rules: states in a pool follow the tokens of a step's ragged rows (`api.py`)."""
