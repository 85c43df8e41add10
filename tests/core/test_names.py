"""What a name with settings stands for: a value, or a ValueError; nothing else."""

import inspect
import sys
import types

import pytest

import eagles
from experiments.train import divergences
from specjax import policies, rules, trees
from specjax.drafters import choices, loading, ngram
from specjax.policies import Costs, constant
from specjax.policies.loading import NAMES as POLICIES
from specjax.policies.loading import needs_costs
from specjax.rules import Token
from specjax.sampling import NAMES as FILTERS
from specjax.sampling import Filter, Sampling
from specjax.support import named
from specjax.trees import shapes

COUNTS = ngram.count([[3, 4, 1]], 7, 0)
GIVEN = "target", "vocab_size", "counts", "load", "dtype", "replicate"  # by `loading.load`
VALUES = [
    *("-1", "0", "3", "0.5", "1e-50", str(10**12), str(10**400), "-1e999", "1e999-1e999", "1j"),
    *("'x'", "''", "None", "True", "{}", "{3}", "b'x'"),
    *("()", "(3,)", "(0, 1)", "(-1.0,)", "('x',)", "(None, None)", "((0,), (1,))", "[[]]"),
]


def load_policy(text):
    needed = {"costs": Costs(0.1, [1.0, 1.1, 1.2])} if needs_costs(text) else {}
    return policies.parse(text, **needed)


LOADERS = {
    "policy": (load_policy, POLICIES),
    "rule": (rules.parse, rules.NAMES),
    "tree": (shapes.parse, shapes.NAMES),
    "choice": (choices.parse, choices.NAMES),
    "filter": (lambda text: Sampling(1.0, filters=[text]), FILTERS),
    "divergence": (divergences.parse, divergences.NAMES),
    "drafter": (
        lambda text: loading.load(text, eagles.target_of("gpt", 7), counts=lambda: COUNTS),
        loading.NAMES,
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_any_value_of_any_setting(kind, monkeypatch):
    """Each is taken or refused by name; what is refused is a ValueError that says something."""
    target = eagles.target_of("gpt", 7)
    monkeypatch.setattr(eagles, "target_of", lambda *_: target)

    def load_model(name, **options):
        raise ValueError(f"{name!r} is the name of no model")

    monkeypatch.setattr(loading.checkpoints, "load", load_model)
    load, names = LOADERS[kind]
    made, refused, said = [], [], []
    for name in names:
        for setting in inspect.signature(named.find(kind, names, name)).parameters:
            for value in VALUES if setting not in GIVEN else ():
                text = f"{name}({setting}={value})"
                try:
                    made.append(load(text))
                except ValueError as error:
                    refused.append(text)
                    said.append(str(error))
    assert made
    assert len(refused) > len(made)
    assert min(map(len, said)) > 20


@pytest.fixture
def mine(monkeypatch):
    """A module of that name, with what a user may write by mistake."""
    module = types.ModuleType("mine")
    module.number = 3
    module.nothing = lambda: None
    module.kind = lambda: Token
    module.rule = Token
    module.policy = lambda: constant(2)
    module.text = lambda: "constant"
    module.leave = lambda: sys.exit(0)
    monkeypatch.setitem(sys.modules, "mine", module)


IMPORTED = ("mine:number", "mine:nothing", "mine:kind", "mine:text", "mine:", ":rule", ".mine:rule",
            "mine.rule:", "os:system('true')", "os:name", "builtins:int")  # fmt: skip
UNREADABLE = ("svip({[]: 1})", "svip(**{'a': 1})", "svip(" + "-" * 5_000 + "1)", "(", ")", "",
              "mine:policy()()")  # fmt: skip


@pytest.mark.parametrize("kind", ["policy", "rule", "choice", "tree", "drafter", "filter"])
@pytest.mark.parametrize("text", [*IMPORTED, *UNREADABLE])
def test_what_is_no_such_part(mine, kind, text):
    if kind == "drafter" and text in UNREADABLE:
        pytest.skip("the name of a model")
    with pytest.raises(ValueError, match=r"\w{3}"):
        LOADERS[kind][0](text)


def test_the_message_names_what_was_made(mine):
    for text, said in {
        "os:system('true')": r"Policy .os:system\('true'\). gives 0, which is no policy: it has no",
        "mine:rule": r"gives Token\(\), which is no policy: it has no function 'init'",
        "mine:number": r"Policy 'mine:number': 3 is no function",
        "mine:leave": r"Policy 'mine:leave': its code leaves the process by SystemExit\(0\)",
        "mine.py:policy": "'mine.py' to import; it is written .* without .py, mine:policy",
        "a/mine.py:policy": "without .py, a.mine:policy",
    }.items():
        with pytest.raises(ValueError, match=said):
            policies.parse(text)
    with pytest.raises(ValueError, match="is no rule: it is a class and no value"):
        rules.parse("mine:kind")
    assert rules.parse("mine:rule") == Token()
    assert policies.parse("mine:policy").gamma == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fixed((3, 2))", r"branches=\(3, 2\) must be a whole number ≥ 1"),
        ("fixed(branches=[3, 2])", r"it is fixed\(\*branches: int"),
        ("fixed(paths=(0,))", r"paths\[0\]=0 must be a list .*: write \(0,\) for one number"),
        ("fixed(1000, 1000, 1000)", "is too large: a tree may have at most 1,024"),
        ("fixed(2147483647)", "is too large: a tree may have at most 1,024 nodes"),
        (f"fixed(paths={tuple((i,) for i in range(1025))})", "paths has 1,025 entries: a tree may"),
        ("best_first(width=2000, depth=4, nodes=8)", r"width=2000 must be .* in \[1, 1024\]"),
        ("best_first(width=100, depth=4, nodes=8)", "give 30,100 candidates, .* draft 16,384"),
    ],
)
def test_trees_of_any_size(text, said):
    with pytest.raises(ValueError, match=said):
        shapes.parse(text)


def test_the_largest_trees():
    assert shapes.parse("fixed(1024)").nodes == 1024
    assert shapes.parse("best_first(width=64, depth=4, nodes=1024)").candidates == 12_352


def test_a_name_and_a_value_are_the_same():
    """What a flag names in a string is a function or class of the same module."""
    for text, value in {
        "token": rules.Token(),
        "block": rules.Block(),
        "gumbel": rules.Gumbel(),
        "lenient(0.3)": rules.Lenient(0.3),
        "typical(epsilon=0.2)": rules.Typical(epsilon=0.2),
    }.items():
        assert rules.parse(text) == value
        assert repr(rules.parse(text)) == repr(value)
    for text, value in {
        "chain": trees.chain(),
        "fixed(3, 2, 1)": trees.fixed(3, 2, 1),
        "fixed(paths=((0,), (1,)), draw='top')": trees.fixed(paths=((0,), (1,)), draw="top"),
        "best_first(4, 4, 16)": trees.best_first(width=4, depth=4, nodes=16),
    }.items():
        assert trees.parse(text) == value
        assert trees.parse(trees.text_of(value)) == value
    for room in (rules, trees, policies):
        kinds = trees.shapes.NAMES if room is trees else room.NAMES
        assert all(getattr(room, path.rpartition(":")[2]) for path in kinds.values())


def test_functions_of_python_itself_are_not_required():
    """Such as `__annotate_func__`, which Python 3.14 puts into classes with annotations."""

    class Protocol:
        def __annotate_func__(self): ...
        def begin(self): ...

    class Part:
        def begin(self): ...

    named.check("part", "mine:part", Part(), Protocol)
    with pytest.raises(ValueError, match="no function 'begin'"):
        named.check("part", "mine:part", object(), Protocol)
    with pytest.raises(ValueError, match="no function '__call__'"):
        named.check("filter", "mine:part", Part(), Filter)
