"""Is a family fit to ship? Measures it on held-out inputs, and writes its model card.

    python -m experiments.card --config=configs/embedded.py       --workdir=families/parse
    python -m experiments.card --config=configs/embedded.py:prose --workdir=families/prose

A target that has not learned to use its input collapses to a handful of outputs, and then every α
looks splendid. So a family must pass: the target's loss is below each draft's; at least three
quarters of its greedy outputs are distinct; each draft's α is above that of a bigram counted on the
training pairs; of an encoder-decoder, shuffled inputs cost the target at least half a nat a token;
and of `parse`, most trees are well-formed. The counts lie in ngram.npz beside the models, and are
made if they are not there.

The card of `parse` also says what becomes of a line of each kind that a person may type, and lists
the kinds of statements of the split with their shares and accuracies.

Writes README.md and card.json to the workdir; exit status 1 if a check fails.
"""

import json
import pathlib
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import optax
from tqdm import tqdm

from experiments import command
from experiments.reproduce.study import counts_in
from experiments.tasks import python_source, trees
from experiments.tasks.config import load_examples, not_held_out
from experiments.tasks.examples import Example
from experiments.train import batches, evaluation, steps
from specjax import checkpoints
from specjax.decoding import building
from specjax.drafters import ngram
from specjax.drafters.base import Drafter
from specjax.generation import generate
from specjax.measure import metrics, provenance
from specjax.sampling import Sampling
from specjax.support import command_line, files

INPUTS = 512
BUCKETS = ((16, 24), (24, 40), (32, 64), (48, 104))
TEXT_BUCKETS = ((0, 160), (0, 320), (0, 480))  # of a decoder-only model
TOKENS = 1024
# What a person types first: a line of each kind that `parse` has learned, and one with its body.
FIRST = (
    "x = 1", "total += price", "count: int = 0", "print('hello')", "return x + y", "pass", "break",
    "continue", "import numpy as np", "from os import path", "del x", "raise ValueError('no')",
    "assert x > 0", "global x", "nonlocal x", "for i in range(10):", "while True:", "if x > 0:",
    "with open(path) as file:", "def f(x, y=1):", "class Foo(Bar):", "try:", "if x: return y",
    "async for line in lines:", "async with lock:", "async def main():",
)  # fmt: skip
# What inputs have to look like.
INPUTS_ARE = {
    "parse": "Inputs are statements of one line, or headers of compound statements, without a "
    f"prefix, of at most {python_source.MAX_STATEMENT} bytes. Other lines (`else:`, `elif x:`, "
    "`match x:`, a comment) were never among what the models learned.",
    "prose": "Inputs are the first words of a text, without a prefix.",
}
WHAT = {
    "parse": "T5 v1.1 models that turn one Python statement into its syntax tree",
    "prose": "GPT-2 models that continue docstrings and comments",
}


def main(config, workdir: pathlib.Path) -> None:
    check(workdir)
    card = measure(config)
    files.write_json(workdir / "card.json", card)
    files.write_text(workdir / "README.md", readme(config, card))
    for name, passed in card["checks"].items():
        print(f"{'pass' if passed else 'FAIL'}  {name}")
    print(f"The card is {workdir / 'README.md'}.")
    sys.exit(0 if all(card["checks"].values()) else 1)


def check(workdir: pathlib.Path) -> None:
    """Raise ValueError if a file that would be replaced is no family's card."""
    card = workdir / "card.json"
    mine = card.is_file() and {"checks", "alpha", "losses"} <= files.read_json(card).keys()
    there = [name for name in ("README.md", "card.json") if (workdir / name).exists()]
    if there and not mine:
        raise ValueError(
            f"--workdir={workdir} holds a {there[0]} that is no family's card. Name another "
            "directory."
        )


def measure(config) -> dict[str, Any]:
    """Losses, outputs and α of the family on the config's split, each input once."""
    loaded = load_examples(config)
    examples = list({example.input: example for example in reversed(loaded)}.values())[::-1]
    command_line.say_loading(config.target, *config.drafts)
    target = checkpoints.load(config.target, dtype="float32")
    drafts: dict[str, checkpoints.Checkpoint | Drafter] = {
        pathlib.PurePath(path).name: checkpoints.load(path, dtype="float32")
        for path in config.drafts
    }
    counts = counts_in(pathlib.Path(config.target).parent / "ngram.npz", config, target)
    drafters = drafts | {"bigram": ngram.bigram(counts), "unigram": ngram.unigram(counts)}
    texts = [example.input for example in examples[:INPUTS]]
    alphas: dict[str, dict[str, float]] = {name: {} for name in drafters}
    with tqdm(total=2 * (len(drafters) + 1) + 2, unit="stage", disable=None) as bar:
        for temperature in (0.0, 1.0):
            result = generate(
                target,
                None,
                texts,
                temperature=temperature,
                key=0,
                max_new_tokens=config.max_new_tokens,
                batch_size=32,
            )
            if temperature == 0:
                scores = evaluation.score(config.task, result.texts, examples[:INPUTS])
                kinds = by_kind(loaded, examples[:INPUTS], result.texts)
            bar.update()
            for name, drafter in drafters.items():
                alphas[name][f"T={temperature:g}"] = metrics.alpha_of(
                    building.build(target, drafter, gamma=1, sampling=Sampling(temperature)),
                    target, texts, result.tokens, 32,
                ).value  # fmt: skip
                bar.update()
        models = {"target": target} | {
            name: draft
            for name, draft in drafts.items()
            if isinstance(draft, checkpoints.Checkpoint)
        }
        losses = {name: loss(model, loaded) for name, model in models.items()}
        bar.update()
        encodes = target.config.is_encoder_decoder
        mixed = loss(target, loaded, shuffle=True) if encodes else None
        bar.update()
    small = min(alphas[name][t] - alphas["bigram"][t] for name in drafts for t in alphas[name])
    checks = {
        "the target's loss is below each draft's": all(
            losses["target"] < value for name, value in losses.items() if name != "target"
        ),
        "at least 3/4 of its greedy outputs are distinct": scores["distinct"] >= 0.75,
        "each draft's α is above the bigram's": small > 0,
    }
    if mixed is not None:
        name = "shuffled inputs cost the target at least 0.5 nats a token"
        checks[name] = mixed - losses["target"] >= 0.5
    if "well_formed" in scores:
        checks["most of its trees are well-formed"] = scores["well_formed"] > 0.5
    return {
        "checks": checks,
        "losses": losses,
        "shuffled_loss": mixed,
        "greedy": {"inputs": len(texts), **scores},
        **({"kinds": kinds, "first": first(target, config)} if config.task == "parse" else {}),
        "alpha": alphas,
        "parameters": {name: size(model) for name, model in models.items()},
        "shapes": {name: shape(model) for name, model in models.items()},
        "split": config.split,
        "not_held_out": not_held_out(config, target),
        "examples": len(loaded),
        "training_data": json.loads(target.metadata.get("training_data", "{}")),
        "environment": provenance.environment(),
    }


def by_kind(
    loaded: Sequence[Example], asked: Sequence[Example], outputs: Sequence[str]
) -> dict[str, dict[str, float]]:
    """The share of each kind of tree in the loaded pairs, most frequent first, with how many of
    the inputs asked for are of it and how many of those came out exact.
    """
    kinds = [trees.kind(example.target) for example in asked]
    exact = [o == example.target for o, example in zip(outputs, asked, strict=True)]
    return {
        kind: {
            "share": count / len(loaded),
            "inputs": kinds.count(kind),
            "exact": sum(right for k, right in zip(kinds, exact, strict=True) if k == kind),
        }
        for kind, count in Counter(trees.kind(e.target) for e in loaded).most_common()
    }


def first(target: checkpoints.Checkpoint, config) -> list[dict[str, str]]:
    """What the target makes of the lines of `FIRST`, beside the tree of each."""
    outputs = generate(target, None, FIRST, max_new_tokens=config.max_new_tokens).texts
    return [
        {"input": line, "output": output, "tree": trees.write(trees.parse(line))}
        for line, output in zip(FIRST, outputs, strict=True)
    ]


def loss(model: checkpoints.Checkpoint, examples, *, shuffle: bool = False) -> float:
    """Nats per held-out target token."""
    whole = not model.config.is_encoder_decoder
    pairs = batches.encode(examples, model.tokenizer, decoder_only=whole, eos_ids=model.eos_ids)
    if shuffle:
        pairs = evaluation.shuffled(pairs)
    buckets = TEXT_BUCKETS if whole else BUCKETS
    cut = batches.in_order(pairs, buckets=buckets, target_tokens=TOKENS)
    return steps.held_out_loss(
        steps.Trainer(model.model.graphdef, optax.identity()), model.model.params, cut
    )


def size(model: checkpoints.Checkpoint) -> int:
    """Number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(model.model.params))


def shape(model: checkpoints.Checkpoint) -> str:
    """In words."""
    c = model.config
    if not c.is_encoder_decoder:
        return f"{c.n_layer} layers, n_embd {c.n_embd}, n_inner {c.n_inner}, {c.n_head} heads"
    return (
        f"{c.num_layers}+{c.num_decoder_layers} layers, d_model {c.d_model}, d_ff {c.d_ff}, "
        f"{c.num_heads} heads of {c.d_kv}"
    )


def readme(config, card: dict[str, Any]) -> str:
    """The model card in Markdown."""
    greedy, environment = card["greedy"], card["environment"]
    data = card["training_data"]
    rows = [
        f"| {name} | {card['shapes'][name]} | {card['parameters'][name] / 1e6:.2f}M "
        f"| {card['losses'][name]:.3f} | {alpha(card, name, 'T=0')} | {alpha(card, name, 'T=1')} |"
        for name in card["losses"]
    ]
    rows += [
        f"| {name} | counts | – | – | {alpha(card, name, 'T=0')} | {alpha(card, name, 'T=1')} |"
        for name in ("bigram", "unigram")
    ]
    outputs = f"{greedy['distinct']:.0%} distinct"
    if "well_formed" in greedy:
        outputs = f"{greedy['exact']:.0%} exact, {greedy['well_formed']:.0%} well-formed, {outputs}"
    shuffled = card["shuffled_loss"]
    return "\n".join(
        [
            f"# The embedded family: `{config.task}`",
            "",
            f"{WHAT[config.task]},",
            "in half precision and Hugging Face's layout. Trained for speculative decoding to be",
            "tried on any machine; of no other use. Written by `python -m experiments.card`.",
            "",
            *textwrap.wrap(INPUTS_ARE[config.task], 100),
            "",
            "| model | shape | parameters | held-out loss | α, T=0 | α, T=1 |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"Loss: nats per token on the {card['split']} split{origin(card)} "
            "α: mean of Σ min(target, draft) over prefixes that the",
            f"target generated from {greedy['inputs']} inputs of it.",
            "",
            f"Greedy outputs of the target: {outputs}.",
            *([f"With shuffled inputs its loss is {shuffled:.3f}."] if shuffled else []),
            "",
            *(kinds_in_words(card) if "kinds" in card else []),
            "## Fit to ship",
            "",
            *(f"- [{'x' if ok else ' '}] {name}" for name, ok in card["checks"].items()),
            "",
            "## How it was made",
            "",
            "Recipe: `configs/train.py`, and what was learned: `experiments/train/README.md`. "
            "Training data: "
            f"{data.get('pairs', {}).get('train', '?')} pairs from the source of Python "
            f"{data.get('python', '?')} and installed packages; hashes and versions in card.json.",
            "",
            f"Measured with Python {environment['python']}, jax {environment['jax']} on "
            f"{environment['device']}, float32.",
            "",
        ]
    )


def origin(card: dict[str, Any]) -> str:
    """The end of the sentence that names the split of a card."""
    if note := card["not_held_out"]:
        return f". {note}"
    return ", modules of the standard library\nthat were never trained on."


def kinds_in_words(card: dict[str, Any]) -> list[str]:
    """The kinds of statements in Markdown: what to type, and how often the target is right."""
    rows = [
        f"| `{line['input']}` | {trees.kind(line['tree'])} "
        f"| {'yes' if line['output'] == line['tree'] else 'no: `' + line['output'] + '`'} |"
        for line in card["first"]
    ]
    found = [
        f"| {kind} | {row['share']:.1%} | {row['exact']} of {row['inputs']} |"
        for kind, row in card["kinds"].items()
    ]
    return [
        "## What to type",
        "",
        "A line of each kind that the models have learned. A header comes out with an empty body.",
        "",
        "| line | kind | its tree comes out |",
        "|---|---|---|",
        *rows,
        "",
        f"The kinds of the {card['split']} split, and how many greedy outputs are exact. Lines",
        "that many modules have, such as `pass` and `try:`, are in training alone.",
        "",
        "| kind | share | exact |",
        "|---|---|---|",
        *found,
        "",
    ]


def alpha(card: dict[str, Any], name: str, temperature: str) -> str:
    """A cell; the target is its own perfect draft."""
    value = card["alpha"].get(name, {}).get(temperature)
    return "–" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    command.run(main, __doc__, "The family.")
