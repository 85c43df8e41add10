"""What the command `specjax` runs; `specjax.tools.cli` finds them here."""
