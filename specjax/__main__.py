"""`python -m specjax`: the command of `specjax.tools.cli`."""

from specjax.tools.cli import main

if __name__ == "__main__":
    main()
