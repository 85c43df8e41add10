"""Training the head that predicts which drafted tokens will be accepted.

`policies/acceptance_head.py` uses it.

Target and draft are frozen. The head learns from rounds of the speculative loop on the training
split: what is emitted there are the target's outputs, and each round is a rollout of the drafter
from one of their prefixes. A drafted token counts as much as it is likely to be reached, that is,
by the chance that all those before it in its round are accepted. One behind an EOS does not count:
it is never in an output.

`run(config, directory)` writes head.npz, metrics.jsonl and final.json. It takes a minute or two,
and starts over if it was cut off.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Float
from tqdm import tqdm

from experiments import tasks
from specjax import checkpoints, speculative
from specjax.decoding import building, starting
from specjax.decoding.outputs import check_finite
from specjax.decoding.texts import common_width, tokenize
from specjax.measure.along import reread
from specjax.policies import acceptance_head as head
from specjax.policies.acceptance_head import HeadParams
from specjax.sampling import Sampling
from specjax.speculative import Contexts, Speculative
from specjax.state import State
from specjax.support import command_line, files
from specjax.support.ranges import listed, number, whole

COUNTS = (  # fields that are whole numbers
    *("inputs", "held_out_inputs", "gamma", "max_new_tokens", "batch_size"),
    *("layers", "steps", "tokens"),
)


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """What to train; `configs/train.py:head` has that of the embedded family."""

    target: str
    draft: str  # whose hidden states the head reads
    task: str = "parse"
    task_file: str = ""  # of the jsonl task: "train.jsonl,validation.jsonl,test.jsonl"
    inputs: int = 1000  # of the training split, each decoded once at each temperature
    held_out_inputs: int = 200  # of the validation split
    temperatures: tuple[float, ...] = (0.0, 1.0)
    gamma: int = 10
    max_new_tokens: int = 96
    batch_size: int = 32  # of decoding
    layers: int = 1  # residual blocks before the logit
    steps: int = 3000
    tokens: int = 1024  # drafted tokens in a step
    learning_rate: float = 1e-3
    reject_weight: float = 6.0
    seed: int = 0

    def __post_init__(self):
        for name in COUNTS:
            whole(name, getattr(self, name), "[1, ∞)")
        number("learning_rate", self.learning_rate, "(0, ∞)")
        number("reject_weight", self.reject_weight, "(0, ∞)")
        for temperature in listed("temperatures", self.temperatures):
            number("temperatures", temperature, "[0, ∞)")


class Seen(NamedTuple):
    """Drafted tokens, and what the head is to say of them; float32."""

    hidden: Float[Array, "*batch E"]  # the drafter's state after it read the token
    ratio: Float[Array, "*batch"]  # min(1, target/draft), the chance that it is accepted
    reached: Float[Array, "*batch"]  # that all before it are; 0 where nothing was drafted


@jax.jit
def observe(method: Speculative, contexts: Contexts, state: State) -> tuple[State, Seen]:
    """One round, and its drafted tokens (B, γ); `reached` is 0 behind a drafted EOS."""
    after, round_ = speculative.step(method, contexts, state)
    hidden = reread(method, contexts, state, round_.drafts.tokens)
    ends = jnp.isin(round_.drafts.tokens, method.eos_ids).astype(jnp.int32)
    behind = jnp.cumsum(ends, axis=1) > ends
    submitted = round_.submitted & round_.active[:, None] & ~behind
    ratio = jnp.where(submitted, round_.ratio, 1.0)
    before = jnp.cumprod(jnp.pad(ratio, ((0, 0), (1, 0)), constant_values=1.0)[:, :-1], axis=1)
    return after, Seen(hidden, ratio, jnp.where(submitted, before, 0.0))


def collect(
    config: HeadConfig,
    target: checkpoints.Checkpoint,
    draft: checkpoints.Checkpoint,
    texts: Sequence[str],
) -> Seen:
    """All drafted tokens that may be reached, (N,), from decoding every text."""
    sources = [ids for ids in tokenize(target, texts) if ids]
    found: list[Seen] = []
    for temperature in config.temperatures:
        distribution = Sampling(temperature)
        method = building.build(target, draft, gamma=config.gamma, sampling=distribution)
        for at in tqdm(
            range(0, len(sources), config.batch_size), desc=f"T={temperature:g}", disable=None
        ):
            chunk = sources[at : at + config.batch_size]
            contexts, state = starting.prepare(
                method,
                target,
                chunk,
                [(at + i, 0) for i in range(len(chunk))],
                max_new_tokens=config.max_new_tokens,
                key=jax.random.key(config.seed),
                rows=min(config.batch_size, len(sources)),
                width=common_width(sources),
            )
            while not np.all(state.done):
                state, seen = observe(method, contexts, state)
                rows = np.asarray(seen.reached) > 0
                found.append(jax.tree.map(lambda x, rows=rows: np.asarray(x)[rows], seen))
            check_finite(state, (config.target, config.draft))
    return jax.tree.map(lambda *parts: np.concatenate(parts), *found)


def fit(config: HeadConfig, seen: Seen) -> tuple[HeadParams, list[float]]:
    """Parameters, and the loss of each step."""
    keys = jax.random.split(jax.random.key(config.seed))
    params = head.init(keys[0], seen.hidden.shape[1], config.layers)
    optimizer = optax.adam(optax.cosine_decay_schedule(config.learning_rate, config.steps))

    @jax.jit
    def step(carry, seen, key):
        params, opt_state = carry
        chosen = jax.random.randint(key, (config.tokens,), 0, len(seen.ratio))
        hidden, ratio, reached = (x[chosen] for x in seen)
        arguments = params, hidden, ratio, reached, config.reject_weight
        loss, gradient = jax.value_and_grad(head.loss)(*arguments)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    carry, on_device = (params, optimizer.init(params)), jax.tree.map(jnp.asarray, seen)
    losses = []
    for key in jax.random.split(keys[1], config.steps):
        carry, loss = step(carry, on_device, key)
        losses.append(loss)
    return carry[0], np.asarray(jax.device_get(losses)).tolist()


def judge(config: HeadConfig, params: HeadParams, seen: Seen) -> dict[str, float]:
    """Loss on tokens that were not learned from, beside that of the best constant; and how often
    the head ranks a token that is rejected below one that is accepted (½ is chance)."""
    weight, ratio = (np.asarray(x, np.float64) for x in (seen.reached, seen.ratio))
    kept, lost = weight * ratio, weight * (1 - ratio)
    hidden, *labels = map(jnp.asarray, seen)
    odds = np.asarray(head.logit(params, hidden))
    constant = kept.sum() / (kept.sum() + config.reject_weight * lost.sum())
    flat = kept * np.log(constant) + config.reject_weight * lost * np.log1p(-constant)
    order = np.argsort(odds, kind="stable")
    below = np.cumsum(lost[order]) - lost[order] / 2
    return {
        "tokens": len(ratio),
        "accepted": float(kept.sum() / weight.sum()),
        "loss": float(head.loss(params, hidden, labels[0], labels[1], config.reject_weight)),
        "loss_of_a_constant": float(-flat.sum() / weight.sum()),
        "ranked": float((kept[order] * below).sum() / (kept.sum() * lost.sum())),
    }


def run(
    config: HeadConfig, directory: str | os.PathLike, checked: Callable[[], Any] = bool
) -> dict[str, Any]:
    """Train a head, write it, and return what final.json holds.

    Args:
      checked: is called before anything is written, when the head is trained.

    Raises:
      ValueError: a field of the config, the data or a model is at fault; or another process trains
        in the directory.
    """
    directory = pathlib.Path(directory)
    with files.only_writer(directory / "head.npz"):
        return _run(config, directory, checked)


def _run(config: HeadConfig, directory: pathlib.Path, checked: Callable[[], Any]) -> dict[str, Any]:
    command_line.say_loading(config.target, config.draft)
    target, draft = (checkpoints.load(m, dtype="float32") for m in (config.target, config.draft))
    places = [part for part in config.task_file.split(",") if part]
    data = {
        split: tasks.load(config.task, split, places)[:count]
        for split, count in (("train", config.inputs), ("validation", config.held_out_inputs))
    }
    tasks.warn_of_overlap(config.task, data)
    learned, held_out = (
        collect(config, target, draft, [example.input for example in examples])
        for examples in data.values()
    )
    params, losses = fit(config, learned)
    checked()
    head.save(directory / "head.npz", params)
    means = np.array_split(losses, min(50, len(losses)))
    ends = np.cumsum([len(part) for part in means])
    log = files.Rows(directory / "metrics.jsonl")
    log.keep(lambda row: False)
    for end, part in zip(ends, means, strict=True):
        log.append({"step": int(end), "train_loss": float(part.mean())})
    final = {
        "parameters": sum(x.size for x in params),
        "steps": config.steps,
        "learned_from": len(learned.ratio),
        "held_out": judge(config, head.load(directory / "head.npz"), held_out),
    }
    files.write_json(directory / "final.json", final)
    return final
