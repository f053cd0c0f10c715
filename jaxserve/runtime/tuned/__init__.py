"""What XLA has measured to be best for products on GPUs, for programs that are compiled where no GPU is."""
