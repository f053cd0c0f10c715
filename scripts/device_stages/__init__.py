"""The stages of `device_day.py`. Each module lists the items of one stage.

Parent and child share `results.py`, `items.py` and `plan.py`, which need the standard library only, so that the parent
survives any fault of the device or of jax.
"""
