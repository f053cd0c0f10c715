"""Replicas of an engine: several servers on one machine, or in Ray Serve."""
