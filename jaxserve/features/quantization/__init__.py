"""Quantized checkpoints: what their config says, how their files keep a matrix, and the parameters made of it."""
