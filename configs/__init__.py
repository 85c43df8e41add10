"""What to run, and what to expect of it: one file per experiment, `get_config()` in each."""
