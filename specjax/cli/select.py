"""Choose a draft: measure candidates on one's own inputs, and recommend one, or none.

    specjax select --config.target=DIR --config.drafts=DIR,DIR,lookup --input=FILE [--workdir=DIR]

The fields of the config are listed below; docs/choosing.md says what is measured and how to read
it.

Input: one line each, "-" for standard input. In FILE.jsonl each line is {"input": "…"}, or
{"messages": [{"role": "user", "content": "…"}]}, a chat for the target's chat template, or a
question of Spec-Bench, whose first turn is taken.

--settings names a JSON file, which `specjax decode` takes as its --settings, with the recommended
draft as its --config.draft and one row at a time, as it was timed.

With --workdir each candidate's row is kept in results.jsonl there. The same command, with the same
inputs and models, continues a run that was cut off.
"""

import dataclasses
import functools
import pathlib
import sys

from absl import flags
from ml_collections import config_flags
from rich.console import Console

from specjax import checkpoints, drafters
from specjax.cli import defaults, outputs, pairs
from specjax.cli.inputs import HELP, read_texts
from specjax.defaults import MINUTES
from specjax.measure import doubts, report, timing
from specjax.measure.provenance import Results, dtype_of
from specjax.models import meshes
from specjax.models.memory import gigabytes, memory_free
from specjax.support import command_line, named, runs
from specjax.support.named import short
from specjax.tuning.candidates import Candidates, check_numbers
from specjax.tuning.members import smaller_members
from specjax.tuning.pace import check_minutes
from specjax.tuning.recommendation import PLAIN, Candidate, recommend


def main(_) -> None:
    args, config = flags.FLAGS, flags.FLAGS.config
    defaults.precision(config)
    defaults.sampling(config)
    if config.mesh:
        meshes.mesh_of(config.mesh)
    if not config.target:
        raise ValueError("No target: give --config.target=DIR, or a name on the Hugging Face hub.")
    check_numbers(config.gammas, config.nodes, config.timed_inputs, config.repeats)
    check_minutes(config.get("minutes", MINUTES))
    given = config.drafts
    drafts = named.split(given) if isinstance(given, str) else list(given)
    drafts = drafts or smaller_members(config.target)
    texts = inputs(args.input, config)
    results = None
    if args.workdir:
        results = open_results(args.workdir, config, drafts, texts, source=args.input or "-")
    if args.settings:
        outputs.check_place(pathlib.Path(args.settings), "settings", args, config.target, *drafts)
    if busy := doubts.busy_before(doubts.used_by_others()):
        command_line.say(busy)
    write = functools.partial(command_line.Steps.write, file=sys.stderr)  # above the bar
    with command_line.clocked(write) as say:
        candidates = measure(config, drafts, texts, results, say)
    found = recommend(candidates)
    show(candidates, config, found.words)
    if args.settings:
        found.settings.save(args.settings)


def inputs(path: str | None, config) -> list[str]:
    """Load the inputs to choose by; ValueError if no file is named."""
    if path is None:
        raise ValueError("No inputs: give --input=FILE, one a line, of the kind to be decoded.")
    texts = [text for text in read_texts(path, config.target) if text.strip()]
    return texts[: config.alpha_inputs]


def open_results(
    workdir: str, config, drafts: list[str], texts: list[str], *, source: str = "-"
) -> Results:
    """Open the rows of an earlier run of the same command; never the file of the texts."""
    path = command_line.make_workdir(workdir) / "results.jsonl"
    command_line.check_apart(path, source, flag="workdir")
    results = Results(path)
    mine = runs.fingerprint(runs.settings(config), drafts, texts)
    settings = {**runs.settings(config), "drafts": drafts, "inputs": runs.fingerprint(texts)}
    runs.keep_settings(results, settings, mine, "rows of another command or input")
    return results


def measure(
    config,
    drafts: list[str],
    texts: list[str],
    results: Results | None,
    say: timing.Say = command_line.say,
) -> list[Candidate]:
    """Measure all candidates, in their order; the target is loaded if any is missing."""
    precision = defaults.precision(config)
    fields = {field.name for field in dataclasses.fields(Candidate)}
    rows = results.done if results else []
    kept = [Candidate(**{k: v for k, v in row.items() if k in fields}) for row in rows]
    done = {(candidate.name, bool(candidate.tree)): candidate for candidate in kept}

    @functools.cache
    def trial() -> Candidates:
        if results:
            runs.keep(results, {"target": checkpoints.fingerprint(config.target)})
        command_line.say_loading(config.target, say=say)
        target = checkpoints.load(config.target, **precision, mesh=config.mesh or None)
        minutes = config.get("minutes", MINUTES)
        job = pairs.job(config, target, texts, minutes, lambda what: say(f"{label}{what}"))
        kept = config.gammas, config.nodes, config.timed_inputs, config.repeats
        check_tokens = config.get("check_tokens", True)
        return Candidates(job, drafts, *kept, precision["dtype"], check_tokens)

    run = runs.fingerprint(runs.settings(config), drafts, texts)
    wanted = [
        (draft, tree) for draft in drafts for tree in ([False, True] if config.nodes else [False])
    ]
    missing = [one for one in wanted if one not in done]
    resumes = results is not None
    bar = command_line.Steps(missing, resumes=resumes, unit="draft", disable=None)
    for number, one in enumerate(bar, 1):
        shape = " with trees" if one[1] else ""
        label = f"{short(one[0])}{shape} ({number} of {len(missing)}): "
        bar.set_description(short(one[0]))
        done[one] = trial().measure(*one)
        if results and not done[one].problem:
            runs.keep(results, {f"draft {one[0]}": drafters.fingerprint(one[0])})
        if results:
            facts = {"dtype": dtype_of(trial().job.target), "batch": 1, "seed": config.seed}
            results.append({**dataclasses.asdict(done[one]), **facts, "run": run})
    return [done[one] for one in wanted]


def show(candidates: list[Candidate], config, words: str) -> None:
    """Print the table, and the recommendation in words."""
    # A pipe has no width of its own, and 80 columns would cut the table.
    console = Console(width=None if sys.stdout.isatty() else 140, markup=False, highlight=False)
    rows = [dataclasses.asdict(candidate) for candidate in (*candidates, PLAIN)]
    title = f"Drafts for {short(config.target)}, temperature {config.temperature:g}, batch 1"
    report.show(console, COLUMNS, rows, title)
    console.print(
        "α: chance that a drafted token is accepted. agree: how often both models find the same "
        "token likeliest. γ: of a tree its depth. c, v: a draft step and the rest of a round in "
        "target steps. τ: tokens for each call of the target. predicted, loop: speedup over plain "
        "decoding without prefill; total: with it. Every other timed input chooses among the "
        "drafts; loop and total are of the rest. memory: both models and their caches at batch "
        f"{config.batch_size}. –: of plain decoding, which drafts nothing, or not measured.\n",
    )
    if (free := memory_free()) is not None:
        console.print(f"Free on this device now: {gigabytes(free)}.\n")
    for candidate in candidates:
        for remark in candidate.remarks:
            console.print(f"{short(candidate.name)}: {remark}.", soft_wrap=True)
    console.print(words, soft_wrap=True)


def _number(field: str, form: str = ".2f"):
    """Format a field that is 0 where it was not measured."""
    return lambda row: format(row[field], form) if row[field] else "–"


def _of_draft(field: str, form: str = ".2f"):
    """Format a field that plain decoding does not have."""
    return lambda row: format(row[field], form) if row["gamma"] else "–"


COLUMNS: list[report.Column] = [
    ("draft", lambda row: short(row["name"])),
    ("fits", lambda row: "no" if row["problem"] else "yes"),
    ("α", _of_draft("alpha", ".3f")),
    ("agree", _of_draft("agreement", ".3f")),
    ("c", _of_draft("c", ".3f")),
    ("γ", _of_draft("gamma", "d")),
    ("nodes", _of_draft("nodes", "d")),
    ("v", _of_draft("v")),
    ("τ", _number("tau")),
    ("predicted", _number("predicted")),
    ("loop", _number("speedup")),
    ("total", _number("speedup_end_to_end")),
    ("memory", lambda row: gigabytes(row["memory"]) if row["memory"] else "–"),
]


def run() -> None:
    """Run the command with the flags of this process."""
    config_flags.DEFINE_config_file("config", None, "What to choose from; none: the defaults.")
    flags.DEFINE_string("input", None, HELP)
    flags.DEFINE_string("settings", "", "A JSON file for `specjax decode`, to write; empty: none.")
    flags.DEFINE_string("workdir", None, "A directory that keeps the rows of an unfinished run.")
    flags.mark_flags_as_required(["config"])
    command_line.run(
        main,
        __doc__,
        config=f"{defaults.__file__}:select",
        fields=defaults.help_of(defaults.SELECT),
    )
