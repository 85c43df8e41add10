"""Decode the inputs of a file, speculatively or autoregressively.

    specjax decode --config.target=DIR --config.draft=DIR --input=FILE --output=OUT.jsonl

The fields of the config are listed below. With carry, a continued run starts without what it had
learned. A name that is an import path, and the file of --config itself, are code that runs: give
only code that you would run.

A policy that weighs costs, such as goodput, has them measured first; if they promise no gain, plain
decoding decodes. With --tune=false it is an error. --settings=FILE takes gamma, tree, policy, costs
and rule from a file of `specjax tune` instead, and measures nothing.

With --config.compare=True both methods then decode every input in turns. They are printed side by
side: tokens (of a tree its nodes), calls of both models, acceptance, times and the speedup.

With --config.rounds_file=FILE every round is a JSON line of that file, which
pandas.read_json(FILE, lines=True) reads: input (its number), sample, round, allowed (the longest
draft that the policy allowed), verified, accepted, emitted, tested; and of each drafted token
confidence, its probability in the draft's belief, and the belief's entropy in nats. Position i of a
draft, from 0, was tested if i < tested.

With --follow the terminal shows each running row as a line that grows.

Input: one line each, "-" for standard input. In FILE.jsonl each line is {"input": "…"}, or
{"messages": [{"role": "user", "content": "…"}]}, a chat for the target's chat template. Each of
batch_size rows takes the next input when it has ended.

Output: a JSON line for each input and sample, in the input's order: input (of a chat its prompt),
sample, output, tokens, target_calls, verified, accepted, accepted_lengths (rounds by accepted
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
import dataclasses
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import flags
from ml_collections import config_flags
from rich.console import Console

from specjax import rules
from specjax.checkpoints import Checkpoint
from specjax.cli import defaults, hosts, inputs, outputs, pairs, summary
from specjax.cli import follow as following
from specjax.cli.lines import Lines
from specjax.decoding import building, streaming
from specjax.decoding.conditions import conditions
from specjax.drafters.base import Drafter
from specjax.loop import Method
from specjax.measure import formats
from specjax.models import meshes
from specjax.results import Progress, Row
from specjax.settings import Settings
from specjax.support import command_line, compilation_cache, files, processes, runs
from specjax.support.processes import Group


def main(_) -> None:
    args = flags.FLAGS
    with processes.joined(args) as group:
        run_in(group, args, args.config)


def run_in(group: Group, args, config) -> None:
    """Run this process's part of the command."""
    tuned = read_settings(args, config)
    pairs.check(config)
    if args.format:
        with config.unlocked():  # a continued run has to have the same
            config.format = args.format
    if tuned is None and not args.tune and pairs.lacks_costs(config):
        raise ValueError(
            f"--config.policy={config.policy} weighs costs, and --tune=false measures none. "
            "Measure them by `specjax tune … --settings=FILE`, and decode with --settings=FILE."
        )
    if tuned is not None and not tuned.gamma:
        config.method = "autoregressive"
    if not args.output or args.output.endswith("/"):
        raise ValueError(
            f"--output={args.output} names no file: name one, or - for standard output."
        )
    if config.rounds_file and len({*map(os.path.realpath, (config.rounds_file, args.output))}) < 2:
        raise ValueError(f"rounds_file={config.rounds_file} is --output too: name another file.")
    if args.follow and not sys.stderr.isatty():
        raise ValueError("--follow writes to a terminal, and standard error is none: leave it out.")
    if group.count > 1:
        check_shared(args, config)
    texts = inputs.read_texts(args.input, config.target)
    if not texts:
        raise ValueError(f"--input={args.input} is empty: give it one input a line.")
    lines = Lines(config, args.input, texts)
    together = spans(group, config)
    writes = not (together and group.index)  # of those that decode each row together, process 0
    if together:
        processes.check_alike(outputs.began_with(config, texts))
    if not writes:
        warnings.simplefilter("ignore")  # process 0 shows them
        decode_texts(group, together, args, config, texts, lines, tuned)
        return
    with contextlib.ExitStack() as held:
        for file, flag in outputs.places(args, config):
            outputs.check_place(file, flag, args, config.target, config.draft)
            own = file if group.count == 1 or together else processes.part(file, group.index)
            held.enter_context(files.only_writer(own))
        outputs.check_resumes(args, config, texts, lines)
        decode_texts(group, together, args, config, texts, lines, tuned)


def spans(group: Group, config) -> bool:
    """Whether the mesh spans devices of all processes, which then decode each row together.

    Raises:
      ValueError: the processes have not joined.
    """
    if group.count == 1 or not config.mesh:
        return False
    found = meshes.size_of(config.mesh) > jax.local_device_count()
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
    row = found.as_row()
    for field in defaults.TUNED:
        config[field] = row[field]
    with config.unlocked():  # costs decide how long drafts are, so they belong to the output
        config.settings = runs.fingerprint(row)
        config.check_tokens = config.get("check_tokens", True) and found.check_tokens
    return found


def decode_texts(
    group: Group,
    together: bool,
    args,
    config,
    texts: list[str],
    lines: Lines,
    tuned: Settings | None = None,
) -> None:
    """Decode this process's part of the inputs.

    Args:
      together: whether all processes decode each row together, while process 0 writes.
    """
    silent = together and group.index > 0
    if config.mesh:
        pairs.check_plan(config, texts, tuned)
    pairs.check_fit(config)
    if not silent:
        command_line.say_loading(config.target, config.draft if pairs.with_draft(config) else "")
    target, draft = pairs.load_pair(config)
    if not silent:
        kind = "speculative" if pairs.with_draft(config) else "plain"
        command_line.say(f"compiling {kind} decoding of {config.batch_size} rows at once")
    method = build(group, together, config, texts, target, draft, tuned)
    # An old output may be replaced only now, when nothing but decoding can fail.
    total = len(texts) * config.samples
    output = outputs.open_output(group, together, args, config, texts, lines)
    to_file = args.output != "-"
    done = total - len(output.missing) if group.count == 1 else 0
    log = outputs.open_log(config, args, done)
    logs = log is not None or bool(args.format)
    events = decoded(method, target, texts, args, config, output.missing, logs)
    rows = streaming.in_order(lines.timed(events), config.samples, output.missing)
    begin, compiling = time.perf_counter(), compilation_cache.Watch()
    counts, lengths, tested = np.zeros(5, int), np.zeros(1, int), np.zeros(1, int)
    bar = command_line.Steps(
        rows,
        total=done + len(output.missing),
        initial=done,
        unit="row",
        disable=True if args.follow or silent else None,  # None: unless in a terminal
        resumes=to_file,
    )
    for row in bar:
        counts += 1, row.emitted, row.target_calls, row.verified, row.draft_calls
        lengths, tested = lengths + row.accepted_lengths, tested + row.tested
        record = lines.of(row)
        if log:
            for line in row.lines():
                log.append(line)
        output.append(row.index * config.samples + row.sample, record)
    seconds, compiled = time.perf_counter() - begin, compiling.seconds()
    if silent:
        return
    lacking = output.merge()
    beside = sys.stdout if to_file else sys.stderr  # where no rows are
    if counts[3]:
        print(summary.by_position(lengths, tested), file=beside)
    share = total if together else len(range(group.index, total, group.count))
    print(summary.took(share - counts[0], seconds, compiled, *counts.tolist()), file=beside)
    if lacking:
        print(f"{lacking} rows of {args.output} are still to come, from other processes.")
    if config.compare and method.drafter is not None:
        command_line.say("comparing with plain decoding: both decode every input in turns")
        summary.show(method, summary.compare(method, target, texts, config), beside)
    elif config.compare:
        print("Nothing is compared: no draft is used, so both methods are the same.", file=beside)
    elif draft is not None and (remark := rules.remark(method.rule, method.sampling)):
        print(f"{remark}.", file=beside)


def decoded(
    method: Method,
    target: Checkpoint,
    texts: list[str],
    args,
    config,
    only: Sequence[int],
    logs: bool,
) -> Iterator[Row | Progress]:
    """Decode the missing rows, and show them with --follow. Rounds are logged only of chains."""
    run = dataclasses.replace(
        defaults.run_of(config),
        only=only,
        eager=args.follow,
        every=following.ROUNDS if args.follow else 0,
        log_rounds=logs and pairs.with_draft(config) and pairs.is_chain(config),
    )
    events = streaming.as_they_end(method, target, texts, run)
    return following.follow(events, Console(stderr=True)) if args.follow else events


def build(
    group: Group,
    together: bool,
    config,
    texts: list[str],
    target: Checkpoint,
    draft: Checkpoint | Drafter | None,
    tuned: Settings | None,
) -> Method:
    """Build the loop, with measured costs if its policy needs them.

    Raises:
      ValueError: a batch does not fit, or several processes would decode otherwise than one.
    """
    method = pairs.method_of(config, target, draft, tuned)
    if tuned is not None:
        rows = min(config.batch_size, len(texts) * config.samples)
        used = conditions(method, target, draft, rows, config.max_new_tokens)
        tuned.warn_of_other_use(used)
    pairs.check_memory(config, texts, target, method)
    measures = tuned is None and pairs.lacks_costs(config)
    if measures and group.count > 1:
        raise ValueError(
            f"--config.policy={config.policy} weighs costs, which each process would measure for "
            "itself: give --settings of `specjax tune`, take another policy, or one process."
        )
    if measures:
        method = pairs.with_costs(method, target, texts, config)
    if group.count > 1 and not together and building.reads_batch(method):
        raise ValueError(
            f"--config.policy={config.policy} reads its batch, which several processes would cut "
            "otherwise than one: take another policy, or one process."
        )
    if measures and not (config.carry or config.rounds_file):
        rows = pairs.job(config, target, texts).rows
        decided = method
        method = building.plain_if_preferred(method, config.max_new_tokens, rows)
        if method is not decided:
            print(f"{config.policy}: no draft is worth its time, so none is made", file=sys.stderr)
    if config.carry:
        building.check_carry(method)
    return method


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
