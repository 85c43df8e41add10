"""What a training run measures on data that it never trains on."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.reproduce import scores
from experiments.tasks import trees
from experiments.tasks.examples import Example
from experiments.train import batches, loop
from experiments.train.batches import Batch, Pair
from experiments.train.config import TrainConfig
from experiments.train.loop import Progress
from experiments.train.steps import Trainer, held_out_loss
from specjax import checkpoints
from specjax.checkpoints import tokenizers
from specjax.generation import generate
from specjax.models import sharding
from specjax.models.language_model import LanguageModel
from specjax.models.sharding import Placement
from specjax.results import Result
from specjax.support import command_line, files


def pairs_of(
    config: TrainConfig,
    split: str,
    examples: Sequence[Example],
    tokenizer: Any,
    eos_ids: Sequence[int] = (),
) -> list[Pair]:
    """The ids of a split. Prints how many pairs no bucket holds."""
    whole = config.decoder_only
    pairs = batches.encode(examples, tokenizer, decoder_only=whole, eos_ids=eos_ids)
    if config.truncate:
        _, mark = tokenizers.marks(tokenizer)
        pairs = batches.truncated(pairs, max(length for length, _ in config.buckets), mark)
    loop.say_left_out(split, pairs, config.buckets)
    return pairs


def shuffled(pairs: Sequence[Pair]) -> list[Pair]:
    """Every target with its neighbour's source: what a model loses by it is what it reads there."""
    sources = [pair.source for pair in pairs]
    return [Pair(s, p.target) for s, p in zip(sources[1:] + sources[:1], pairs, strict=True)]


def as_checkpoint(
    config: Any,
    graphdef,
    params,
    tokenizer,
    *,
    name: str,
    max_source_len: int,
    metadata=None,
    placement: Placement | None = None,
    vocab_size: int | None = None,
    eos_ids: Sequence[int] = (),
) -> checkpoints.Checkpoint:
    """A trained model as the rest of specjax has it.

    Args:
      vocab_size: of ids that are tokens.
      eos_ids: of the model that training began with; none: the tokenizer's.
    """
    module = nnx.merge(graphdef, jax.tree.map(jnp.copy, params))
    model = LanguageModel.of(module, vocab_size, placement=placement)
    return checkpoints.Checkpoint(
        name=name,
        model=model,
        config=config,
        tokenizer=tokenizer,
        eos_ids=tuple(eos_ids) or (tokenizers.end_id(tokenizer),),
        max_source_len=max_source_len,
        metadata=metadata or {},
    )


def score(task: str, outputs: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
    """Shares of outputs that are exact, distinct and, of `parse`, well-formed trees.

    `distinct_targets` is the share of distinct references: what `distinct` can be at best.
    """
    count = len(examples)
    found = {
        "exact": sum(o == e.target for o, e in zip(outputs, examples, strict=True)) / count,
        "distinct": len(set(outputs)) / count,
        "distinct_targets": len({e.target for e in examples}) / count,
    }
    if task == "parse":
        found["well_formed"] = sum(map(trees.is_well_formed, outputs)) / count
    return found


def oddity(outputs: Sequence[Sequence[int]], eos_ids: Sequence[int]) -> str:
    """What is odd in greedy outputs that should have been learned; "": nothing."""
    outputs = [ids for ids in outputs if ids]
    same = [len({*ids} - {*eos_ids}) <= (len(ids) > 2) for ids in outputs]
    if outputs and all(same):
        what = "each is empty, or one token over and over"
    elif outputs and not any(ids[-1] in eos_ids for ids in outputs):
        what = "none has an end"
    else:
        return ""
    return (
        f"of {len(outputs)} greedy outputs {what}. If that stays so, compare samples.jsonl with "
        "the targets, eos_token_id with the tokenizer's EOS, and the buckets with the lengths."
    )


@dataclasses.dataclass
class Evaluation:
    """Measures a run's model during training (`__call__`) and at its end (`final`)."""

    config: TrainConfig
    shape: Any  # the model's own config
    trainer: Trainer
    tokenizer: Any
    data: Mapping[str, Sequence[Example]]
    directory: pathlib.Path
    vocab_size: int
    eos_ids: Sequence[int]
    provenance: Mapping[str, Any]
    samples: files.Rows | None = None  # opened at the first evaluation

    def __post_init__(self):
        self.validation = self._batches("validation", self.config.eval_examples)

    def __call__(self, progress: Progress, step: int) -> dict[str, Any]:
        """Losses and scores on the validation split; writes a few outputs to `samples`."""
        found: dict[str, Any] = self._losses(progress.params, self.validation)
        examples = self.data["validation"][: self.config.sample_examples]
        if not examples:
            return found
        made = self._outputs(progress.params, examples)
        if self.samples is None:
            self.samples = loop.open_log(self.directory / "samples.jsonl", keep_to=step - 1)
        for example, output in list(zip(examples, made.texts, strict=True))[:4]:
            row = {"step": step, "input": example.input, "output": output}
            self.samples.append(row | {"target": example.target})
        if odd := oddity(made.tokens, self.eos_ids or (self.tokenizer.eos_token_id,)):
            command_line.say(f"warning: step {step}: {odd}")
            found["warning"] = odd
        return found | self._scores(made.texts, examples)

    def final(self, params) -> dict[str, Any]:
        """Export the model, measure it on the test split, and return what final.json holds."""
        metadata = {"training_data": json.dumps(self.provenance, sort_keys=True)}
        made = self.checkpoint(params, metadata)
        whole = dataclasses.replace(made.model, params=sharding.fetch(made.model.params))
        if not jax.process_index():
            made = dataclasses.replace(made, model=whole)
            checkpoints.save(self.directory / "model", made, dtype=self.config.save_dtype)
        test = self._batches("test")
        chosen = self.data["test"][: 4 * self.config.sample_examples]
        read = sum(int((batch.target_len > 0).sum()) for batch in test["held_out_loss"])
        final = {
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
            "steps": self.config.steps,
            "schedules": self.provenance["schedules"],
            "test_examples": {"losses": read, "outputs": len(chosen)},
            **self._losses(params, test),
            **self._scores(self._outputs(params, chosen).texts, chosen),
        }
        files.write_json(self.directory / "final.json", final)
        return final

    def checkpoint(self, params, metadata=None) -> checkpoints.Checkpoint:
        """The model with these parameters."""
        layout = self.trainer.layout
        return as_checkpoint(
            self.shape,
            self.trainer.graphdef,
            params,
            self.tokenizer,
            name=str(self.directory),
            max_source_len=self.config.max_source_len,
            metadata=metadata,
            placement=None if layout is None else layout.placement,
            vocab_size=self.vocab_size,
            eos_ids=self.eos_ids,
        )

    def _batches(self, split: str, count: int | None = None) -> dict[str, list[Batch]]:
        """Batches of a split's first pairs, by the loss that is measured on them."""
        some = self.data[split][:count]
        pairs = pairs_of(self.config, split, some, self.tokenizer, self.eos_ids)
        cut = functools.partial(
            batches.in_order, buckets=self.config.buckets, target_tokens=self.config.target_tokens
        )
        if self.config.decoder_only:
            return {"held_out_loss": cut(pairs)}
        return {"held_out_loss": cut(pairs), "shuffled_loss": cut(shuffled(pairs))}

    def _losses(self, params, held_out: Mapping[str, Sequence[Batch]]) -> dict[str, float]:
        return {name: held_out_loss(self.trainer, params, on) for name, on in held_out.items()}

    def _outputs(self, params, examples: Sequence[Example]) -> Result:
        """The most likely output of each input."""
        inputs, longest = [example.input for example in examples], self.config.buckets[-1][1]
        model = self.checkpoint(params)
        return generate(model, None, inputs, max_new_tokens=longest, batch_size=32)

    def _scores(self, outputs: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
        """The shares of `score`, and the figures of the config's metric."""
        found = score(self.config.task, outputs, examples)
        if self.config.metric:
            references = [example.target for example in examples]
            by = scores.score(self.config.metric, outputs, references)
            found |= {figure.name: figure.value for figure in by}
        return found
