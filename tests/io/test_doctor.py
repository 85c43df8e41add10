"""The doctor: the verdict of each check, on whole pairs of each kind of fault."""

import dataclasses
import json
import re
import shutil
import types

import jax
import numpy as np
import pytest

import command_line
import gpt_variants
from checkpoint_edits import edit_json, edit_weights
from pairs import TEXTS
from specjax import autoregressive, doctor, loop
from specjax.decoding import building
from specjax.doctor import checks, verdicts
from specjax.pytrees import pytree
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
    edit_json(draft / "config.json", vocab_size=200)


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
    edit_json(target / "config.json", num_beams=4)
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
