"""Flags → config → library calls: each is run as `python -m experiments.NAME`."""
