"""Parts of `scripts/make_reference_goldens.py`; runs in the reference environment only (torch, transformers)."""
