"""Model families, a file each, and the registry that finds the family of a config.json."""
