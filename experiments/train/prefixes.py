"""Where the prefixes come from at which a draft learns its target's probabilities.

Whatever the source, a batch is one of `batches`, of pairs of the training data, whose targets
stay as they are ("data") or are what the target ("target") or the draft ("draft") writes for the
same input. With the draft's own outputs training is on-policy (Agarwal et al. 2023, 2306.13649).

What models write comes in pools. A pool holds the outputs for `inputs` inputs, each decoded once,
and serves `refresh_every` steps; the next has other inputs, and what the draft has become by then.
Every pool is kept in prefixes/: a run that was cut off finds there what the draft wrote when it was
another. All else follows from seed and step.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from tqdm import tqdm

from experiments.tasks.examples import Example
from experiments.train import batches
from experiments.train.batches import Batch, Order, Pair
from specjax.decoding import building, streaming
from specjax.decoding.texts import common_width, tokenize
from specjax.models.checkpoint import Checkpoint
from specjax.sampling import Sampling
from specjax.support import files, npz
from specjax.support.ranges import number

SOURCES = ("data", "target", "draft")
BATCH = 32  # rows decoded at once


def shares(text: str) -> dict[str, float]:
    """Sources with their shares of the steps: "draft", or "data=1, draft=3" for .25 and .75.

    Raises:
      ValueError: no such source, or shares that are not positive numbers.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, weight = (word.strip() for word in part.partition("="))
        if name not in SOURCES or name in found:
            raise ValueError(
                f"prefixes={text!r}: {name!r} must be one of {', '.join(SOURCES)}, each at most "
                'once; a mixture is written "data=1, draft=3".'
            )
        try:
            found[name] = number(name, float(weight) if equals else 1.0, "(0, ∞)")
        except ValueError:
            raise ValueError(
                f"prefixes={text!r}: the share of {name} must be a number above 0."
            ) from None
    total = sum(found.values())
    return {name: share / total for name, share in found.items()}


@dataclasses.dataclass(frozen=True)
class Prefixes:
    """The batches of a run.

    Args:
      examples: the training data, whose inputs are decoded.
      pairs: the training data.
      order: of the data's batches; its buckets, size and seed are those of pools too.
      target: whose outputs are asked for, or None where they are not.
      draft: gives the draft as it is at that moment.
      directory: of pools; made if need be.
      shares: of the steps after the first `after`, by source; those before are of the data.
      temperature: of what models write.
      inputs: of a pool.
      refresh_every: steps that a pool serves.
    """

    examples: Sequence[Example]
    pairs: Sequence[Pair]
    order: Order
    target: Checkpoint | None
    draft: Callable[[], Checkpoint]
    directory: pathlib.Path
    shares: Mapping[str, float]
    after: int
    temperature: float
    inputs: int
    refresh_every: int

    def from_step(self, step: int) -> Iterator[Batch]:
        """The batches of steps step, step + 1, …, counted from 0, without end.

        The draft is asked for with the first batch of a pool, and not before.

        Raises:
          FileNotFoundError: a pool of the draft, begun before `step`, is gone.
        """
        written = [source for source in SOURCES[1:] if source in self.shares]
        pools: dict[str, tuple[list[Pair], Order]] = {}
        period = -1
        for now, (bucket, chosen) in enumerate(self.order.from_step(step), step):
            source, pairs = self.source(now), self.pairs
            number_of_pool, place = divmod(now - self.after, self.refresh_every)
            if now >= self.after and number_of_pool != period:
                period = number_of_pool
                pools = {name: self._pool(name, period, place == 0) for name in written}
            if source != "data":
                pairs, order = pools[source]
                bucket, chosen = next(order.from_step(place))
            yield batches.collate([pairs[i] for i in chosen], self.order.buckets[bucket])

    def source(self, step: int) -> str:
        """Whose prefixes a step has."""
        if step < self.after:
            return "data"
        rng = np.random.default_rng((self.order.seed, step, 1))
        return str(rng.choice(list(self.shares), p=list(self.shares.values())))

    def _pool(self, source: str, period: int, begins: bool) -> tuple[list[Pair], Order]:
        path = self.directory / f"{source}-{period:04d}.npz"
        if not path.exists():
            if source == "draft" and not begins:
                raise FileNotFoundError(
                    f"{path} is gone: it held what the draft wrote in steps before the checkpoint, "
                    "which cannot be drawn again. Start again from an empty workdir."
                )
            self._write(path, source, period)
        kept = npz.read_npz(
            path, {"inputs": 1, "ids": 1, "ends": 1}, "outputs to learn from",
            "Delete it and start again.",
        )  # fmt: skip
        outputs = np.split(kept["ids"], kept["ends"][:-1])
        found = [
            Pair(self.pairs[i].source, output)
            for i, output in zip(kept["inputs"], outputs, strict=True)
        ]
        return found, dataclasses.replace(self.order, lengths=batches.lengths(found))

    def _write(self, path: pathlib.Path, source: str, period: int) -> None:
        """Decode the inputs of a pool, short ones first: rows of a batch end together then."""
        rng = np.random.default_rng((self.order.seed, period, 2))
        known = np.concatenate(self.order.members)
        some = rng.choice(known, min(self.inputs, len(known)), replace=False).tolist()
        chosen = sorted(some, key=lambda i: (len(self.pairs[i].source), i))
        seed = jax.random.fold_in(jax.random.key(self.order.seed), period)
        writer = self.draft() if source == "draft" else self.target
        assert writer is not None, "the config is checked: prefixes of a target need one"
        outputs = write(
            writer,
            [self.examples[i].input for i in chosen],
            room=self.order.buckets[-1][1],
            temperature=self.temperature,
            key=jax.random.fold_in(seed, SOURCES.index(source)),
        )
        kept = [(i, ids) for i, ids in zip(chosen, outputs, strict=True) if ids]
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as part, part.open("wb") as file:
            np.savez_compressed(
                file,
                inputs=np.array([i for i, _ in kept], np.int32),
                ids=np.concatenate([np.array(ids, np.int32) for _, ids in kept]),
                ends=np.cumsum([len(ids) for _, ids in kept]),
            )


def write(
    model: Checkpoint, texts: Sequence[str], *, room: int, temperature: float, key
) -> list[list[int]]:
    """What a model writes for each text, as training has it: a decoder-only model's ids begin with
    the text's own, without the start token. EOS is the last id unless there was no room for it.

    Args:
      room: ids at most.
    """
    prompts = tokenize(model, texts)
    whole = not model.config.is_encoder_decoder
    opened = [ids[ids[:1] == [model.start_id] :] if whole else [] for ids in prompts]
    rows = streaming.stream(
        building.plain(model, Sampling(temperature)),
        model,
        prompts,
        max_new_tokens=max(1, room - max(map(len, opened))),
        key=key,
        batch_size=BATCH,
        width=common_width(prompts),
        names=(model.name, ""),
    )
    bar = tqdm(rows, "writing prefixes", total=len(texts), unit="output", delay=2, leave=False)
    return [
        begun + row.tokens if row.tokens else [] for begun, row in zip(opened, bar, strict=True)
    ]
