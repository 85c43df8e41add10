"""Costs, races, and the best draft, length and tree for a pair of models."""
