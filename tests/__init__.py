"""Keeps `tests/` off `sys.path`: `tests/torch/` would stand for an absent torch."""
