"""What is worth it for a pair of models: costs, trials, the best draft, length and tree."""
