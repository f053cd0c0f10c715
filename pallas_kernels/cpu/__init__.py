"""Paged attention in C++ for CPUs, compiled where it runs."""
