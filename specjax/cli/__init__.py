"""What the command `specjax` runs; `specjax.cli.main` finds them here."""
