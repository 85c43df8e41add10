"""`python -m specjax`: the command of `specjax.cli.main`."""

from specjax.cli.main import main

if __name__ == "__main__":
    main()
