"""Every rule, policy and drafter of the package keeps what `specjax.testing` checks. Planted faults
are named."""

import functools

import jax
import jax.numpy as jnp
import pytest

from eagles import eagle_of
from experiments.train import medusa
from specjax import drafters, rules
from specjax.checkpoints.own import wrap
from specjax.decoding import building
from specjax.drafters import loading, ngram
from specjax.drafters.base import Drafter, ModelDrafter
from specjax.drafters.views import kangaroo, shallow
from specjax.policies import Policy
from specjax.pytrees import pytree
from specjax.rules import Token, at_position
from specjax.sampling import Sampling
from specjax.testing import check_drafter, check_policy, check_rule
from table_models import inputs_of, random_table
from tiny_models import random_model, slow
from toy_policies import (
    ConfidenceStop,
    EntropyStop,
    Erratic,
    Gossip,
    OneOf,
    TailReader,
    library,
)

# --- The package's own --------------------------------------------------------------------------

RULE_SETTINGS = {"lenient": {"lenience": 0.3}}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.sweep if n == "gumbel" else ()) for n in rules.NAMES]
)
def test_rules(name, double):
    check_rule(rules.parse(name, **RULE_SETTINGS.get(name, {})))


POLICIES = {
    **library(2, 3),
    "erratic": Erratic(),
    "entropy stop": EntropyStop(),
    "confidence stop": ConfidenceStop(),
    "tail reader": TailReader(),
}
OF_ROWS = [name for name, policy in POLICIES.items() if not policy.reads_batch]


@pytest.mark.sweep
@pytest.mark.parametrize("name", OF_ROWS)
def test_policies(name, double):
    """As one of several, so that their programs are compiled once."""
    several = tuple(POLICIES[name] for name in OF_ROWS)
    check_policy(OneOf(several, jnp.int32(OF_ROWS.index(name))))


@pytest.mark.sweep
@pytest.mark.parametrize("policy", [POLICIES["together"], slow(Gossip())])
def test_policies_that_read_their_batch(policy):
    check_policy(policy)


COUNTS = ngram.count([[0, 1, 1, 2], [0, 0, 1, 2], [0, 2]], 3, 1)  # no two ids are followed alike
DRAFTERS = {  # the family of the target, "" for a table; the draft, by name or made
    "unigram": ("", "unigram"),
    "bigram": ("", "bigram"),
    "lookup": ("", "lookup(max_ngram=2)"),
    "switch": ("", "switch(drafts=('lookup', 'bigram'))"),
    "model": ("", lambda target: ModelDrafter(random_table(2))),
    "early_exit": ("llama", "early_exit(layers=1)"),
    "frequent": ("t5", "frequent(draft='early_exit(layers=1)', share=0.5)"),
    "first_ids": ("t5", "first_ids(draft='early_exit(layers=1)', share=0.5)"),
    "kangaroo": ("gpt2", lambda target: kangaroo(target, 1)),
    "shallow": ("t5", lambda target: shallow(target, 1)),
    "eagle 1": ("t5", lambda target: eagle_of(target, 1)),
    "eagle 3": ("gpt2", lambda target: eagle_of(target, 3)),
    "medusa": ("t5", lambda target: medusa.init(target.model, 2)),
    "hydra": ("gpt2", lambda target: medusa.init(target.model, 2, hydra=True)),
}
# Of drafters of one class `make test` runs one: views, parts of a vocabulary, EAGLE, Medusa.
ALIKE = ("early_exit", "shallow", "first_ids", "eagle 1", "medusa")


def drafted(name):
    """The target as the drafter sees it, the drafter, and an input."""
    kind, draft = DRAFTERS[name]
    target = random_model(kind, 3, layers=2, seed=2) if kind else wrap(random_table(1))
    draft = (
        loading.load(draft, target, counts=lambda: COUNTS)
        if isinstance(draft, str)
        else draft(target)
    )
    method = building.build(target, draft, gamma=2, sampling=Sampling(1.0))
    sourced = kind in ("t5", "")
    inputs = inputs_of([[0]], [[1, 0, 1]]) if sourced else inputs_of([[1, 0]])
    return method.target, method.drafter, inputs


@pytest.mark.sweep
@pytest.mark.parametrize("name", [slow(name) if name in ALIKE else name for name in DRAFTERS])
def test_drafters(name):
    target, drafter, inputs = drafted(name)
    # A switch chooses a drafter for the whole round.
    guesses = True if name == "switch" else None
    check_drafter(drafter, target=target, inputs=inputs, guesses=guesses)


CHOSEN = Sampling(0.0), Sampling(0.7), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.8)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", CHOSEN, ids=["greedy", "warm", "top-k", "top-p"])
@pytest.mark.parametrize("rule", [Token(), rules.Block()], ids=["token", "block"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_by_rule_and_sampling(name, rule, sampling):
    """Tables are enumerated in float64, but for a switch, whose scores are float32."""
    guesses, double = (True, False) if name == "switch" else (None, not DRAFTERS[name][0])
    with jax.enable_x64(double):
        target, drafter, inputs = drafted(name)
        if double:
            wide = lambda x: x.astype(float) if x.dtype == jnp.float32 else x  # noqa: E731
            drafter = jax.tree.map(wide, drafter)
        how = {"target": target, "inputs": inputs, "guesses": guesses}
        check_drafter(drafter, rule=rule, sampling=sampling, **how)


def test_all_names():
    """`int8` makes a model of a directory, which `tests/core/test_int8.py` enumerates."""
    assert set(drafters.NAMES) - {"int8"} <= set(DRAFTERS)


# --- Planted faults -----------------------------------------------------------------------------


@pytree
class ResamplesFromTarget(Token):
    """After a rejection draws from p and not from norm(max(0, p − q))."""

    def next_probs(self, target_logprobs, draft_logprobs, drafts, draft_len, accepted):
        return jnp.exp(at_position(target_logprobs, accepted))

    exact = True


@pytree
class KeepsTheSecond(Token):
    """Right for drafts of one token; keeps the second wherever the first is kept."""

    exact = True

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        stop = Token.stop(self, target_logprobs, draft_logprobs, drafts, draft_len)
        if drafts.shape[1] < 2:
            return stop
        second = jnp.where(draft_len > 1, stop[:, 1], 0.0)
        return stop.at[:, 1].add(-second).at[:, 2].add(second)


@pytree
class ReadsTheTail(Token):
    """Forgets `draft_len`."""

    exact = True

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        whole = jnp.full_like(draft_len, drafts.shape[1])
        return Token.stop(self, target_logprobs, draft_logprobs, drafts, whole)


@pytree
class NotNormalized(Token):
    exact = True

    def next_probs(self, *known):
        return 0.9 * Token.next_probs(self, *known)


@pytree
class Undeclared(Token):
    def stop(self, *known):
        return Token.stop(self, *known)


@pytree
class Boasts(Token):
    def acceptance(self, target_logprobs, draft_logprobs):
        return jnp.ones(target_logprobs.shape[:-1], target_logprobs.dtype)


@pytree
class KeepsAll(rules.Gumbel):
    """Keeps drafted tokens that plain decoding would not draw."""

    exact = True

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        slots = jnp.arange(drafts.shape[1] + 1, dtype=jnp.int32)[None, :]
        return (slots == draft_len[:, None]).astype(target_logprobs.dtype)


@pytree
class Sharpens(rules.Gumbel):
    """Draws from p², in both loops."""

    exact = True

    def given_noise(self, logprobs, keys, position):
        return rules.Gumbel.given_noise(self, 2 * logprobs, keys, position)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (ResamplesFromTarget(), r"declares `exact`, and is biased: TV \d\.\d"),
        (KeepsTheSecond(), r"declares `exact`, and is biased: TV \d\.\d"),
        slow((ReadsTheTail(), r"stop accepts \d tokens of a draft of \d with probability")),
        slow((NotNormalized(), r"next_probs: the chances of the next token .* 1.*sum 0\.9")),
        (Undeclared(), "must declare whether it is `exact`"),
        slow((Boasts(), r"acceptance is 1 where `stop` accepts a .* token with probability 0")),
        slow((KeepsAll(), r"\d+ of 64 outputs are not those of plain decoding")),
        slow((Sharpens(), r"given_noise: the mean over 16,384 keys is .* errors apart")),
    ],
    ids=lambda x: "" if isinstance(x, str) else type(x).__name__,
)
def test_a_faulty_rule(rule, message):
    with pytest.raises(AssertionError, match=f"{type(rule).__name__}.*{message}"):
        check_rule(rule)


@pytree
class Bare(rules.AcceptanceRule):
    """Accepts nothing: four lines beyond the protocol."""

    exact = True
    reveals_shorter = True

    def acceptance(self, target_logprobs, draft_logprobs):
        return jnp.zeros(target_logprobs.shape[:-1], target_logprobs.dtype)

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        none = jnp.zeros(target_logprobs.shape[:2], target_logprobs.dtype)
        return none.at[:, 0].set(1.0)

    def next_probs(self, target_logprobs, draft_logprobs, drafts, draft_len, accepted):
        return jnp.exp(target_logprobs[:, 0])


def test_a_rule_of_the_protocol_alone():
    check_rule(Bare())


@pytest.mark.parametrize(
    ("check", "given"), [(check_rule, Token), (check_policy, "svip"), (check_drafter, ngram.Bigram)]
)
def test_what_is_no_value(check, given):
    with pytest.raises(ValueError, match=r"is a class: give what it makes|must be a "):
        check(given)


class Undecorated(Policy):
    def begin(self, state, live, gamma_max):
        return state, 1


def test_a_class_that_is_no_pytree(pair):
    with pytest.raises(ValueError, match=r"policy: Undecorated is no pytree.*@specjax\.pytrees"):
        check_policy(Undecorated())
    with pytest.raises(ValueError, match="policy: Undecorated is no pytree"):
        building.build(pair.target, pair.draft, sampling=Sampling(0.0), policy=Undecorated())


@pytree
class Counts(Policy):
    """By a number that it counts; what is faulty inherits from it."""

    def init(self, keys, gamma_max):
        return jnp.zeros(keys.shape, jnp.int32)

    def begin(self, state, live, gamma_max):
        return state, (state + 1) % (gamma_max + 1)


@pytree
class ReadsUndrafted(Counts):
    def update(self, state, round_):
        return state + 1 + (round_.ratio[:, -1] > 0.7).astype(jnp.int32)


@pytree
class ReadsNeighbours(Counts):
    def update(self, state, round_):
        return state + jnp.sum(round_.accepted, dtype=jnp.int32)


@pytree
class ReadsTheBest(Counts):
    """The longest of a large batch is nearly always γ_max."""

    def update(self, state, round_):
        return jnp.broadcast_to(jnp.max(round_.accepted), state.shape)


@pytree
class ReadsTheFirst(Counts):
    def update(self, state, round_):
        return jnp.broadcast_to(round_.accepted[0], state.shape)


@pytree
class Negative(Counts):
    def begin(self, state, live, gamma_max):
        return state, state - 1


@pytree
class Halves(Counts):
    def begin(self, state, live, gamma_max):
        return state, 0.5 * state.astype(jnp.float32)


@pytree
class OneForAll(Counts):
    def init(self, keys, gamma_max):
        return jnp.int32(0)


@pytree
class Widens(Counts):
    def update(self, state, round_):
        return state.astype(jnp.float32)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (ReadsUndrafted(), "drafts . tokens in round .* behind the end of a draft"),
        (ReadsNeighbours(), "drafts . tokens in round .* depends on other rows of the batch"),
        slow((ReadsTheBest(), "drafts . tokens in round .* depends on other rows of the batch")),
        slow((ReadsTheFirst(), "drafts . tokens in round .* depends on other rows of the batch")),
        (Negative(), "begin allows -1 tokens"),
        (Halves(), r"begin returned .*, float32\[5\]\) where .* integers\[5\] or .* due"),
        (OneForAll(), r"init returned int32\[\] where a state whose arrays have 5 rows"),
        (Widens(), r"update returned float32\[5\] where the given state int32\[5\] is due"),
    ],
    ids=lambda x: "" if isinstance(x, str) else type(x).__name__,
)
def test_a_faulty_policy(policy, message):
    with pytest.raises(AssertionError, match=f"{type(policy).__name__}.*{message}"):
        check_policy(policy)


@pytest.mark.sweep
def test_a_pair_that_depends_on_each_other(monkeypatch):
    """A loop that lets rows peek: the outputs of two rows are no longer independent."""
    import test_slots
    from specjax.testing import common as checks

    faulty = functools.partial(checks.joint_distribution, step=test_slots.peeking_step)
    monkeypatch.setattr(checks, "joint_distribution", faulty)
    with pytest.raises(AssertionError, match=r"Gossip, two rows together: P.* the target's is"):
        check_policy(Gossip())


@pytree
class LastToken(Drafter):
    """Bigrams; what is faulty inherits from it."""

    table: jax.Array  # (V, V) logits
    vocab_size = 3

    def start(self, inputs, buffer_len):
        return (), jnp.zeros(inputs.prompt_len.shape, jnp.int32)

    def begin(self, tokens, length, context, state, *, lags=True):
        last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]
        return self.table[last], state

    def extend(self, token, position, context, state):
        return self.table[token], state

    def logits(self, hidden):
        return hidden


@pytree
class Peeks(LastToken):
    """Reads the token behind the known ones, which an earlier round drafted and lost."""

    def begin(self, tokens, length, context, state, *, lags=True):
        return LastToken.begin(self, tokens, length + 1, context, state)


@pytree
class Remembers(LastToken):
    """Counts what it drafted, and also what was rejected."""

    def begin(self, tokens, length, context, state, *, lags=True):
        hidden, _ = LastToken.begin(self, tokens, length, context, state)
        return hidden + jnp.where(state > 3, 1.0, 0.0)[:, None] * jnp.float32([[1, 0, 0]]), state

    def extend(self, token, position, context, state):
        return self.table[token], state + 1


@pytree
class Mixes(LastToken):
    def logits(self, hidden):
        return hidden + jnp.mean(hidden, axis=0, keepdims=True)


@pytree
class Disagrees(LastToken):
    def extend(self, token, position, context, state):
        return 2 * self.table[token], state


@pytree
class Undefined(LastToken):
    def extend(self, token, position, context, state):
        return jnp.where(token[:, None] == 1, jnp.nan, self.table[token]), state


@pytree
class Grows(LastToken):
    def extend(self, token, position, context, state):
        return self.table[token], (state, token)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Peeks, "P.* by begin .* by begin .* depend on more than the known tokens"),
        (
            Remembers,
            r"once .* drafted .*, of which \d were accepted.* depend on more than",
        ),
        slow((Mixes, "depend on (other rows of the batch|more than the known tokens)")),
        slow((Disagrees, "by begin .* by extend")),
        (Undefined, r"extend: logits are NaN or \+inf"),
        (Grows, r"extend returned .*int32\[4\], int32\[4\].* where .* state int32\[4\]\) is due"),
    ],
)
def test_a_faulty_drafter(kind, message):
    drafter = kind(random_table(5, 3, rows=3, forbidden=0).table)
    with pytest.raises(AssertionError, match=f"{kind.__name__}.*{message}"):
        check_drafter(drafter)


def test_a_drafter_without_faults():
    check_drafter(LastToken(random_table(5, 3, rows=3, forbidden=0).table))
