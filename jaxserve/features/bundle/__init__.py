"""Compiled programs as files: made once, also for devices that are not here, and loaded at each start."""
