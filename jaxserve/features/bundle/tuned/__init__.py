"""XLA's autotuning results for products on GPUs, for programs that are compiled where no GPU is."""
