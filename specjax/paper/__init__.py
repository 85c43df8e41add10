"""The paper: its formulas, and the figures that it prints."""
