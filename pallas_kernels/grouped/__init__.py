"""Products of rows with a matrix for each group of rows: the experts of a model."""
