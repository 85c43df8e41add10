"""Replay of draft-length policies along outputs that were recorded once."""
