"""Choose a draft for a target, on one's own inputs. `specjax select` does the same by default.

    specjax select --config=configs/select.py \\
        --config.target=google-t5/t5-3b --config.drafts=google-t5/t5-small,lookup --input=FILE

Without drafts the smaller members of the target's family are tried: those beside its directory, or
those of the same name on the hub. Of the embedded families, `--config=configs/embedded.py` says it
all. Some 50 inputs of the kind that will be decoded are enough.
"""

from specjax.cli import defaults


def get_config():
    """The defaults of `specjax select`."""
    return defaults.get_config("select")
