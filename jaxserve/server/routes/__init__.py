"""One module per family of endpoints. Routes read a body, run the engine and write the answer."""
