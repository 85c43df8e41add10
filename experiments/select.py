"""`specjax select` from a checkout: choose a draft.

    python -m experiments.select --config=configs/select.py --config.target=DIR \\
        --config.drafts=DIR,DIR,lookup --input=FILE [--workdir=DIR]
"""

from specjax.cli import select

if __name__ == "__main__":
    select.run()
