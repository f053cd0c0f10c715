"""Benchmarks that anybody can repeat: `jaxserve bench`."""
