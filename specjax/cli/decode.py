"""Decode the inputs of a file, speculatively or autoregressively.

    specjax decode --config.target=DIR --config.draft=DIR --input=FILE --output=OUT.jsonl

The fields of the config are listed below. With carry, a continued run starts without what it had
learned. A name that is an import path, and the file of --config itself, are code that runs: give
only code that you would run.

A policy that weighs costs, such as goodput, has them measured first, and the fastest method
decodes. With --tune=false it is an error. --settings=FILE takes gamma, tree, policy, costs and rule
from a file of `specjax tune` instead, and measures nothing.

With --config.compare=True both methods decode every input in turns, once the output is written.
They are printed side by side: tokens, calls, acceptance, times and the speedup. For a tree
`drafted` counts nodes, and levels have a count of their own.

With --config.rounds_file=FILE every round is a JSON line of that file, which
pandas.read_json(FILE, lines=True) reads: input (its number), sample, round, allowed (the longest
draft that the policy allowed), drafted, accepted, emitted, tested; and of each drafted token
confidence and entropy. Position i of a draft, from 0, was tested if i < tested.

With --follow the terminal shows each running row as a line that grows.

Input: one line each, "-" for standard input. In FILE.jsonl each line is {"input": "…"}, or
{"messages": [{"role": "user", "content": "…"}]}, a chat for the target's chat template. Each of
batch_size rows takes the next input when it has ended.

Output: a JSON line for each input and sample, in the input's order: input (of a chat its prompt),
sample, output, tokens, target_calls, drafted, accepted, accepted_lengths (rounds by accepted
tokens, 0 … gamma), tested (rounds by position in the draft that was reached), and of these
acceptance_by_position, P(accepted | all before it were), and mean_acceptance. Sums of
accepted_lengths and tested give both over many outputs. The same command, with the same inputs and
models, continues a run that was cut off. .OUT.jsonl.run.json beside the output has its settings,
fingerprints and commits. At the end acceptance by position, counts, τ and tokens a second go to
standard output, or to standard error if the rows go to standard output.

--format=vllm writes the lines as vLLM's responses, with its metrics of speculative decoding by
request and step. --format=spec_bench writes what Spec-Bench's scripts read, for one input at a
time, whose seconds are without compilation: question_id and category come from the input's line of
FILE.jsonl, where the number of the line and an empty text take the place of what it lacks.

Several processes share the inputs of a file (docs/scale.md): the same command for each, on one
machine or many, with --processes=N --process=0 … N-1. The last to end writes the output, which is
that of one process. A mesh over the devices of all also needs --coordinator=HOST:PORT, or
--coordinator=auto on a cluster that jax knows.
"""

import contextlib
import json
import pathlib
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

import jax
import numpy as np
from absl import flags
from ml_collections import config_flags
from rich.console import Console

from specjax import checkpoints, decoding, drafters, policies, rules, trees
from specjax.cli import defaults, hosts, inputs
from specjax.cli import follow as following
from specjax.cli.lines import Lines
from specjax.drafters.base import Drafter
from specjax.loop import Method
from specjax.measure import formats, provenance, report, timing
from specjax.models import sharding
from specjax.models.memory import check_fits
from specjax.results import acceptance_rates, summarize
from specjax.settings import Settings
from specjax.support import command_line, compilation_cache, files, processes, runs
from specjax.support.processes import ALONE, Group
from specjax.tuning import fitting, trials

METHODS = ("speculative", "autoregressive")


def main(_) -> None:
    args = flags.FLAGS
    with processes.joined(args) as group:
        run_in(group, args, args.config)


def run_in(group: Group, args, config) -> None:
    """Run this process's part of the command."""
    tuned = read_settings(args, config)
    check(config)
    if args.format:
        with config.unlocked():  # a continued run has to have the same
            config.format = args.format
    if tuned is None and not args.tune and lacks_costs(config):
        raise ValueError(
            f"--config.policy={config.policy} weighs costs, and --tune=false measures none. "
            "Measure them by `specjax tune … --settings=FILE`, and decode with --settings=FILE."
        )
    if tuned is not None and not tuned.gamma:
        config.method = "autoregressive"
    if config.rounds_file and same_file(config.rounds_file, args.output):
        raise ValueError(f"rounds_file={config.rounds_file} is --output too: name another file.")
    if args.follow and not sys.stderr.isatty():
        raise ValueError("--follow writes to a terminal, and standard error is none: leave it out.")
    if group.count > 1:
        check_shared(args, config)
    texts = inputs.read_texts(args.input, config.target)
    if not texts:
        raise ValueError(f"--input={args.input} is empty: give it one input a line.")
    together = spans(group, config)
    if together:
        processes.check_alike(began_with(config, texts))
    if together and group.index:
        warnings.simplefilter("ignore")  # process 0 shows them
    with contextlib.ExitStack() as held:
        for file, flag in places(args, config) if not (together and group.index) else ():
            check_place(file, flag, args.input)
            own = file if group.count == 1 or together else processes.part(file, group.index)
            held.enter_context(files.only_writer(own))
        if not (together and group.index):
            check_resumes(args, config, texts)
        decode_texts(group, together, args, config, texts, tuned)


def spans(group: Group, config) -> bool:
    """Whether the mesh spans devices of all processes, which then decode each row together.

    Raises:
      ValueError: the processes have not joined.
    """
    if group.count == 1 or not config.mesh:
        return False
    found = sharding.size_of(config.mesh) > jax.local_device_count()
    if found and not group.joined:
        raise ValueError(
            f"mesh={config.mesh} takes devices of several processes: give --coordinator=HOST:PORT "
            "too, where process 0 can be reached."
        )
    return found


def read_settings(args, config) -> Settings | None:
    """Read the --settings file of `specjax tune` into the config; None without the flag.

    Raises:
      ValueError: the config sets such a value itself, or the file holds no settings.
    """
    if not args.settings:
        return None
    own = config_flags.get_override_values(args["config"])  # of this command line
    usual = defaults.decode()
    for field in defaults.TUNED:
        if field in own or config[field] != usual[field]:
            raise ValueError(
                f"--settings={args.settings} and --config.{field}={config[field]} are both given: "
                "the settings already have it. Leave one out."
            )
    found = Settings.load(args.settings)
    for field in defaults.TUNED:
        config[field] = getattr(found, field)
    with config.unlocked():  # costs decide how long drafts are, so they belong to the output
        config.settings = runs.fingerprint(found.as_row())
    return found


def lacks_costs(config) -> bool:
    """Whether the policy needs costs that must still be measured."""
    return with_draft(config) and bool(config.policy) and policies.needs_costs(config.policy)


def decode_texts(
    group: Group,
    together: bool,
    args,
    config,
    texts: list[str],
    tuned: Settings | None = None,
) -> None:
    """Decode this process's part of the inputs.

    Args:
      together: whether all processes decode each row together, while process 0 writes.
    """
    silent = together and group.index > 0
    lines = Lines(config, args.input, texts)
    if config.mesh:
        check_plan(config, texts, tuned)
    if not silent:
        command_line.say_loading(config.target, config.draft if with_draft(config) else "")
    target, draft = load_pair(config)
    if not silent:
        kind = "speculative" if with_draft(config) else "plain"
        command_line.say(f"compiling {kind} decoding of {config.batch_size} rows at once")
    method = method_of(config, target, draft, tuned)
    check_memory(config, texts, target, method)
    measured = tuned is None and lacks_costs(config)
    if measured and group.count > 1:
        raise ValueError(
            f"--config.policy={config.policy} weighs costs, which each process would measure for "
            "itself: give --settings of `specjax tune`, take another policy, or one process."
        )
    if measured:
        method = with_costs(method, target, texts, config)
    if group.count > 1 and not together and decoding.reads_batch(method):
        raise ValueError(
            f"--config.policy={config.policy} reads its batch, which several processes would cut "
            "otherwise than one: take another policy, or one process."
        )
    if measured and not (config.carry or config.rounds_file):
        method = chosen(method, target, texts, config)
    if config.carry:
        decoding.check_carry(method)
    # An old output may be replaced only now, when nothing but decoding can fail.
    total = len(texts) * config.samples
    output = open_output(group, together, args, config, texts)
    missing = output.missing if output else range(total)
    done = total - len(missing) if group.count == 1 else 0
    log = open_log(config, args, done)
    events = decoding.as_they_end(
        method,
        target,
        texts,
        max_new_tokens=config.max_new_tokens,
        key=jax.random.key(config.seed),
        samples=config.samples,
        batch_size=config.batch_size,
        max_source_len=config.max_source_len or None,
        only=missing,
        names=(config.target, config.draft),
        carry=config.carry,
        eager=args.follow,
        every=following.ROUNDS if args.follow else 0,
        logs=log is not None or (bool(args.format) and with_draft(config) and is_chain(config)),
    )
    if args.follow:
        events = following.follow(events, Console(stderr=True))
    rows = decoding.in_order(lines.timed(events), config.samples, missing)
    begin, compiling = time.perf_counter(), compilation_cache.Watch()
    counts, lengths, tested = np.zeros(5, int), np.zeros(1, int), np.zeros(1, int)
    bar = command_line.Steps(
        rows,
        total=done + len(missing),
        initial=done,
        unit="row",
        disable=True if args.follow or silent else None,  # None: unless in a terminal
        resumes=output is not None,
    )
    for row in bar:
        counts += 1, row.emitted, row.target_calls, row.drafted, row.levels
        lengths, tested = lengths + row.accepted_lengths, tested + row.tested
        record = lines.of(row)
        if log:
            for line in row.lines():
                log.append(line)
        if output:
            output.append(row.index * config.samples + row.sample, record)
        else:
            print(json.dumps(record, ensure_ascii=False), flush=True)
    seconds, compiled = time.perf_counter() - begin, compiling.seconds()
    if silent:
        return
    lacking = output.merge() if output else 0
    beside = sys.stdout if output else sys.stderr  # where no rows are
    if counts[3]:
        print(by_position(lengths, tested), file=beside)
    share = total if together else len(range(group.index, total, group.count))
    print(took(share - counts[0], seconds, compiled, *counts.tolist()), file=beside)
    if lacking:
        print(f"{lacking} rows of {args.output} are still to come, from other processes.")
    if config.compare and method.drafter is not None:
        command_line.say("comparing with plain decoding: both decode every input in turns")
        show(method, compare(method, target, texts, config), beside)
    elif config.compare:
        print("Nothing is compared: no draft is used, so both methods are the same.", file=beside)
    elif draft is not None and (remark := rules.remark(method.rule, method.sampling)):
        print(f"{remark}.", file=beside)


def method_of(
    config,
    target: checkpoints.Checkpoint,
    draft: checkpoints.Checkpoint | Drafter | None,
    tuned: Settings | None = None,
) -> Method:
    """Build the loop, by the settings if there are any; a policy that lacks costs comes later."""
    how: dict[str, Any] = {
        "sampling": defaults.sampling(config),
        "check_tokens": config.get("check_tokens", True),
    }
    if tuned is not None:
        return decoding.tuned(target, draft, tuned, **how)
    return decoding.build(
        target,
        draft,
        gamma=config.gamma,
        rule=config.rule or None,
        policy=None if lacks_costs(config) else config.policy or None,
        tree=config.tree,
        **how,
    )


def same_file(one: str, other: str) -> bool:
    """Whether two names are of one file."""
    return pathlib.Path(one).resolve() == pathlib.Path(other).resolve()


def check_shared(args, config) -> None:
    """Raise ValueError for what several processes cannot do."""
    for flag, value in (("input", args.input), ("output", args.output)):
        if value == "-":
            raise ValueError(f"--{flag}=- is for one process: give several a file that all see.")
    if args.follow:
        raise ValueError("--follow is for one process: leave it out.")
    if args.overwrite:
        raise ValueError(
            f"--overwrite would remove what other processes write: remove {args.output} first."
        )
    for field in ("compare", "rounds_file", "carry"):
        if config[field]:
            raise ValueError(f"--config.{field}={config[field]} is for one process: leave it out.")


def is_chain(config) -> bool:
    """Whether drafts are chains, whose rounds can be logged."""
    return isinstance(trees.parse(config.tree), trees.Chain)


def with_draft(config) -> bool:
    """Whether the config's method uses its draft."""
    return config.method == "speculative"


def models_of(config) -> dict[str, dict[str, str]]:
    """Fingerprints of the target's files and, where there is one, of the draft's."""
    found = {"target": checkpoints.fingerprint(config.target)}
    return found | ({"draft": drafters.fingerprint(config.draft)} if with_draft(config) else {})


def rows_of(config, texts: list[str]) -> int:
    """Number of rows of a batch."""
    return min(config.batch_size, len(texts) * config.samples)


def with_costs(method, target: checkpoints.Checkpoint, texts: list[str], config) -> Method:
    """Measure and print costs, and build the loop with its policy and these costs."""
    found = fitting.costs_for(config.policy, method, target, texts, **measuring(config, texts))
    print(f"{config.policy}: measured {fitting.words(found)}", file=sys.stderr)
    return fitting.with_costs(method, config.policy, found)


def chosen(method, target: checkpoints.Checkpoint, texts: list[str], config) -> Method:
    """Choose and print the fastest: the method, plain decoding, or drafts of one length.

    Arguments: `with_costs`.
    """
    found = trials.fastest(method, target, texts, **measuring(config, texts))
    sentence = ""
    if not found.gamma_max:
        sentence = "no draft is worth its time, so none is made"
    elif found is not method:
        drafted = f"{found.gamma_max} token{'s' * (found.gamma_max != 1)}"
        sentence = f"in its place every round drafts {drafted}"
    if sentence:
        print(f"{config.policy}: {sentence}", file=sys.stderr)
    return found


def measuring(config, texts: list[str]) -> dict[str, Any]:
    """Arguments of the functions that measure before a run."""
    return {
        "max_new_tokens": config.max_new_tokens,
        "key": jax.random.key(config.seed),
        "batch_size": rows_of(config, texts),
        "max_source_len": config.max_source_len or None,
        "names": (config.target, config.draft),
    }


def by_position(lengths: np.ndarray, tested: np.ndarray) -> str:
    """Describe acceptance by position, given that all before were accepted, and its mean.

    Args:
      lengths, tested: `Row.accepted_lengths` and `Row.tested`, summed over rows.
    """
    rates = acceptance_rates(lengths, tested)
    shares = ", ".join("–" if np.isnan(rate) else f"{rate:.2f}" for rate in rates)
    none = " (–: none was tested)" if "–" in shares else ""
    mean = lengths @ np.arange(len(lengths)) / tested.sum() if tested.any() else np.nan
    return f"Accepted of those tested, by position in the draft: {shares}{none}; mean {mean:.2f}."


def took(
    before: int,
    seconds: float,
    compiled: float,
    outputs: int,
    tokens: int,
    calls: int,
    drafted: int,
    levels: int,
) -> str:
    """Describe counts and rates of a run, in a sentence.

    Args:
      before: number of outputs that an earlier run left.
      seconds: time of the run; `compiled` of them were compilation.
    """
    if not outputs:
        return f"All {before} outputs were there already."
    calls = max(calls, 1)
    return (
        f"{outputs} outputs{f', {before} were there already' if before else ''}: {tokens:,} tokens "
        f"in {calls:,} target calls, τ = {tokens / calls:.2f}"
        + (f", {drafted / calls:.1f} nodes in {levels / calls:.1f} levels" * (drafted > levels))
        + f"; {seconds:.1f} s, {compiled:.1f} of them compiling; "
        f"{tokens / max(seconds - compiled, 1e-9):,.0f} tokens a second without compilation."
    )


def compare(method: Method, target: checkpoints.Checkpoint, texts, config) -> timing.Comparison:
    """Compare both methods on all inputs that are not blank, one output each."""
    kept = [text for text in texts if not decoding.is_blank(target, text)]
    sources = decoding.tokenize(target, kept, config.max_source_len or None)
    return timing.compare(
        method,
        target,
        sources,
        max_new_tokens=config.max_new_tokens,
        key=jax.random.key(config.seed),
        batch_size=config.batch_size,
        names=(config.target, config.draft),
    )


def show(method: Method, found: timing.Comparison, file: TextIO) -> None:
    """Print the comparison as a table, and a summary."""
    both, costs, gamma = (timing.PLAIN, timing.SPECULATIVE), found.costs, method.gamma_max
    tree = method.branches
    of = (" for a level", f" for {method.slots - 1} nodes") if tree else ("", "")
    counts = [summarize(found.outputs(name)) for name in both]

    def row(name: str, cell) -> dict[str, str]:
        return {"name": name} | {str(i): cell(counts[i], both[i]) for i in range(2)}

    rows = [
        row("outputs", lambda count, _: f"{count.outputs:,}"),
        row("tokens", lambda count, _: f"{count.tokens:,}"),
        row("target calls", lambda count, _: f"{count.iterations:,}"),
        row("tokens per target call", lambda count, _: f"{count.tokens_per_iteration:.2f}"),
        row("drafted", lambda count, _: f"{count.drafted:,}"),
        *([row("in levels", lambda count, _: f"{count.levels:,}")] if tree else []),
        row("accepted", lambda count, _: f"{count.accepted:,}"),
        row("corrections", lambda count, _: f"{count.corrections:,}"),
        row("bonus", lambda count, name: f"{count.bonus:,}" if name != timing.PLAIN else "–"),
        row("seconds", lambda _, name: f"{np.median(found.decode[name].sum(1)):.3f}"),
        row("seconds, with prefill", lambda _, name: f"{np.median(found.whole[name].sum(1)):.3f}"),
    ]
    columns: list[report.Column] = [
        ("", lambda row: row["name"]),
        ("autoregressive", lambda row: row["0"]),
        ("speculative", lambda row: row["1"]),
    ]
    expected = "lost in noise" if found.predicted is None else f"{found.predicted:.2f}"
    phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found.phases.items())
    console = Console(file=file, width=None if file.isatty() else 140, highlight=False)
    console.print(report.table(columns, rows, "Both methods"))
    for line in (
        by_position(np.array(counts[1].accepted_lengths), np.array(counts[1].tested)),
        f"Speedup {found.speedup:.2f}, with prefill {found.speedup_end_to_end:.2f}; expected of "
        f"c = {costs.c:.3f}{of[0]} and v = {costs.v(gamma):.2f}{of[1]}: {expected}.",
        f"Speculative phases, estimated: {phases}.",
        likeness(method, found),
    ):
        console.print(line, soft_wrap=True)


def likeness(method: Method, found: timing.Comparison) -> str:
    """Describe whether the tokens agree, where they should, and the rule's guarantee."""
    pairs = list(zip(found.outputs(timing.PLAIN), found.outputs(), strict=True))
    same = sum(plain.tokens == spec.tokens for plain, spec in pairs)
    if same == len(pairs) or method.sampling.greedy:
        sentence = f"{same} of {len(pairs)} outputs are the same tokens."
    else:
        sentence = "At temperatures above 0 the methods draw different samples of one distribution."
    if remark := rules.remark(method.rule, method.sampling):
        sentence = sentence.replace("samples of one distribution", "samples")
        return f"{sentence} {remark}."
    return sentence


def check(config) -> None:
    """Raise ValueError for errors that show before anything is loaded."""
    if config.method not in METHODS:
        raise ValueError(f"method={config.method!r} must be one of {', '.join(METHODS)}.")
    defaults.precision(config)
    if not config.target:
        raise ValueError("No target: give --config.target=DIR, or a name on the Hugging Face hub.")
    if config.method == "speculative" and not config.draft:
        raise ValueError(
            "No draft: give --config.draft=DIR, or lookup, which needs no model; or "
            "--config.method=autoregressive to do without."
        )
    if config.compare and config.method != "speculative":
        raise ValueError("compare=True needs --config.method=speculative: it does the other too.")
    if config.rounds_file and config.method != "speculative":
        raise ValueError("rounds_file needs --config.method=speculative: it logs its rounds.")
    if config.rounds_file and not is_chain(config):
        raise ValueError(f"rounds_file is for chains, and tree={config.tree!r} is none.")
    if config.mesh:
        sharding.mesh_of(config.mesh)
    drafters.maker(config.draft)  # fails on a misspelt name before models are loaded
    if config.policy:
        policies.check(config.policy)  # fails on a misspelt name before models are loaded
    if config.rule:
        rules.parse(config.rule)


class Output(Protocol):
    """Rows that are written as they come, by number."""

    @property
    def missing(self) -> Sequence[int]: ...

    def append(self, number: int, row: dict[str, Any]) -> None: ...

    def merge(self) -> int: ...


class Whole:
    """The output of one process, which grows in order."""

    def __init__(self, file: pathlib.Path, total: int):
        self.rows = files.Rows(file)
        self.missing: range = range(len(self.rows.done), total)

    def append(self, number: int, row: dict[str, Any]) -> None:
        """Append a row at the end, which is its place."""
        del number
        self.rows.append(row)

    def merge(self) -> int:
        """Do nothing: no row is missing."""
        return 0


class Unwritten:
    """The output of a process that decodes together with process 0, which writes it."""

    def __init__(self, missing: range):
        self.missing = missing

    def append(self, number: int, row: dict[str, Any]) -> None:
        """Drop the row: process 0 writes it."""

    def merge(self) -> int:
        """Return 0: no row is here."""
        return 0


def places(args, config) -> list[tuple[pathlib.Path, str]]:
    """List the files that are written, each with its flag."""
    output = "" if args.output == "-" else args.output
    named = {"output": output, "config.rounds_file": config.rounds_file}
    return [(pathlib.Path(name), flag) for flag, name in named.items() if name]


def check_place(file: pathlib.Path, flag: str, source: str) -> None:
    """Raise ValueError if a file cannot be written, is no regular file, or is the input."""
    files.check_regular(file, f"--{flag}={file}")
    command_line.make_workdir(str(file.parent), flag=flag)
    for written in (file, mark_of(file)):
        command_line.check_apart(written, source, flag=flag)


def mark_of(output: pathlib.Path) -> pathlib.Path:
    """Path of the file that records how an output was made."""
    return output.with_name(f".{output.name}.run.json")


def began_with(config, texts: list[str]) -> dict[str, Any]:
    """The origin of an output: settings, a hash of the input, fingerprints of the models."""
    return {
        "settings": runs.settings(config),
        "input": runs.fingerprint(texts),
        "models": models_of(config),
    }


def check_resumes(args, config, texts: list[str]) -> None:
    """Raise ValueError if the output holds rows of other settings, inputs or models."""
    file = pathlib.Path(args.output)
    if args.output == "-" or args.overwrite or not (file.exists() or processes.parts(file)):
        return
    way_out = "Name another file, or pass --overwrite to replace it."
    found = runs.read_mark(mark_of(file))
    if "settings" not in found:
        raise ValueError(
            f"--output={args.output} exists and is no output of this command. {way_out}"
        )
    wanted = began_with(config, texts)
    kept = {name: found.get(name) for name in wanted}
    runs.check_same(f"--output={args.output}", kept, wanted, way_out)


def open_output(group: Group, together: bool, args, config, texts: list[str]) -> Output | None:
    """Open the output's rows, which may hold those of an earlier run of the same command.

    A file beside the output says which command it belongs to. None: standard output.
    """
    if args.output == "-":
        return None
    file, total = pathlib.Path(args.output), len(texts) * config.samples
    if together and group.index:
        return Unwritten(range(len(files.read_rows(file)), total))
    if group.count > 1 and not together:
        with processes.beginning(file):
            check_resumes(args, config, texts)
            write_mark(file, config, texts)
            return processes.SharedRows(group, file, total)
    if args.overwrite:
        for old in (file, mark_of(file), *processes.parts(file)):
            files.remove(old)
    write_mark(file, config, texts)
    return processes.SharedRows(ALONE, file, total) if processes.parts(file) else Whole(file, total)


def write_mark(file: pathlib.Path, config, texts: list[str]) -> None:
    """Record beside an output how it is made."""
    commits = [*runs.read_mark(mark_of(file)).get("commits", []), provenance.commit()]
    wanted = began_with(config, texts) | {"commits": list(dict.fromkeys(commits))}
    files.write_json(mark_of(file), wanted)


def open_log(config, args, done: int) -> files.Rows | None:
    """Open the file of rounds, with those of existing outputs; None without a rounds_file."""
    if not config.rounds_file:
        return None
    file = pathlib.Path(config.rounds_file)
    if not done and file.exists() and file.stat().st_size and not args.overwrite:
        raise ValueError(
            f"rounds_file={config.rounds_file} exists. Name another file, or give --overwrite to "
            "lose it."
        )
    log = files.Rows(file)
    log.keep(lambda line: line["input"] * config.samples + line["sample"] < done)
    return log


def load_pair(config) -> tuple[checkpoints.Checkpoint, checkpoints.Checkpoint | Drafter | None]:
    """Load the target and, for speculation, the draft."""
    target = checkpoints.load(config.target, **defaults.precision(config), mesh=config.mesh or None)
    if config.method == "autoregressive":
        return target, None
    options = {"dtype": defaults.DTYPES[config.dtype], "replicate": config.replicate_draft}
    return target, drafters.load(config.draft, target, **options)


def check_plan(config, texts: list[str], tuned: Settings | None = None) -> None:
    """Raise ValueError if the models and a batch do not fit on the mesh, before loading them."""
    precision = defaults.precision(config)
    options = {"dtype": precision["dtype"], "mesh": config.mesh}
    draft: checkpoints.Checkpoint | Drafter | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading will issue them
        target = checkpoints.outline(config.target, **precision, mesh=config.mesh)
        if config.method == "speculative":
            if drafters.maker(config.draft) or drafters.is_attached(config.draft):
                draft = drafters.load(config.draft, target)
            else:
                draft = checkpoints.outline(
                    config.draft, replicate=config.replicate_draft, **options
                )
    check_memory(config, texts, target, method_of(config, target, draft, tuned), loaded=False)


def check_memory(
    config, texts: list[str], target: checkpoints.Checkpoint, method: Method, *, loaded: bool = True
) -> None:
    """Raise ValueError if a batch does not fit beside the models.

    Args:
      loaded: False: the models are outlines, and count too.
    """
    total = len(texts) * config.samples
    rows = min(config.batch_size, total)
    in_batches = config.carry or decoding.reads_batch(method)  # one after the other
    texts = sorted(texts, key=len)[-8:]  # the most tokens are among these, or nearly
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # decoding will warn of texts that it cuts
        sources = decoding.tokenize(target, texts, config.max_source_len or None)
    if not any(sources):
        return
    need = decoding.needed(
        method,
        target,
        max(map(len, sources)),
        rows=rows,
        max_new_tokens=config.max_new_tokens,
        admits=0 if total <= rows or in_batches else decoding.at_once(rows),
    )
    check_fits(
        f"{'C' if loaded else 'The models, c'}aches and distributions of {rows} rows",
        need.state + need.temporary + (0 if loaded else need.params),
        "Lower batch_size, max_new_tokens or max_source_len, or set dtype=bfloat16.",
        *sharding.held_by(target.model),
    )


def run() -> None:
    """Run the command with the flags of this process."""
    config_flags.DEFINE_config_file("config", None, "What to run with; none: the defaults.")
    flags.DEFINE_string("input", None, inputs.HELP)
    flags.DEFINE_string("output", "-", "A file of JSON lines, or - for standard output.")
    flags.DEFINE_enum("format", "", ("", *formats.FORMATS), "Of the output's lines; empty: ours.")
    flags.DEFINE_bool("overwrite", False, "Replace an output of another run; a regular file.")
    flags.DEFINE_string("settings", "", "A file of `specjax tune`, which says how to draft.")
    flags.DEFINE_bool("tune", True, "Measure the costs that a policy weighs, if it has none.")
    flags.DEFINE_bool("follow", False, "Show the rows that run in the terminal, as they grow.")
    hosts.define_flags("share the inputs", __name__)
    flags.mark_flags_as_required(["config", "input"])
    command_line.run(
        main,
        __doc__,
        config=f"{defaults.__file__}:decode",
        fields=defaults.help_of(defaults.DECODE),
    )
