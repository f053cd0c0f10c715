"""What `device_day.py` does on a device, stage by stage. Each module lists the items of one stage.

Parent and child share `results.py`, `items.py` and `plan.py`, which need the standard library only: whatever is wrong
with the device or with jax, the parent goes on.
"""
