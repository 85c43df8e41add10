"""Flags → config → library calls: each is run as `python -m experiments.NAME`."""

import sys

# Imports take seconds. While `python -m` looks for the module, its name is not yet in sys.argv.
if sys.argv[0] == "-m" and not {"-h", "--help", "--helpshort"} & {*sys.argv}:
    print("loading specjax …", file=sys.stderr, flush=True)
