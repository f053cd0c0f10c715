"""Kernels in C++ for CPUs, compiled where they run: paged attention, products of few rows, and lookups of drafts."""
