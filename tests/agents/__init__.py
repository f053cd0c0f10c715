"""Agents and their libraries, as released, against servers of this repository: `make test-agents`."""
