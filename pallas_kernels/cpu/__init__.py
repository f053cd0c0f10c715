"""Kernels in C++ for CPUs, compiled where they run: paged attention, and products of few rows."""
