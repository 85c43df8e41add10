"""Measurements of acceptance, costs, speedups and quality, and their tables and figures."""
