"""The core of every engine: requests become sequences, plans, steps on the device, and token ids."""
