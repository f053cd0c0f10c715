"""Engines of several processes, as several hosts would run them."""
