"""Is a family fit to ship? Measures it on held-out inputs, and writes its model card.

    python -m experiments.card --config=configs/embedded.py --workdir=families/parse

A target that has not learned to use its input collapses to a handful of outputs, and then every α
looks splendid. So a family must pass: the target's loss is below each draft's; shuffled inputs cost
the target at least half a nat a token; at least three quarters of its greedy outputs are distinct;
most trees are well-formed; and each draft's α is above that of a bigram counted on the training
pairs. The counts lie in ngram.npz beside the models, and are made if they are not there.

Writes README.md and card.json to the workdir; exit status 1 if a check fails.
"""

import json
import pathlib
import sys
from typing import Any

import jax
import optax
from absl import flags
from ml_collections import config_flags
from tqdm import tqdm

from experiments import common
from specjax import files, metrics, ngram, tasks, train
from specjax.decoding import generate
from specjax.draft import Drafter
from specjax.models import hub
from specjax.sampling import sampling
from specjax.tasks import batches

INPUTS = 512
BUCKETS = ((16, 24), (24, 40), (32, 64), (48, 104))
TOKENS = 1024


def main(_) -> None:
    config = flags.FLAGS.config
    workdir = common.make_workdir(flags.FLAGS.workdir)
    card = measure(config)
    files.write_json(workdir / "card.json", card)
    files.write_text(workdir / "README.md", readme(config, card))
    for name, passed in card["checks"].items():
        print(f"{'pass' if passed else 'FAIL'}  {name}")
    print(f"The card is {workdir / 'README.md'}.")
    sys.exit(0 if all(card["checks"].values()) else 1)


def measure(config) -> dict[str, Any]:
    """Losses, outputs and α of the family on the task's test split."""
    examples = tasks.load(config.task, "test")
    target = hub.load(config.target)
    drafts: dict[str, hub.Checkpoint | Drafter] = {
        pathlib.PurePath(path).name: hub.load(path) for path in config.drafts
    }
    counts = load_counts(config, target)
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
                max_new_tokens=config.max_new_tokens,
                batch_size=32,
            )
            if temperature == 0:
                scores = train.score(config.task, result.texts, examples[:INPUTS])
            bar.update()
            for name, drafter in drafters.items():
                alphas[name][f"T={temperature:g}"] = metrics.alpha_of_outputs(
                    target,
                    drafter,
                    texts,
                    result.tokens,
                    sampling=sampling(temperature),
                    batch_size=32,
                ).value
                bar.update()
        models = {"target": target} | {
            name: draft for name, draft in drafts.items() if isinstance(draft, hub.Checkpoint)
        }
        losses = {name: loss(model, examples) for name, model in models.items()}
        bar.update()
        mixed = loss(target, examples, shuffle=True)
        bar.update()
    small = min(alphas[name][t] - alphas["bigram"][t] for name in drafts for t in alphas[name])
    checks = {
        "the target's loss is below each draft's": all(
            losses["target"] < value for name, value in losses.items() if name != "target"
        ),
        "shuffled inputs cost the target at least 0.5 nats a token": mixed - losses["target"]
        >= 0.5,
        "at least 3/4 of its greedy outputs are distinct": scores["distinct"] >= 0.75,
        "most of its trees are well-formed": scores.get("well_formed", 1.0) > 0.5,
        "each draft's α is above the bigram's": small > 0,
    }
    return {
        "checks": checks,
        "losses": losses,
        "shuffled_loss": mixed,
        "greedy": {"inputs": len(texts), **scores},
        "alpha": alphas,
        "parameters": {name: size(model) for name, model in models.items()},
        "shapes": {name: shape(model) for name, model in models.items()},
        "test_examples": len(examples),
        "training_data": json.loads(target.metadata.get("training_data", "{}")),
        "environment": common.environment(),
    }


def load_counts(config, target: hub.Checkpoint) -> ngram.Counts:
    """Unigrams and bigrams of the training split's targets."""
    path = pathlib.Path(config.target).parent / "ngram.npz"
    if not path.exists():
        print(f"Counting n-grams of the training split into {path}.")
        pairs = batches.encode(tasks.load(config.task, "train"), target.tokenizer)
        sequences = (pair.target.tolist() for pair in pairs)
        ngram.save(path, ngram.count(sequences, target.model.vocab_size, target.start_id))
    return ngram.load(path)


def loss(model: hub.Checkpoint, examples, *, shuffle: bool = False) -> float:
    """Nats per held-out target token."""
    pairs = batches.encode(examples, model.tokenizer)
    if shuffle:
        pairs = train.shuffled(pairs)
    cut = batches.in_order(pairs, buckets=BUCKETS, target_tokens=TOKENS)
    return train.held_out_loss(
        train.Trainer(model.model.graphdef, optax.identity()), model.model.params, cut
    )


def size(model: hub.Checkpoint) -> int:
    """Number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(model.model.params))


def shape(model: hub.Checkpoint) -> str:
    """In words."""
    c = model.config
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
    return "\n".join(
        [
            f"# The embedded family: `{config.task}`",
            "",
            "T5 v1.1 models that turn one Python statement into its syntax tree, in half precision",
            "and Hugging Face's layout. Trained for speculative decoding to be tried on any",
            "machine; of no other use. Written by `python -m experiments.card`.",
            "",
            "| model | shape | parameters | held-out loss | α, T=0 | α, T=1 |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "Loss: nats per token on the test split, modules of the standard library that were",
            "never trained on. α: mean of Σ min(target, draft) over prefixes that the target",
            f"generated from {greedy['inputs']} test inputs.",
            "",
            f"Greedy outputs of the target: {greedy['exact']:.0%} exact, "
            f"{greedy.get('well_formed', float('nan')):.0%} well-formed trees, "
            f"{greedy['distinct']:.0%} distinct (of the references: "
            f"{greedy['distinct_targets']:.0%}).",
            f"With shuffled inputs its loss is {card['shuffled_loss']:.3f}.",
            "",
            "## Fit to ship",
            "",
            *(f"- [{'x' if ok else ' '}] {name}" for name, ok in card["checks"].items()),
            "",
            "## How it was made",
            "",
            "Recipe: `configs/train.py`, story: `docs/training.md`. Training data: "
            f"{data.get('pairs', {}).get('train', '?')} pairs from the source of Python "
            f"{data.get('python', '?')} and installed packages; hashes and versions in card.json.",
            "The task `summarize` is not part of this family: see docs/training.md.",
            "",
            f"Measured with Python {environment['python']}, jax {environment['jax']} on "
            f"{environment['device']}, float32.",
            "",
        ]
    )


def alpha(card: dict[str, Any], name: str, temperature: str) -> str:
    """A cell; the target is its own perfect draft."""
    value = card["alpha"].get(name, {}).get(temperature)
    return "–" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "The family.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Where README.md and card.json go.")
    flags.mark_flags_as_required(["config", "workdir"])
    common.run(main, __doc__)
