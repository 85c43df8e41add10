"""`tune` measures and chooses; `generate` decodes what it is given, and reads no clock."""

import ast
import dataclasses
import inspect
import json
import textwrap
import time

import jax
import numpy as np
import pytest

import clocks
import specjax
from pairs import TEXTS
from specjax import doctor, generation, policies
from specjax.autoregressive import Autoregressive
from specjax.decoding import building, running, starting, streaming
from specjax.decoding.conditions import conditions
from specjax.policies import Costs
from specjax.rules import Block
from specjax.sampling import Greedy, Sampling
from specjax.settings import Drafting, Settings
from specjax.support import files
from specjax.tuning import fitting
from specjax.tuning.job import Job

RUN = {"max_new_tokens": 12, "batch_size": 2}


def loops(monkeypatch):
    """The loops that `generate` decodes with, as they are used."""
    used, as_they_end = [], streaming.as_they_end

    def watched(method, *args, **options):
        used.append(method)
        return as_they_end(method, *args, **options)

    monkeypatch.setattr(streaming, "as_they_end", watched)
    return used


def test_generate_reads_no_clock(pair, monkeypatch):
    """Neither `generate` nor what it imports for decoding."""

    def read():
        raise AssertionError("a clock was read")

    settings = Settings(3, "goodput", Costs(0.1, [1.0] * 4))
    specjax.generate(pair.target, pair.draft, TEXTS[:2], settings=settings, **RUN)  # JAX compiles
    for name in ("perf_counter", "monotonic", "time", "perf_counter_ns"):
        monkeypatch.setattr(time, name, read)
    specjax.generate(pair.target, pair.draft, TEXTS[:2], settings=settings, **RUN)


@pytest.mark.parametrize("name", ["goodput", "lookahead(prior=0.9)", "together"])
def test_costs_are_asked_for(pair, name):
    with pytest.raises(ValueError, match=r"weighs costs, and none are given.*specjax\.tune\("):
        specjax.generate(pair.target, pair.draft, TEXTS, policy=name, **RUN)


@pytest.mark.parametrize("decides", [-0.5, 0.0])
def test_the_fastest_is_measured_and_used(pair, monkeypatch, decides):
    """A policy whose rounds take less, or drafts of one length: decisions have to gain 2%. The
    policy has the costs of its own loop, and the tokens are those of the target."""
    clocks.of_rounds(monkeypatch, 0.1, 1.5, decides)
    options = {"gamma": 3, "policy": "goodput(prior=0.9)", "passes": [2, 4], "minutes": 0, **RUN}
    settings = specjax.tune(pair.target, pair.twin, TEXTS, **options)
    assert settings.gamma == 3
    assert settings.policy == ("goodput(prior=0.9)" if decides else None)
    if decides:
        times = np.asarray(settings.costs.round_times(3)) / float(settings.costs.token)
        np.testing.assert_allclose(times, 1.0 + 0.1 * np.arange(4), rtol=0.02)
        assert float(settings.costs.alpha) == 1
        assert "Use twin with gamma=3 at most, as goodput(prior=0.9) decides: " in settings.words
        assert " ms for the smallest round, " in settings.words
    else:
        assert "Use twin with gamma=3: outputs come 2." in settings.words
    used = loops(monkeypatch)
    found = specjax.generate(pair.target, pair.twin, TEXTS, settings=settings, **RUN)
    assert found.tokens == specjax.generate(pair.target, None, TEXTS, **RUN).tokens
    assert type(used[0].policy).__name__ == ("Goodput" if decides else "Constant")
    with pytest.warns(UserWarning, match="tuned for something else: batch_size was 2 and is 1\\. "):
        specjax.generate(pair.target, pair.twin, TEXTS[:1], settings=settings, max_new_tokens=12)


def test_the_batch_that_is_measured(pair, monkeypatch):
    asked = []

    def refuse(watch, policy, method, texts, **_):
        asked.append((policy, method.passes, watch.batch_size, len(texts)))
        raise InterruptedError

    monkeypatch.setattr(fitting, "costs_of", refuse)
    for texts, options in ((TEXTS, {}), (TEXTS[:1], {"gamma": 3, "passes": ()})):
        with pytest.raises(InterruptedError):
            specjax.tune(pair.target, pair.draft, texts, minutes=0, **RUN | options)
    assert asked == [("lookahead", (2, 4, 8, 16), 2, 4), ("lookahead", (), 1, 1)]


def test_no_draft_where_none_is_worth_its_time(pair, monkeypatch):
    clocks.of_rounds(monkeypatch, 0.5, 9.0)
    settings = specjax.tune(pair.target, pair.draft, TEXTS, gamma=3, passes=(), **RUN)
    assert (settings.gamma, settings.policy, settings.costs) == (0, None, None)
    assert "Use plain decoding: no draft here makes outputs come sooner" in str(settings)
    used = loops(monkeypatch)
    found = specjax.generate(pair.target, pair.draft, TEXTS, settings=settings, **RUN)
    assert found.tokens == specjax.generate(pair.target, None, TEXTS, **RUN).tokens
    assert type(used[0]) is Autoregressive


def test_the_best_of_several_drafts(pair, monkeypatch):
    """Each is tuned; a name that is none is reported, and alone it is an error."""
    clocks.of_rounds(monkeypatch, 0.1, 1.2)
    options = {"gamma": 2, "passes": (), "policy": "svip", **RUN}
    found = specjax.tune(pair.target, [pair.draft, "/nowhere", pair.twin], TEXTS, **options)
    assert found.draft is pair.twin
    assert found.settings.gamma == 2
    assert [one.name for one in found.candidates] == [pair.draft.name, "/nowhere", pair.twin.name]
    assert found.candidates[0].speedup < found.candidates[2].speedup
    assert found.candidates[2].tuned_for["batch_size"] == 2
    with pytest.raises(ValueError, match="No such directory: /nowhere"):
        specjax.tune(pair.target, "/nowhere", TEXTS, **options)


@pytest.mark.sweep
def test_what_is_measured_depends_on_no_draw_of_the_run(pair, monkeypatch):
    """A policy that knew its row's α before the first round would choose by tokens to come."""
    drawn, inner = [set(), set()], starting._row_keys

    def row_keys(*given):
        keys = inner(*given)
        if not isinstance(keys, jax.core.Tracer):  # shapes alone
            drawn[-1].update(tuple(key) for key in jax.random.key_data(keys).tolist())
        return keys

    monkeypatch.setattr(starting, "_row_keys", row_keys)
    options = {"sampling": Sampling(1.0), "key": 3, "max_new_tokens": 4}
    settings = specjax.tune(pair.target, pair.draft, TEXTS, gamma=2, policy="goodput", **options)
    drawn.append(set())
    specjax.generate(pair.target, pair.draft, TEXTS, settings=settings, **options)
    assert min(len(drawn[1]), len(drawn[2])) >= len(TEXTS)
    assert not drawn[1] & drawn[2]


def test_nothing_to_measure(pair):
    with pytest.raises(ValueError, match=r"0 input\(s\) are too few to choose by: give 1 or more"):
        specjax.tune(pair.target, pair.draft, [" "], **RUN)
    with pytest.raises(ValueError, match="draft=None"):
        specjax.tune(pair.target, None, TEXTS)
    method = building.build(pair.target, pair.draft, gamma=3, sampling=Greedy())
    costs = fitting.costs_for(Job(pair.target, [" "]), "goodput", method)  # before a run
    assert costs.round_times(3).tolist() == [1, 1, 1, 1]


@pytest.mark.sweep
def test_a_tree_is_tuned(pair, monkeypatch):
    clocks.of_rounds(monkeypatch, 0.01)
    tree = "fixed(2, 1)"
    settings = specjax.tune(pair.target, pair.twin, TEXTS, tree=tree, **RUN)
    assert (settings.gamma, settings.policy) == (2, "goodput")
    assert specjax.trees.parse(settings.tree) == specjax.trees.parse(tree)
    found = specjax.generate(pair.target, pair.twin, TEXTS, settings=settings, **RUN)
    assert found.tokens == specjax.generate(pair.target, None, TEXTS, **RUN).tokens


@pytest.mark.parametrize(
    "settings",
    [
        Settings(0, words="why"),
        Settings(3, "goodput", Costs(0.1, [1.0, 1.5], alpha=0.5), passes=(1, 2), rule="block"),
        Settings(2, "nodes", Costs(0.1, [1.0, 1.5]), tree="fixed(2, 1)"),
        Settings(np.int64(3), passes=[np.int32(2)], tuned_for={"batch_size": 8}),
    ],
)
def test_kept_in_a_file(settings, tmp_path):
    settings.save(tmp_path / "settings.json")
    assert "NaN" not in (tmp_path / "settings.json").read_text()  # which is no JSON
    again = Settings.load(tmp_path / "settings.json")
    assert again == settings != dataclasses.replace(settings, gamma=1)
    assert repr(again) == repr(settings)
    assert "\n" not in repr(again)
    assert again.words == settings.words
    if settings.costs is not None:
        jax.tree.map(np.testing.assert_array_equal, again.costs, settings.costs)


def test_widths_of_a_row_in_files_of_0_2(tmp_path):
    """They are positions of all rows now."""
    row = {"gamma": 3, "widths": [1, 2], "tuned_for": {"batch_size": 8}}
    (tmp_path / "settings.json").write_text(json.dumps(row))
    assert Settings.load(tmp_path / "settings.json").passes == (8, 16)


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"gamma": 1, "what": 2}'])
def test_a_file_of_something_else(text, tmp_path):
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(ValueError, match=r"settings\.json"):
        Settings.load(tmp_path / "settings.json")


COSTS = {"draft": 0.1, "verify": [1.0, 1.1]}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("gamma", [None, False, "", [], "3", 2.5, -1, 2**31]),
        ("passes", [5, "12", None, [0], ["2"], [1.5]]),
        ("policy", [5]),
        ("rule", [{}]),
        ("tree", [[1]]),
        ("words", [5]),
        ("tuned_for", [None, ["batch_size"]]),
        ("costs", [5, [], {}, "x", True, {"draft": 0.1}, COSTS | {"what": 1}]),
        ("verify", [COSTS | {"verify": bad} for bad in (5, {"a": 1}, [], [0.0], ["1"], [None])]),
        ("draft", [COSTS | {"draft": bad} for bad in ({}, None, "x", -0.1)]),
        ("rest", [COSTS | {"rest": bad} for bad in ("x", [1.0], [1.0] * 3, {})]),
        ("alpha", [COSTS | {"alpha": 1.5}]),
        ("error", [COSTS | {"error": "x"}]),
        ("call", [COSTS | {"call": "x"}]),
    ],
)
def test_what_a_file_of_settings_may_hold(field, values, tmp_path):
    """The message has the file and the field."""
    file = tmp_path / "settings.json"
    for value in values:
        of_costs = isinstance(value, dict) and "draft" in value
        row = {"gamma": 3} | {"costs" if of_costs else field: value}
        files.write_json(file, row)
        with pytest.raises(ValueError, match=rf"settings\.json holds no settings: .*{field}"):
            Settings.load(file)


def test_settings_of_another_use_are_named(pair):
    """Each condition that differs, once for all; a file without them says nothing."""
    run = {"max_new_tokens": 2, "batch_size": 2}
    method = building.build(pair.target, pair.draft, gamma=2, sampling=Greedy())
    same = conditions(method, pair.target, pair.draft, 2, 2)
    assert conditions(method, pair.target, pair.draft.name, 2, 2) == same
    for known in ({}, same):
        settings = Settings(2, tuned_for=known)
        specjax.generate(pair.target, pair.draft, TEXTS[:2], settings=settings, **run)
    other = {"batch_size": 8, "sampling": "temperature=0.7", "draft": "small with 3 numbers"}
    settings = Settings(2, tuned_for=same | other)
    said = (
        r"batch_size was 8 and is 2; draft was 'small with 3 numbers' and is 'draft with [\d,]+ "
        "numbers'; sampling was 'temperature=0.7' and is 'temperature=0'. They may be slow"
    )
    for function in (specjax.generate, specjax.stream):
        with pytest.warns(UserWarning, match=said) as seen:
            function(pair.target, pair.draft, TEXTS[:2], settings=settings, **run)
        assert len(seen) == 1


def test_whatever_settings_replace_is_refused_beside_them(pair):
    """All fields of `Drafting` but the costs, and `check_tokens`, which only refuses."""
    given = {
        "gamma": 2, "rule": "block", "policy": "svip", "passes": (1,),
        "tree": "fixed(2, 1)",
    }  # fmt: skip
    fields = {field.name for field in dataclasses.fields(Drafting)}
    assert set(given) == fields - {"costs", "check_tokens"}
    for function in (specjax.generate, specjax.stream):
        for name, value in given.items():
            with pytest.raises(ValueError, match=f"settings and {name} are both given"):
                function(pair.target, pair.draft, TEXTS, settings=Settings(2), **{name: value})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tree": "fixed(2, 1)", "gamma": 2}, "gamma=2 beside tree="),
        ({"sampling": Greedy(), "top_k": 3}, "beside temperature, top_k"),
        ({"temperature": 0.7}, "no key is given"),
        ({"settings": Drafting(7, tree="fixed(2, 1)")}, "gamma=7 beside tree="),
    ],
)
def test_said_twice(pair, options, said):
    for function in (specjax.generate, specjax.stream):
        with pytest.raises(ValueError, match=said):
            function(pair.target, pair.draft, TEXTS, **options)


def test_sampling_is_a_value(pair):
    """It says what temperature, top_k and top_p say."""
    options = {"key": 5, "max_new_tokens": 6}
    by_numbers = specjax.generate(
        pair.target, pair.draft, TEXTS, temperature=0.7, top_p=0.9, **options
    )
    how = Sampling(temperature=0.7, top_p=0.9)
    assert (
        by_numbers.tokens
        == specjax.generate(pair.target, pair.draft, TEXTS, sampling=how, **options).tokens
    )


@pytest.mark.sweep
def test_policies_are_typed_values(pair):
    made = {name for name in policies.NAMES if callable(getattr(policies, name))}
    assert made == set(policies.NAMES)
    settings = dataclasses.replace(Settings(3), policy="svip(threshold=0.3)")
    options = {"gamma": 3, "policy": policies.svip(threshold=0.3), **RUN}
    found = specjax.generate(pair.target, pair.draft, TEXTS, **options)
    by_name = specjax.generate(pair.target, pair.draft, TEXTS, settings=settings, **RUN)
    assert found.verified.tolist() == by_name.verified.tolist()


DRAW = "generate", "stream", "tune", "select", "measure_alpha", "measure_speedup", "doctor"


def called(pair, name, **how):
    """Call a public function on the pair."""
    if name == "doctor":
        return doctor.Plan(pair.target.name, pair.draft.name, **how)
    draft = [pair.draft] if name == "select" else pair.draft
    return getattr(specjax, name)(pair.target, draft, TEXTS, **how)


@pytest.mark.parametrize("name", DRAW)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"sampling": Sampling(0.7)}, "no key is given"),
        ({"sampling": 0.7}, "sampling=0.7 must be a specjax.Sampling"),
        ({"sampling": Sampling(0.7), "key": "seed"}, "key='seed' must be"),
    ],
)
def test_whatever_draws_asks_for_a_sampling_and_a_key(pair, name, how, message):
    with pytest.raises(ValueError, match=message):
        called(pair, name, **how)


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("tune", {"rule": Block()}, "rule=Block.* must be a name"),
        ("tune", {"policy": policies.svip()}, "policy=Svip.* must be a text"),
        ("tune", {"policy": "godput"}, "no policy 'godput'"),
        ("tune", {"passes": 0}, "passes=0 must be a list"),
        ("tune", {"gamma": None}, "gamma=None must be a whole number"),
        ("tune", {"samples": 2}, r"^tune\(\) got .* 'samples'"),  # nor has it num_samples
        ("select", {"job": 1}, r"^select\(\) got .* 'job'"),
        ("select", {"check_tokens": "no"}, "check_tokens='no' must be"),
        ("measure_speedup", {"settings": 1}, r"^measure_speedup\(\) got"),
        ("measure_speedup", {"batch_size": 0}, "batch_size=0 must be"),
    ],
)
def test_wrong_arguments_of_measuring(pair, name, how, said):
    """By the name of the function that the user called."""
    with pytest.raises((ValueError, TypeError), match=said):
        called(pair, name, **how)


WAY = (
    generation.generate,
    generation._decode,
    building.with_draft,
    streaming.as_they_end,
    streaming.groups,
    running.Running.__init__,
    running.Running.admit,
    starting.start,
    starting.arguments,
)


@pytest.mark.parametrize("function", WAY, ids=lambda one: one.__qualname__)
def test_arguments_go_by_name_from_generate_to_the_loop(function):
    """An editor finds each where it goes: nothing is packed into a dict, or unpacked."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    nodes = list(ast.walk(tree))
    assert not [one for one in nodes if isinstance(one, ast.keyword | ast.arg) and one.arg is None]
    assert not [
        one for one in nodes if isinstance(one, ast.arguments) and (one.kwarg or one.vararg)
    ]
    assert not {"locals", "inspect"} & {one.id for one in nodes if isinstance(one, ast.Name)}


def test_stream_takes_what_generate_takes(pair):
    """By the same names and types; each goes to one of the values that a run is made of."""
    found = list(inspect.signature(specjax.generate).parameters.items())[3:]
    known = generation.Shorthand.__annotations__
    assert {name: str(one.annotation) for name, one in found} == {
        k: str(t) for k, t in known.items()
    }
    with pytest.raises(TypeError, match="unexpected keyword argument 'gama'"):
        specjax.stream(pair.target, pair.draft, TEXTS, gama=3)
    for old in ("samples", "rounds", "carry"):
        with pytest.raises(ValueError, match=f"no argument {old}: give .*{old}"):
            specjax.generate(pair.target, pair.draft, TEXTS, **{old: 1})
