"""What answers a question about a pair of models: which draft, and what is wrong."""
