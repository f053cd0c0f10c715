"""Features that run beside the core: nothing in `jaxserve.core` imports one. `choose.py` says which an engine has."""
