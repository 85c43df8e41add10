"""What the tables share: the target with its outputs, the drafts, and the rows made so far."""

import copy
import dataclasses
import functools
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from experiments.chat import fetch
from experiments.tasks.config import load_examples, not_held_out
from experiments.tasks.examples import Example
from experiments.train import batches
from specjax import checkpoints, drafters, sampling, trees
from specjax.cli import defaults
from specjax.decoding import building, streaming
from specjax.decoding.texts import common_width, tokenize
from specjax.drafters import ngram
from specjax.drafters.base import Drafter
from specjax.measure import metrics
from specjax.measure.provenance import Results, dtype_of
from specjax.replay import rollouts
from specjax.replay.rollouts import Rollouts
from specjax.results import Row
from specjax.rules import AcceptanceRule
from specjax.sampling import Sampling
from specjax.support import command_line, processes, runs
from specjax.support.files import read_json
from specjax.support.ranges import listed, whole

NGRAMS = tuple(drafters.NAMES)
COUNTS = (  # fields of experiments' configs that are whole numbers ≥ 1
    "alpha_inputs", "timed_inputs", "tau_inputs", "cost_inputs", "repeats", "cost_repeats",
    "cost_tries", "keys_per_repeat", "steps", "batch_size", "max_new_tokens", "gamma",
    "gamma_max", "every", "outputs", "tokens", "resamples",
)  # fmt: skip
LISTS = ("gammas", "static", "batch_sizes", "admits")  # and lists of such numbers


class Study:
    """A config with what it names, loaded when it is first needed."""

    def __init__(self, config, results: Results):
        self.config, self.results = config, results
        self.precision = defaults.precision(config)
        self._draft: dict[str, checkpoints.Checkpoint | Drafter] = {}
        self._outputs: dict[float, list[list[int]]] = {}

    @functools.cached_property
    def target(self) -> checkpoints.Checkpoint:
        """Whose distribution all outputs follow."""
        mesh = self.config.get("mesh") or None
        name = self.located(self.config.target)
        self.keep("target", checkpoints.fingerprint(name))
        command_line.say_loading(name)
        loaded = checkpoints.load(name, **self.precision, mesh=mesh)
        command_line.say("compiling programs, each before it first runs")
        return loaded

    @functools.cached_property
    def examples(self) -> list[Example]:
        """The task's examples, in their order."""
        found = load_examples(self.config, target=self.located(self.config.target))
        name = " ".join(("data", *self.config.get("categories", ())))
        self.keep(name, runs.fingerprint([dataclasses.astuple(example) for example in found]))
        return found

    def of_category(self, category: str) -> "Study":
        """The same models and results with the examples of one category."""
        assert self.target  # loaded once for all
        part = copy.copy(self)
        part.config = copy.deepcopy(self.config)
        with part.config.unlocked():
            part.config.categories = (category,)
        part.__dict__.pop("examples", None)
        part._outputs = {}
        return part

    def located(self, name: str) -> str:
        """A model's or drafter's name with the paths of files that are downloaded."""
        files = self.config.get("files", "") or self.results.path.parent
        return fetch.resolved(name, pathlib.Path(files))

    def keep(self, name: str, value: Any) -> None:
        """Note what the rows are made with; ValueError if those that are there had another one.

        Args:
          name: of a model or the data, which is read only when something is measured.
          value: its fingerprint.
        """
        if jax.process_count() > 1:
            processes.check_alike({name: value})
        runs.keep(self.results, {name: value})

    @functools.cached_property
    def not_held_out(self) -> str:
        """A sentence if the inputs differ from what was held out from the target, else ""."""
        return not_held_out(self.config, self.target)

    def texts(self, count: int) -> list[str]:
        """The first inputs."""
        return [example.input for example in self.examples[:count]]

    def draft(self, name: str) -> checkpoints.Checkpoint | Drafter:
        """A model, or a drafter that costs nothing; one is held at a time."""
        if name not in self._draft:
            self.keep(f"draft {name}", drafters.fingerprint(self.path(name)))
            command_line.say(f"loading the draft {name}")
            loaded = drafters.load(
                self.path(name),
                self.target,
                dtype=self.precision["dtype"],
                counts=lambda: self.counts,
            )
            self._draft = {name: loaded}
        return self._draft[name]

    def training_minutes(self, name: str) -> float | None:
        """As the run that made a draft says beside it; None where nothing does."""
        final = pathlib.Path(self.path(name)).parent / "final.json"
        return read_json(final).get("minutes") if final.is_file() else None

    def path(self, name: str) -> str:
        """The config's own name of a draft that a cell names by its title or by `relative`."""
        titles = dict(zip(self.config.get("names", ()), self.config.drafts, strict=False))
        named = {relative(draft): draft for draft in self.config.drafts} | titles
        return self.located(named.get(name, name))

    @functools.cached_property
    def counts(self) -> ngram.Counts:
        """Counts of the training split: those saved beside the target, or made now and kept."""
        beside = pathlib.Path(self.config.target).parent / "ngram.npz"
        own = self.results.path.with_name("ngram.npz")
        return counts_in(beside if beside.exists() else own, self.config, self.target)

    @functools.cached_property
    def shown(self) -> tuple[list[list[int]], int]:
        """The timed inputs, and which of them has the output of most distinct tokens.

        Outputs are those of the first temperature. The longest ones of a small model repeat
        themselves.
        """
        count = self.config.timed_inputs
        ids = tokenize(self.target, self.texts(count), self.config.max_source_len or None)
        distinct = [len({*tokens}) for tokens in self.outputs(self.config.temperatures[0], count)]
        return ids, distinct.index(max(distinct))

    def sampling(self, temperature: float) -> Sampling:
        """The distribution of every model."""
        return sampling.Sampling(
            temperature, self.config.top_k, self.config.top_p, self.config.filters
        )

    def decode(
        self,
        draft: str | None,
        temperature: float,
        count: int,
        *,
        gamma: int = 1,
        rule: AcceptanceRule | None = None,
    ) -> list[Row]:
        """Outputs for the first inputs, in batches; without a draft the target's own."""
        config = self.config
        method = building.build(
            self.target,
            None if draft is None else self.draft(draft),
            gamma=gamma,
            sampling=self.sampling(temperature),
            rule=rule,
        )
        limit = config.max_source_len or None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # decoding will say which texts it cuts
            # As many texts as α takes: fewer of them run the same program.
            most = self.texts(max(count, config.alpha_inputs))
            width = common_width(tokenize(self.target, most, limit))
        rows = streaming.stream(
            method,
            self.target,
            self.texts(count),
            max_new_tokens=config.max_new_tokens,
            key=jax.random.key(config.seed),
            batch_size=config.batch_size,
            max_source_len=limit,
            width=width,
            names=(config.target, draft or ""),
        )
        return list(rows)

    def outputs(self, temperature: float, count: int | None = None) -> list[list[int]]:
        """Tokens that the target generates: the prefixes over which α is measured.

        Args:
          count: of the first inputs; None: the config's `alpha_inputs`.
        """
        count = len(self.texts(count or self.config.alpha_inputs))
        if len(self._outputs.get(temperature, ())) < count:
            command_line.say(f"decoding {count} texts by the target, T = {temperature:g}")
            rows = self.decode(None, temperature, count)
            self._outputs[temperature] = [row.tokens for row in rows]
        return self._outputs[temperature][:count]

    def record(
        self,
        draft: str,
        temperature: float,
        outputs: Sequence[Sequence[int]],
        gamma_max: int,
        *,
        recorder: rollouts.Recorder | None = None,
    ) -> Rollouts:
        """Rollouts of a draft along outputs of the first inputs; see `rollouts.record`."""
        return rollouts.record(
            self.target,
            self.draft(draft),
            self.texts(len(outputs)),
            outputs,
            gamma_max=gamma_max,
            sampling=self.sampling(temperature),
            max_new_tokens=self.config.max_new_tokens,
            key=jax.random.key(self.config.seed),
            batch_size=self.config.batch_size,
            max_source_len=self.config.max_source_len or None,
            recorder=recorder,
        )

    def alpha(
        self,
        draft: str,
        temperature: float,
        outputs: Sequence[Sequence[int]],
        rule: AcceptanceRule | None = None,
    ) -> metrics.Alpha:
        """E[Σ min(target, draft)], or the chance that the rule accepts, over these outputs."""
        how: dict[str, Any] = {"sampling": self.sampling(temperature), "rule": rule}
        loop = building.build(self.target, self.draft(draft), gamma=1, **how)
        texts, longest = self.texts(len(outputs)), self.config.max_source_len or None
        return metrics.alpha_of(loop, self.target, texts, outputs, self.config.batch_size, longest)


def counts_in(path: pathlib.Path, config, target: checkpoints.Checkpoint) -> ngram.Counts:
    """Unigrams and bigrams of a file, or of the training split, which are then kept there.

    Args:
      config: whose training split is counted, as the target's tokenizer cuts it.
    """
    if path.exists():
        return ngram.load(path)
    print(f"Counting n-grams of the training split into {path}.")
    examples = load_examples(config, "train")
    whole = not target.config.is_encoder_decoder
    pairs = batches.encode(examples, target.tokenizer, decoder_only=whole, eos_ids=target.eos_ids)
    sequences = (pair.target.tolist() for pair in pairs)
    counts = ngram.count(sequences, target.model.vocab_size, target.start_id)
    ngram.save(path, counts)
    return counts


def open_results(workdir: pathlib.Path, config) -> Results:
    """Rows of an earlier run of the same config, or none.

    Raises:
      ValueError: rows of another config are there, or `check_counts` refuses this one.
    """
    check_counts(config)
    results = Results(workdir / "results.jsonl")
    settings = runs.settings(config)
    runs.keep_settings(results, settings, runs.fingerprint(settings), "rows of another config")
    return results


def check_counts(config, *more: str) -> None:
    """ValueError unless the counts and lengths of a config are whole numbers ≥ 1.

    Args:
      more: fields to check that only some experiments read, so that others may leave them at 0.
    """
    for name in (*COUNTS, *more):
        if name in config:
            whole(name, config[name], "[1, ∞)")
    for name in LISTS:
        for value in listed(name, config[name]) if name in config else ():
            whole(name, value, "[1, ∞)")


def check_chain(config, what: str) -> None:
    """ValueError if the config asks for a tree.

    Args:
      what: is for chains, and why.
    """
    if not isinstance(trees.parse(config.tree), trees.Chain):
        raise ValueError(
            f"{what}, and --config.tree={config.tree!r} is no chain: leave it out. "
            "specjax select compares trees, experiments.reproduce draws their rounds (Figure 1)."
        )


def find(rows: Sequence[Mapping[str, Any]], cell: Mapping[str, Any]) -> dict[str, Any] | None:
    """The row of a cell, if it is there."""
    return next(iter(rows_of(rows, cell)), None)


def rows_of(rows: Sequence[Mapping[str, Any]], cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that have these fields."""
    return [dict(row) for row in rows if cell.items() <= row.items()]


def grouped(rows: Sequence[dict[str, Any]], *names: str) -> list[list[dict[str, Any]]]:
    """Rows with the same values of some fields, in their order."""
    every = dict.fromkeys(tuple(row[name] for name in names) for row in rows)
    return [[r for r in rows if tuple(r[name] for name in names) == one] for one in every]


def keys(config, drafts: Sequence[str]) -> list[dict[str, Any]]:
    """A cell for each temperature and draft."""
    return [
        {"draft": relative(draft), "temperature": temperature}
        for temperature in config.temperatures
        for draft in drafts
    ]


def relative(name: str) -> str:
    """Directories below the checkout by their path in there; any other name as it is."""
    return str(name).replace(f"{command_line.ROOT}/", "")


def identity(on: Study) -> dict[str, Any]:
    """What was run; `Results` adds where."""
    config = on.config
    return {
        "target": relative(config.target),
        "task": config.task,
        "split": config.split,
        "seed": config.seed,
        "dtype": dtype_of(on.target),
        "run": runs.fingerprint(runs.settings(config)),
        **({"not_held_out": on.not_held_out} if on.not_held_out else {}),
    }
