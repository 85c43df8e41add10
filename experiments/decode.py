"""Decode the lines of a file, speculatively or autoregressively.

    python -m experiments.decode --config=configs/decode.py \\
        --config.target=DIR --config.draft=DIR --input=FILE --output=OUT.jsonl

Fields of the config: target, draft (directories or hub names), method (speculative or
autoregressive), gamma, temperature (0: greedy), top_k (0: off), top_p (1: off), max_new_tokens,
max_source_len (0: the target's own), seed, samples (draws per input), dtype, batch_size.

Input: one line each, "-" for standard input. Output: a JSON line for each input and sample, in the
input's order: input, sample, output, tokens, target_calls, drafted, accepted. A run that was cut
off goes on where it was when the same command is given again.
"""

import json
import pathlib
import sys
import warnings

import jax
import jax.numpy as jnp
from absl import flags
from ml_collections import config_flags
from tqdm import tqdm

from experiments import common
from specjax import decoding, files, sampling
from specjax.models import hub
from specjax.models.memory import check_fits

METHODS = ("speculative", "autoregressive")
DTYPES = {"": None, "float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def main(_) -> None:
    args, config = flags.FLAGS, flags.FLAGS.config
    check(config)
    texts = read_lines(args.input)
    target, draft = load_pair(config)
    method = decoding.build(
        target,
        draft,
        gamma=config.gamma,
        sampling=sampling.sampling(config.temperature, config.top_k, config.top_p),
    )
    check_memory(config, texts, target, draft)
    # Only now, when nothing but decoding can fail, may an old output be replaced.
    output = open_output(args.output, args.overwrite, config, texts)
    done = len(output.done) if output else 0
    rows = decoding.stream(
        method,
        target,
        texts,
        max_new_tokens=config.max_new_tokens,
        key=jax.random.key(config.seed),
        samples=config.samples,
        batch_size=config.batch_size,
        max_source_len=config.max_source_len or None,
        first=done,
        names=(config.target, config.draft),
    )
    total = len(texts) * config.samples
    for row in tqdm(rows, total=total, initial=done, unit="row", disable=None):
        record = {
            "input": texts[row.index],
            "sample": row.sample,
            "output": row.text,
            "tokens": row.tokens,
            "target_calls": row.target_calls,
            "drafted": row.drafted,
            "accepted": row.accepted,
        }
        if output:
            output.append(record)
        else:
            print(json.dumps(record, ensure_ascii=False), flush=True)


def check(config) -> None:
    """ValueError for what can be told before anything is loaded."""
    if config.method not in METHODS:
        raise ValueError(f"method={config.method!r} must be one of {', '.join(METHODS)}.")
    if config.dtype not in DTYPES:
        names = ", ".join(repr(name) for name in DTYPES)
        raise ValueError(f"dtype={config.dtype!r} must be one of {names}.")
    if not config.target:
        raise ValueError("No target: give --config.target=DIR, or a name on the Hugging Face hub.")
    if config.method == "speculative" and not config.draft:
        raise ValueError(
            "No draft: give --config.draft=DIR, or --config.method=autoregressive to do without."
        )


def read_lines(path: str) -> list[str]:
    """The lines of a file or of standard input, without their ends."""
    file = pathlib.Path(path)
    if path != "-" and not file.is_file():
        raise ValueError(f"--input={path}: no such file. Use - for standard input.")
    data = sys.stdin.buffer.read() if path == "-" else file.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--input={path} is not UTF-8 ({error}). Convert it first.") from None
    # Not splitlines(): form feeds and such belong to a line.
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def open_output(path: str, overwrite: bool, config, texts: list[str]) -> files.Rows | None:
    """The output's rows, which may hold those of an earlier run of the same command.

    A file beside the output says which command it belongs to. None: standard output.
    """
    if path == "-":
        return None
    file = pathlib.Path(path)
    common.make_workdir(str(file.parent), flag="output")
    mark = file.with_name(f".{file.name}.run.json")
    wanted = {"run": common.fingerprint(config.to_dict(), texts)}
    if overwrite:
        file.unlink(missing_ok=True)
    found = json.loads(mark.read_text()) if mark.exists() else None
    if file.exists() and found != wanted:
        raise ValueError(
            f"--output={path} exists and comes from another command or input. Name another file, "
            "or give --overwrite to lose it."
        )
    files.write_json(mark, wanted)
    return files.Rows(file)


def load_pair(config) -> tuple[hub.Checkpoint, hub.Checkpoint | None]:
    """Target and, for speculation, draft."""
    dtype = DTYPES[config.dtype]
    target = hub.load(config.target, dtype=dtype)
    speculates = config.method == "speculative"
    return target, hub.load(config.draft, dtype=dtype) if speculates else None


def check_memory(config, texts: list[str], target: hub.Checkpoint, draft) -> None:
    """ValueError if caches and laws of a batch do not fit beside what is loaded."""
    texts = sorted(texts, key=len)[-8:]  # among these the most tokens, or nearly as many
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # decoding will say which texts it cuts
        sources = decoding.tokenize(target, texts, config.max_source_len or None)
    needs = [
        decoding.needed(
            model,
            max(map(len, sources), default=1),
            rows=config.batch_size,
            max_new_tokens=config.max_new_tokens,
            gamma=config.gamma if draft else 0,
        )
        for model in (target, draft)
        if model
    ]
    check_fits(
        f"Caches and laws of {config.batch_size} rows",
        sum(need.state + need.laws for need in needs),
        "Lower batch_size, max_new_tokens or max_source_len, or set dtype=bfloat16.",
    )


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "What to run with.", lock_config=True)
    flags.DEFINE_string("input", None, "A file of inputs, one a line, or - for standard input.")
    flags.DEFINE_string("output", "-", "A file of JSON lines, or - for standard output.")
    flags.DEFINE_bool("overwrite", False, "Replace an output of another run.")
    flags.mark_flags_as_required(["config", "input"])
    common.run(main, __doc__)
