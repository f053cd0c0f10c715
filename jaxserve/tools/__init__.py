"""Commands, benchmarks, the simulator, several servers as one, and instruments for an engine that is ready."""
