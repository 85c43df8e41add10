"""Models over a mesh: the same tokens, the collectives that there should be, and no more read or
held than a device's part.

A process of its own, `mesh_worker`, has eight virtual devices.
"""

import json

import jax
import numpy as np
import pytest

import mesh_worker
import workers
from specjax import checkpoints, drafters
from specjax.cli import defaults, pairs
from specjax.models import meshes, sharding

pytestmark = pytest.mark.sweep


def case(kind, mesh, temperature, **options):
    return "decode", kind, {"mesh": mesh, "temperature": temperature, **options}


# Each kind on one device, and on meshes that divide its heads and ids or do not.
DECODED = [
    case("t5", "data=2,model=4", 1.0),
    case("t5 odd", "model=8", 0.0),
    case("llama", "data=2,model=4", 0.0, narrow=True),
]  # fmt: skip
LATER = [
    case("gpt2", "data=2,model=2", 0.0),
    case("llama", "model=4", 1.0, replicate=False),
    case("llama", "model=2", 0.0, draft=None),
    case("gemma2", "data=2,model=4", 0.0),
]
CASES = [*DECODED, *(pytest.param(one, marks=pytest.mark.slow) for one in LATER)]
ATTACHED = [
    case(kind, mesh, temperature, draft=draft)
    for kind, draft in (
        ("gpt2", "kangaroo"),
        ("t5", "eagle"),
        ("t5", "shallow"),
        ("t5", "early_exit(layers=1)"),
        ("llama", "early_exit(layers=1)"),
    )
    for temperature in (0.0, 1.0)
    for mesh in ("model=4",)
]
ADMITTED = [case("t5", "data=2,model=4", 1.0)]


def alone(one):
    """The same on one device."""
    check, kind, options = one
    return check, kind, {**options, "mesh": None, "replicate": True}


def by_turns(one):
    """The same, in fewer rows than there are inputs."""
    return "admitted", *one[1:]


def ask(directory, cases):
    """What the worker says of each case, by the case."""
    cases = list({json.dumps(one): one for one in cases}.values())
    lines = workers.ask(mesh_worker, cases, str(directory))
    return {json.dumps(one): line for one, line in zip(cases, lines, strict=True)}


READING = [
    ("reading", kind, {"mesh": mesh, "device": device})
    for kind, mesh, device in (("llama", "model=4", 3), ("t5 odd", "data=4,model=2", 1))
]
NARROW = ("reading", "llama", {"mesh": "model=4", "device": 3, "weights": "int8"})
ROUNDED = [("rounded", "llama", {"mesh": "model=4"}), ("rounded", "t5 odd", {"mesh": "model=2"})]
SAVED = [("saved", "llama", {"mesh": "model=4"}), ("saved", "t5 odd", {"mesh": "model=2"})]
REFUSED = [
    ("refused", "gpt2", {"target": None, "draft": "model=2"}),
    ("refused", "gpt2", {"target": "model=4", "draft": "model=2"}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    mesh_worker.write(directory)
    return directory


@pytest.fixture(scope="module")
def found(models):
    cases = [*DECODED, *map(alone, DECODED), *READING, NARROW, *ROUNDED, *SAVED, *REFUSED]
    cases += map(by_turns, ADMITTED)
    answers, later = ask(models, cases), []

    def answer(one):
        if json.dumps(one) not in answers and not later:
            later.append(ask(models, [*LATER, *map(alone, LATER), by_turns(LATER[0])]))
        return {**answers, **dict(*later)}[json.dumps(one)]

    return answer


def name(one):
    return "-".join(map(str, (one[1], *one[2].values())))


@pytest.mark.parametrize("one", CASES, ids=name)
def test_a_mesh_decodes_the_tokens_of_one_device(one, found):
    there, here = found(one), found(alone(one))
    assert there["tokens"] == here["tokens"]
    assert len({tuple(row) for row in here["tokens"]}) > 1
    assert one[2].get("draft", "") is None or here["accepted"] > 0
    assert not here["collectives"]


@pytest.mark.parametrize(
    "one", [*ADMITTED, pytest.param(LATER[0], marks=pytest.mark.slow)], ids=name
)
def test_rows_are_admitted_on_a_mesh(one, found):
    assert_same(found(by_turns(one)), found(alone(one)))


def assert_same(admitted, whole):
    """The same tokens for each source."""
    assert [admitted[str(index)] for index in range(len(admitted))] == whole["tokens"]


def per_call(kind, ways):
    """All-reduces and gathers of a call of the target with two layers: its embedding, each output
    projection that is split, the logits."""
    config = mesh_worker.KINDS[kind]
    heads = {"t5": 8, "t5 odd": 3, "gpt2": 4, "llama": 8, "qwen3": 4, "gemma2": 8}[kind]
    attention = 0 if heads % ways else 2 if kind.startswith("t5") else 1
    return {"all-reduce": 1 + 2 * (attention + 1), "all-gather": 1} if ways > 1 else {}, config


@pytest.mark.parametrize("one", CASES, ids=name)
def test_a_round_has_the_collectives_that_it_should_have(one, found):
    """Numbers apart, which say whether a row is left, and which the data axis alone needs."""
    _, kind, options = one
    answer = found(one)
    ways = meshes.sizes_of(options["mesh"]).get("model", 1)
    rows = meshes.sizes_of(options["mesh"]).get("data", 1)
    expected, _ = per_call(kind, ways)
    if not options.get("replicate", True):  # the draft's calls, two in the program
        expected = {name: 3 * count for name, count in expected.items()}
    if options.get("narrow") and ways > 1:  # the scales of the embedding
        expected["all-reduce"] += 1
    counted = dict(answer["collectives"])
    if options.get("narrow") and rows > 1:  # a CPU looks at numbers of the first row
        assert counted.pop("all-reduce") > expected.pop("all-reduce")
    assert (counted.pop("scalars", 0) > 0) == (rows > 1)
    assert counted == expected
    assert answer["kept"]


def test_caches_lie_by_rows_and_by_heads(found):
    assert found(DECODED[0])["caches"] == ["P('data', 'model')"]
    assert found(DECODED[1])["caches"] == ["P()"]  # three heads


@pytest.mark.parametrize("one", READING, ids=name)
def test_a_process_reads_and_holds_its_part(one, found):
    """What is repeated or padded is held and not read twice. Norms are read by all."""
    answer = found(one)
    assert answer["held"] == answer["shard"]
    assert answer["read"] <= answer["held"]
    ways = meshes.sizes_of(one[2]["mesh"])["model"]
    assert answer["whole"] / ways < answer["held"] < 1.6 * answer["whole"] / ways


def test_in_int8_whole_rows_are_read_once_and_of_rows_that_are_split_all_too(found):
    """The largest of a row lies anywhere in it."""
    answer, floats = found(NARROW), found(READING[0])
    assert answer["held"] == answer["shard"] < 0.5 * floats["held"]
    assert floats["read"] < answer["read"] < 2 * floats["read"] < floats["whole"]


@pytest.mark.parametrize("one", ROUNDED, ids=name)
def test_numbers_in_int8_are_those_of_one_device(one, found):
    assert found(one) == {"same": True, "fingerprint": True}


@pytest.mark.parametrize("one", SAVED, ids=name)
def test_a_model_on_a_mesh_is_saved_as_it_was(one, found):
    assert found(one) == {"same": True, "fingerprint": True}


def test_target_and_draft_share_a_mesh(found):
    words = (
        "The draft lies on the mesh model=2, and its target on {}: load both with the same mesh."
    )
    assert found(REFUSED[0]) == words.format("none")
    assert found(REFUSED[1]) == words.format("model=4")


@pytest.mark.slow
def test_drafters_that_belong_to_a_target(models):
    attach = [
        ("attach", kind, {"drafter": d})
        for kind, d in (("gpt2", "kangaroo"), ("t5", "eagle"), ("t5", "shallow"))
    ]
    cases = [*attach, *ATTACHED, *map(alone, ATTACHED), *map(by_turns, ATTACHED)]
    answers = ask(models, cases)
    for one in ATTACHED:
        there, here = answers[json.dumps(one)], answers[json.dumps(alone(one))]
        assert there["tokens"] == here["tokens"], one
        assert_same(answers[json.dumps(by_turns(one))], here)


# --- what is refused, before anything is loaded --------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (
            "model=3,data=5",
            r"needs 15 devices, but platform 'cpu' has 1\. Choose sizes",
        ),
        ("rows=2", r"mesh='rows=2': 'rows' is no axis that is known. Name \"data\""),
        ("data=1,data=1", "names the axis 'data' twice"),
        ("model=two", "model='two' must be a whole number ≥ 1"),
        ("model=0", "model='0' must be a whole number ≥ 1"),
        ("model", "model='' must be a whole number ≥ 1"),
        (jax.sharding.Mesh(np.array(jax.devices()), ("x",)), "'x' is no axis that is known"),
    ],
)
def test_meshes_that_are_refused(mesh, words):
    with pytest.raises(ValueError, match=words):
        checkpoints.load("/nowhere/at/all", mesh=mesh)


def test_a_mesh_and_a_device_are_one_too_many():
    with pytest.raises(ValueError, match="give one of them"):
        checkpoints.load("/nowhere/at/all", mesh="model=1", device="cpu")
    with pytest.raises(ValueError, match="replicate=True says how a model lies on a mesh"):
        checkpoints.load("/nowhere/at/all", replicate=True)


def test_a_mesh_of_one_device_holds_what_that_device_would(models):
    """In this process, which has no more."""
    one, other = (
        checkpoints.load(models / "t5" / "target", mesh=mesh) for mesh in (None, "model=1")
    )
    same = jax.tree.map(np.array_equal, one.model.params, other.model.params)
    assert all(jax.tree.leaves(same))
    assert drafters.load("lookup", other) is not None


def test_commands_take_a_mesh(models):
    config = defaults.decode()
    config.target, config.draft = (str(models / "gpt2" / role) for role in ("target", "draft"))
    config.mesh = "model=1"
    pairs.check(config)
    target, draft = pairs.load_pair(config)
    assert not target.model.placement.replicate
    assert draft.model.placement.replicate
    config.mesh = "models=1"
    with pytest.raises(ValueError, match="'models' is no axis that is known"):
        pairs.check(config)


def test_the_order_of_a_fused_projection():
    """Two devices: queries 0 1 | 2 3, then keys and values; a head of keys that both need."""
    order = sharding._fused_order((4, 2, 2), [1, 2, 2], 2)
    np.testing.assert_array_equal(order, [0, 1, 4, 5, 2, 3, 4, 5])
