"""Engines of several processes, as several nodes would run them."""
