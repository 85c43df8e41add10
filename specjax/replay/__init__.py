"""What any policy would have done along outputs that were recorded once."""
