"""Which verify budget is fastest."""
