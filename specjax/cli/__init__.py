"""Modules of the command `specjax`; `specjax.cli.main` finds them here."""
