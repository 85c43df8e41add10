"""Convert a checkpoint of any format to safetensors.

    specjax convert SOURCE DIRECTORY [--dtype=bfloat16] [--overwrite]

SOURCE is what `specjax.load` reads: a directory, or a name on the Hugging Face hub, with weights in
safetensors, torch's pickles, flax's msgpack or T5X's folders. DIRECTORY then has the same model
with its config and tokenizer, for specjax and for transformers. One tensor at a time is in memory.
DIRECTORY is new or empty; with --overwrite a model in it is replaced, with all its files. That
happens when all is written. An interrupted run leaves it unchanged, and the next one removes the
temporary files beside it.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence

from tqdm import tqdm

from specjax import checkpoints
from specjax.checkpoints.tensors import HELD
from specjax.support import command_line


def main(argv: Sequence[str] | None = None) -> None:
    """Convert as the arguments say; an error is one sentence, with status 1.

    Args:
      argv: SOURCE, DIRECTORY and flags; None: those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="specjax convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="a directory, or a name on the hub")
    parser.add_argument("directory", metavar="DIRECTORY", help="where to write; made if need be")
    parser.add_argument(
        "--dtype",
        choices=HELD,
        help="of the stored weights; without it the source's, at most float32",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a model in DIRECTORY")
    arguments = parser.parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: print(
            f"warning: {message}", file=sys.stderr
        )
        try:
            convert(arguments.source, arguments.directory, arguments.dtype, arguments.overwrite)
        except (ValueError, OSError) as error:
            if command_line.of_output(error):
                raise
            command_line.fail(str(error))


run = main  # the name that the command `specjax` calls


def convert(source: str, directory: str, dtype: str | None, overwrite: bool = False) -> None:
    """Run `checkpoints.convert` with a progress bar, and print one line when it is done."""
    command_line.say(f"converting {source} into {directory}")
    size = 0
    # disable=None: a bar only in a terminal.
    with tqdm(unit="B", unit_scale=True, desc="weights", leave=False, disable=None) as bar:

        def report(written: int, whole: int) -> None:
            nonlocal size
            bar.total = whole
            bar.update(written - size)
            size = written

        done = checkpoints.convert(
            source, directory, dtype=dtype, overwrite=overwrite, progress=report
        )
    kind = done.config.model_type
    tokenizer = "" if done.tokenizer is not None else "; the source has no tokenizer"
    print(f"{directory}: a {kind} with {size / 1e6:,.1f} MB of weights{tokenizer}")
