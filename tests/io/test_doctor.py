"""The doctor: the verdict of each check, on whole pairs of each kind of fault."""

import dataclasses
import json
import math
import re
import shutil
import types

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import command_line
import gpt_variants
import reference
from pairs import TEXTS
from specjax import autoregressive, doctor, loop
from specjax.checkpoints.compatibility import Check
from specjax.decoding import building
from specjax.doctor import checks, distributions, verdicts
from specjax.doctor.case import Case
from specjax.measure.metrics import Alpha
from specjax.models.memory import Need
from specjax.policies import Costs
from specjax.pytrees import pytree
from specjax.results import Row
from specjax.rules import Token
from specjax.sampling import Sampling, argmax
from specjax.settings import Drafting

NAMES = [check.name for check in doctor.CHECKS]
FIELDS = {field.name for field in dataclasses.fields(Drafting)}
DRAWN = {"sampling": Sampling(0.3), "key": 0}
LAST = NAMES[NAMES.index("outputs") :]  # what needs a pair that decodes


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(checks, "DRAWS", 1024)
    monkeypatch.setattr(checks, "REPEATS", 1)


def examine(target, draft, *, names=NAMES, **options) -> dict[str, doctor.Finding]:
    """All findings, or those of some checks."""
    chain = {} if "tree" in options else {"gamma": 3}
    fields = chain | {name: options.pop(name) for name in FIELDS & options.keys()}
    plan = {"texts": TEXTS, "max_new_tokens": 24, "drafting": Drafting(**fields)} | options
    chosen = [check for check in doctor.CHECKS if check.name in names]
    found = list(doctor.examine(doctor.Plan(str(target), str(draft), **plan), chosen))
    assert [finding.name for finding in found] == list(names)
    return {finding.name: finding for finding in found}


def but(*others):
    """All checks but these, most of which take long to compile."""
    return [name for name in NAMES if name not in others]


@pytest.fixture
def copy(pair, tmp_path):
    """Copies of the pair's directories, to be broken."""

    def make(role):
        return shutil.copytree(getattr(pair, role).name, tmp_path / role)

    return make


def edit_weights(directory, edit):
    file = directory / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})


def edit_config(directory, **fields):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


# --- whole pairs -------------------------------------------------------------------------------


def test_a_draft_as_good_as_its_target(pair):
    """Sampling, with filters: everything is accepted."""
    names = but("greedy identity", "draws", "speed", "speedup")
    found = examine(
        pair.target.name,
        pair.twin.name,
        names=names,
        **DRAWN | {"sampling": Sampling(0.8, top_k=50)},
    )
    assert found["acceptance"].verdict == "pass"
    assert "by position 1.00 1.00 1.00" in found["acceptance"].seen


@pytest.mark.slow
def test_a_tree(pair):
    """Both loops draw from one distribution, and costs are those of levels and nodes."""
    found = examine(pair.target.name, pair.draft.name, tree="fixed(3, 2)")
    assert {found[name].verdict for name in ("greedy identity", "draws")} == {"pass"}
    assert re.search(r"by position \S+ \S+( \(|$)", found["acceptance"].seen)
    assert "v(9 nodes)" in found["speed"].seen
    assert found["speedup"].seen.endswith("at batch 1, 9 nodes")


def test_a_drafter_that_cannot_branch(pair):
    names = ["target files", "draft files", "compatibility"]
    found = examine(pair.target.name, "lookup", names=names, tree="fixed(3, 2)")
    assert found["compatibility"].verdict == "fail"
    assert 'tree="chain"' in found["compatibility"].seen


def cut_short(target, draft):
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lose_a_tensor(target, draft):
    edit_weights(draft, lambda t: {n: a for n, a in t.items() if "wi_1" not in n})


def take_ids_beyond_the_rows(target, draft):
    def cut(tensors):
        large = {"shared.weight", "lm_head.weight"}
        return {n: a[:200] if n in large else a for n, a in tensors.items()}

    edit_weights(draft, cut)
    edit_config(draft, vocab_size=200)


@pytest.mark.parametrize(
    ("fault", "role", "said"),
    [
        (cut_short, "target", "cut short or damaged"),
        (lose_a_tensor, "draft", "missing from the weights"),
        (take_ids_beyond_the_rows, "draft", "the tokenizer has 300 ids and the model only 200"),
    ],
)
def test_files_at_fault(fault, role, said, copy):
    """Nothing is loaded, and the other model is checked as far as its files go."""
    target, draft = copy("target"), copy("draft")
    fault(target, draft)
    found = examine(target, draft)
    failed = f"{role} files"
    assert found[failed].verdict == "fail"
    assert said in found[failed].seen
    fine = {"target": ["draft files"], "draft": ["target files", "tokenizer"]}[role]
    assert [name for name in NAMES if found[name].verdict == "pass"] == fine
    others = set(NAMES) - {failed, *fine}
    assert {found[name].verdict for name in others} == {"skip"}
    assert failed in found["compatibility"].seen


def test_a_directory_that_is_not_there(pair, tmp_path):
    found = examine(tmp_path / "none", pair.draft.name)
    assert found["target files"].verdict == "fail"
    assert str(tmp_path / "none") in found["target files"].seen


def test_settings_that_are_not_followed(pair, copy):
    target = copy("target")
    edit_config(target, num_beams=4)
    edit_weights(target, lambda t: {n: a * np.float32("nan") for n, a in t.items()})  # ends early
    found = examine(target, pair.draft.name)
    assert found["target files"].verdict == "warn"
    assert "num_beams=4" in found["target files"].way_out


def test_another_tokenizer(pair, copy):
    """As many ids, in another order. What concerns each model alone is still looked at."""
    draft = copy("draft")
    file = draft / "tokenizer.json"
    raw = json.loads(file.read_text())
    last = len(raw["model"]["vocab"]) - 1
    for token, id in raw["model"]["vocab"].items():
        if id >= 290:  # pieces that no other is merged from
            raw["model"]["vocab"][token] = last + 290 - id
    file.write_text(json.dumps(raw))
    found = examine(pair.target.name, draft)
    assert found["compatibility"].verdict == "fail"
    assert "token ids of" in found["compatibility"].seen
    assert found["compatibility"].way_out
    assert [found[name].verdict for name in ("memory", "weights")] == ["pass", "pass"]
    assert {found[name].verdict for name in ["logits", *LAST]} == {"skip"}
    names = ["target files", "draft files", "tokenizer", "compatibility"]
    found = examine(pair.target.name, draft, names=names, check_tokens=False)["compatibility"]
    assert found.verdict == "warn"
    assert "never right about 10 of the target's 300 ids" in found.seen


def test_a_draft_of_another_kind(pair, tmp_path):
    draft = gpt_variants.write(tmp_path, gpt_variants.VARIANTS["tied"])
    found = examine(pair.target.name, draft)
    assert found["compatibility"].verdict == "fail"
    assert "a source in the target and a prompt in the draft" in found["compatibility"].seen


def test_no_tokenizer(pair, copy):
    target = copy("target")
    for file in target.glob("tokenizer*"):
        file.unlink()
    found = examine(target, pair.draft.name)
    assert found["tokenizer"].verdict == "fail"
    assert "has no tokenizer" in found["tokenizer"].seen


def test_token_ids_need_no_tokenizer(copy):
    target = copy("target")
    for file in target.glob("tokenizer*"):
        file.unlink()
    names, texts = NAMES[: NAMES.index("weights") + 1], [[5, 6, 7, 1], [8, 9, 1]]
    found = examine(target, target, names=names, texts=texts)
    assert found["tokenizer"].seen == "none: inputs are token ids"
    assert all(finding.verdict in ("pass", "warn") for finding in found.values()), found


@pytest.mark.parametrize(("role", "bad"), [("target", np.nan), ("draft", np.inf)])
def test_weights_that_are_not_finite(role, bad, pair, copy):
    directories = {"target": pair.target.name, "draft": pair.draft.name}
    directories[role] = copy(role)

    def spoil(tensors):
        tensors["decoder.final_layer_norm.weight"][3] = bad
        return tensors

    edit_weights(directories[role], spoil)
    found = examine(**directories)
    assert found["weights"].verdict == "fail"
    assert f"{role}.decoder_norm.scale" in found["weights"].seen
    assert {found[name].verdict for name in ["logits", *LAST]} == {"skip"}


@pytest.mark.parametrize("role", ["target", "draft"])
def test_float16_that_overflows(role, pair, copy):
    """Every weight is finite in float16; a hidden unit of the feed-forward layer is not."""
    directories = {"target": pair.target.name, "draft": pair.draft.name}
    directories[role] = copy(role)

    def grow(tensors):
        return {n: a * np.float32(3e4 if ".wi_" in n else 1) for n, a in tensors.items()}

    edit_weights(directories[role], grow)
    found = examine(**directories, dtype=np.float16)
    assert found["devices"].verdict == "warn"
    assert "overflow" in found["devices"].way_out
    assert found["weights"].verdict == "pass"
    assert found["logits"].verdict == "fail"
    assert found["logits"].seen == f"those of the {role} are not finite"
    assert "bfloat16" in found["logits"].way_out
    assert {found[name].verdict for name in LAST} == {"skip"}


def test_logits_scaled_wrongly(pair, copy):
    """A tied embedding without its scale: greedy outputs are right, and distributions too sharp to
    draw."""
    target = copy("target")
    edit_weights(target, lambda t: t | {"lm_head.weight": 2000 * t["lm_head.weight"]})
    names = NAMES[: NAMES.index("outputs") + 1]
    found = examine(target, pair.draft.name, names=names)
    assert found["outputs"].verdict == "warn"
    assert "scale_decoder_outputs" in found["outputs"].way_out


def test_memory_that_is_not_there(pair, monkeypatch):
    monkeypatch.setattr(checks, "memory_free", lambda _=None: 1000)
    found = examine(pair.target.name, pair.draft.name)
    assert found["memory"].verdict == "fail"
    assert "0.001 MB are free" in found["memory"].seen
    assert found["compatibility"].verdict == "pass"
    assert found["weights"].verdict == "skip"


# --- planted faults of the loop ----------------------------------------------------------------


@pytest.fixture
def planted(monkeypatch):
    """Replaces a function that jitted loops trace, and forgets what they had traced, twice."""

    def forget():
        loop.decode.clear_cache()

    def plant(place, name, fault):
        forget()
        monkeypatch.setattr(place, name, fault)

    yield plant
    monkeypatch.undo()
    forget()


def accept_everything(self, target_logprobs, draft_logprobs, drafts, draft_len):
    slots = jax.numpy.arange(drafts.shape[1] + 1)[None, :]
    return (slots == draft_len[:, None]).astype(draft_logprobs.dtype)


@pytest.mark.slow
def test_a_loop_that_keeps_every_draft(pair, planted):
    planted(Token, "stop", accept_everything)
    found = examine(pair.target.name, pair.draft.name, names=but("speed"), **DRAWN)
    assert found["greedy identity"].verdict == "fail"
    assert found["draws"].verdict == "fail"
    assert found["acceptance"].verdict == "skip"
    plain, spec = p_values(found)
    assert spec < verdicts.LAW_P < plain


@pytree
class KeepsEveryDraft(Token):
    """Calls itself exact, and is not."""

    exact = True
    stop = accept_everything


@pytest.mark.slow
def test_a_rule_and_a_policy_of_ones_own(pair, monkeypatch):
    """A rule that lies fails; one that says that it is not exact is not judged."""
    made = []
    build = building.build
    monkeypatch.setattr(
        building, "build", lambda *how, **all_: made.append(how[2]) or build(*how, **all_)
    )
    names = [*NAMES[: NAMES.index("weights") + 1], "draws"]
    given = {"names": names, "policy": "svip(threshold=9.0)"} | DRAWN
    directories = pair.target.name, pair.draft.name
    found = examine(*directories, rule=f"{__name__}:KeepsEveryDraft", **given)["draws"]
    assert found.verdict == "fail"
    found = examine(*directories, rule="typical", **given | {"policy": "goodput"})["draws"]
    assert found.verdict == "skip"
    assert "not exact" in found.seen
    assert {type(one.policy).__name__ for one in made} == {"Svip", "Goodput"}


@pytest.mark.slow
def test_a_plain_loop_that_is_wrong(pair, planted):
    """Both loops are looked at: here plain decoding takes the likeliest token each time."""
    wrong = types.SimpleNamespace(next=lambda state, probs: argmax(probs))
    planted(autoregressive, "Dice", lambda: wrong)
    names = but("greedy identity", "acceptance", "speed", "speedup")
    plain, spec = p_values(examine(pair.target.name, pair.draft.name, names=names))
    assert plain < verdicts.LAW_P < spec


def p_values(found):
    """What the line of the distribution says of plain decoding and of speculation."""
    return [float(value) for value in re.findall(r"(?:plain|ve) ([^ ,;]+)", found["draws"].seen)]


# --- distributions
# --------------------------------------------------------------------------------------


def test_chi_square_is_that_of_scipy():
    rng = np.random.default_rng(0)
    distribution = dict(enumerate(rng.dirichlet(np.full(40, 0.3))))
    drawn = rng.choice(40, 500, p=list(distribution.values()))
    counts = dict(zip(*(part.tolist() for part in np.unique(drawn, return_counts=True))))  # noqa: B905
    for shift in (0, 10, 40):
        counts[drawn[0]] += shift
        expected = reference.chi_square(counts, distribution)
        assert distributions.chi_square(counts, distribution) == pytest.approx(
            expected, rel=1e-3, abs=1e-7
        )
    assert distributions.chi_square({40: 1}, distribution) == 0
    assert distributions.chi_square({0: 7}, {0: 1.0}) == 1


def test_entropies():
    logits = np.array([[0.0, 0, 0, 0], [0, 1e3, 0, 0], [0, 0, -1e3, -1e3]], np.float32)
    expected = [math.log(4), 0, math.log(2)]
    np.testing.assert_allclose(distributions.entropies(logits), expected, atol=1e-6)


def test_the_distribution_of_two_tokens(pair):
    """It sums to one; first tokens that end a row, or are not likely, stand alone."""
    case = Case(doctor.Plan(pair.target.name, pair.draft.name, TEXTS))
    case.target, case.draft = pair.target, pair.draft
    source = pair.target.tokenizer(TEXTS[0])["input_ids"]
    method = case.speculative(Sampling())
    likely, expected = distributions.distribution_of_two(method, pair.target, source)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-5)
    assert not likely & set(pair.target.eos_ids)
    assert {cell[0] for cell in expected if len(cell) == 2} == likely
    assert {cell[0] for cell in expected if len(cell) == 1} == set(range(300)) - likely
    assert distributions.outcome([min(likely), 7, 8], likely) == (min(likely), 7)
    assert distributions.outcome([1], likely) == (1,)


# --- verdicts ----------------------------------------------------------------------------------


def test_tokenizer_verdicts():
    assert verdicts.tokenizer(32100, 32128, 0.0).verdict == "pass"
    assert "model's own" in verdicts.tokenizer(300, 32128, 0.0).way_out
    assert "--input" in verdicts.tokenizer(32100, 32128, 0.2).way_out


def test_compatibility_verdicts():
    fine = Check("token ids", True, "3 tokens", "3 tokens")
    remark = Check("padding token", False, "0", "1", way_out="", required=False)
    fault = Check("start token", False, "0", "2", way_out="Another draft.")
    assert verdicts.compatibility([fine], (9, 9)).verdict == "pass"
    assert verdicts.compatibility([remark, fine], (9, 9)).verdict == "warn"
    found = verdicts.compatibility([remark, fault], (7, 9))
    assert (found.verdict, found.way_out) == ("fail", "Another draft.")
    assert found.seen.endswith("; 1 more; the draft is never right about 2 of the target's 9 ids")


@pytest.mark.parametrize(
    ("kind", "count", "dtypes", "said"),
    [
        ("cpu", 1, ("float32", "float32"), ""),
        ("cpu", 8, ("float32", "float32"), ""),
        ("cpu", 1, ("bfloat16", "float32"), "slow on this CPU"),
        ("H100", 1, ("float16", "bfloat16"), "overflow"),
        ("H100", 1, ("bfloat16", "bfloat16"), ""),
        ("H100", 2, ("bfloat16", "bfloat16"), "Only the first"),
    ],
)
def test_device_verdicts(kind, count, dtypes, said, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(verdicts, "cpu_multiplies", lambda _: False)
    roles = dict(zip(("target", "draft"), dtypes, strict=True))
    found = verdicts.devices(kind, count, roles, True)
    assert found.verdict == ("warn" if said else "pass")
    assert said in found.way_out
    monkeypatch.setattr(verdicts, "cpu_multiplies", lambda _: True)
    fast = verdicts.devices(kind, count, roles, True)
    assert fast.verdict == ("pass" if "this CPU" in said else found.verdict)


def test_a_gpu_that_is_not_used(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    found = verdicts.devices("cpu", 1, {"target": "float32"}, True)
    assert (found.verdict, "cuda13" in found.way_out) == ("warn", True)


@pytest.mark.parametrize(
    ("free", "verdict"), [(None, "pass"), (1000, "pass"), (700, "warn"), (599, "fail")]
)
def test_memory_verdicts(free, verdict):
    assert verdicts.memory([Need(300, 100, 100), Need(50, 25, 25)], free, 8, 20).verdict == verdict


@pytest.mark.parametrize(
    ("tokens", "entropy", "said"),
    [
        ([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]], 1.0, ""),
        ([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]], 5.5, "chance"),
        ([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]], 1e-4, "not differ"),
        ([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], []], 1.0, "same output"),
        ([[1, 2, 3, 4, 5, 6]], 1.0, ""),
        ([[1] * 12, [7, *[2, 3] * 9]], 1.0, "loop"),
        ([[1] * 12, [1, 2, 3, 4, 5, 6]], 1.0, ""),
    ],
)
def test_output_verdicts(tokens, entropy, said):
    found = verdicts.outputs(tokens, entropy, 300)
    assert found.verdict == ("warn" if said else "pass")
    assert said in found.way_out


@pytest.mark.parametrize(
    ("tokens", "looped"),
    [
        ([5, 6, 1, 1, 1], True),
        ([1, 1, 1, 2], False),
        ([9, 8, 7, 6, *[1, 2, 3, 4] * 3], False),  # only twice in the second half
        ([9, 8, 7, 6, *[1, 2, 3, 4] * 5], True),
        ([1, 2, 3, 4, 5] * 8, False),  # a longer period
        ([], False),
    ],
)
def test_loops(tokens, looped):
    assert verdicts.in_loop(tokens) == looped


def test_identity_verdicts():
    assert verdicts.identity([], 8, 100, 1e-4).verdict == "pass"
    near = verdicts.identity([1e-6, 5e-5], 8, 100, 1e-4)
    assert (near.verdict, "near-ties" in near.seen) == ("warn", True)
    assert verdicts.identity([1e-6, 1e-2], 8, 100, 1e-4).verdict == "fail"
    assert verdicts.identity([math.inf], 8, 100, 1e-4).verdict == "fail"


@pytest.mark.parametrize(
    ("alpha", "rates", "said"),
    [
        (0.7, [0.7, 0.7, 0.8, math.nan], ""),
        (0.3, [0.3, 0.3, math.nan, math.nan], "bigrams"),
        (0.7, [0.7, 0.6, 0.3, math.nan], "fall off"),
        (0.7, [math.nan] * 4, ""),
    ],
)
def test_acceptance_verdicts(alpha, rates, said):
    found = verdicts.acceptance(Alpha(alpha, alpha, alpha, 9, []), 2.0, np.array(rates))
    assert found.verdict == ("warn" if said else "pass")
    assert said in found.way_out


def test_speed_verdicts():
    assert verdicts.speed(Costs(0.1, [1.4] * 5), 4, "γ=4").verdict == "pass"
    found = verdicts.speed(Costs(0.5, [1.4] * 5), 4, "γ=4")
    assert (found.verdict, "v(γ=4) 1.40" in found.seen) == ("warn", True)


def test_nothing_follows_from_timings_in_doubt(pair, monkeypatch):
    """A draft step of 2.9 target steps by a smaller model, and a pass that takes less than one
    position: they are taken again, and then no speedup is named. On a busy machine neither."""
    wrong, fine = Costs(2.919, [0.37] * 4), Costs(0.1, [1.2] * 4)
    plan = doctor.Plan(pair.target.name, pair.draft.name, drafting=Drafting(3), max_new_tokens=4)
    case = Case(plan)
    case.target, case.draft = pair.target, pair.draft
    case.sources, case.rows, case.alpha = [[3, 1]], [], 0.9
    asked, told, load = [], [], 0.1
    monkeypatch.setattr(
        checks.costing,
        "costs_of",
        lambda watch, *_: asked.append(watch.repeats) or told.pop(0),
    )
    monkeypatch.setattr(checks.doubts, "load_average", lambda: load)
    told += [wrong, wrong]
    found = checks.speed(case)
    assert (found.verdict, asked) == ("warn", [checks.REPEATS, checks.AGAIN])
    assert "The timings contradict themselves: c = 2.92" in found.way_out
    assert "v = 0.37" in found.way_out
    assert checks.speedup(case).verdict == "skip"
    told += [wrong, fine, fine]
    assert (checks.speed(case).verdict, case.doubts) == ("pass", "")
    load = 9.0
    found = checks.speed(case)
    assert (found.verdict, found.way_out[:22]) == ("warn", "The machine was busy: ")
    assert checks.speedup(case).verdict == "skip"


def test_the_best_gamma_of_a_drafter_that_guesses():
    """9 of 10 first tokens are accepted and 1 of 9 second ones; α is .9, and would draft four."""
    row = Row(0, 0, "", [5] * 20, 10, 40, 40, 10, [1, 8, 1, 0, 0], [10, 9, 1, 0])
    passes = np.array([1.0, 1.1, 1.2, 1.3, 1.4])
    assert checks.best_gamma(0.9, [row], 0.1, passes, by_position=True) == 1
    assert checks.best_gamma(0.9, [row], 0.1, passes, by_position=False) == 4
    assert checks.best_gamma(0.9, [row], 1.0, passes, by_position=True) == 0


def test_dashes_are_explained():
    found = verdicts.acceptance(Alpha(0.7, None, None, 9, []), 2.0, np.array([0.7, math.nan]))
    assert found.seen.endswith("(–: too few outputs or rounds to say)")
    found = verdicts.acceptance(Alpha(0.7, 0.6, 0.8, 9, []), 2.0, np.array([0.7]))
    assert "–" not in found.seen


@pytest.mark.parametrize(
    ("expected", "best", "verdict", "said"),
    [
        (1.5, 4, "pass", ""),
        (1.5, 2, "pass", "γ=2 promises more"),
        (1.0, 2, "warn", "--config.gamma=2"),
        (1.0, 0, "warn", "Decode plainly"),
        (1.04, 4, "warn", "Decode plainly"),
    ],
)
def test_speedup_verdicts(expected, best, verdict, said):
    found = verdicts.speedup(expected, 4, best, "γ=4")
    assert found.verdict == verdict
    assert said in found.seen + found.way_out


# --- the command -------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))

    def run(target, draft, *arguments):
        pair = f"--config.target={target}", f"--config.draft={draft}"
        config = "--config=configs/decode.py", *pair, "--config.max_new_tokens=24"
        return command_line.run(monkeypatch, capsys, "specjax doctor", *config, *arguments)

    return run


@pytest.mark.slow
def test_a_pair_in_order(pair, command, tmp_path):
    """A line for each check. The draft is small, near its target and nearly as dear."""
    file = tmp_path / "in.txt"
    file.write_text("\n".join(["", *TEXTS[:2], " "]))
    outcome = command(pair.target.name, pair.draft.name, f"--input={file}")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.progress[-2:] == [
        f"loading the target {pair.target.name} and the draft {pair.draft.name}",
        "compiling what each check runs",
    ]
    *lines, last = outcome.stdout.splitlines()
    shown = {line[6:23].strip(): line for line in lines if not line.startswith(" ")}
    assert list(shown) == NAMES
    for name in (*NAMES[: NAMES.index("outputs")], "greedy identity", "draws"):
        assert shown[name].startswith("pass  "), shown[name]
    assert "2 of 2 outputs" in shown["greedy identity"]
    assert "(1024 draws of " in shown["draws"]
    assert "0 fail, 0 skip" in last


def test_the_command_fails_where_a_check_does(pair, copy, command):
    target = copy("target")
    cut_short(target, None)
    outcome = command(target, pair.draft.name)
    assert outcome.status == 1
    assert "1 fail" in outcome.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--config.draft="], "No draft"), (["--input=none.txt"], "no such file")],
)
def test_mistakes_are_said_in_one_line(pair, command, arguments, said):
    outcome = command(pair.target.name, pair.draft.name, *arguments)
    assert (outcome.status, outcome.stdout) == (1, "")
    assert said in outcome.stderr
