"""Verification budgets: which drafted slots of a batch are verified.

`schemes.py` holds rules of others and the law of their first token, `bias.py` their error.
"""
