"""The tasks: trees and back, splits that do not overlap, a tokenizer that loses nothing."""

import ast
import json
import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import corpora
from experiments import tasks
from experiments.tasks import jsonl, prose, python_source, questions, trees
from experiments.tasks.examples import Example

GOLDEN = [
    ("return self.default(line)", "(Return (Call (Attribute (Name self) default) [(Name line)]))"),
    ("x = []", "(Assign [(Name x)] (List))"),
    ("f(**k)", "(Expr (Call (Name f) [] [(keyword ~ (Name k))]))"),
    ("a[1:] += b", "(AugAssign (Subscript (Name a) (Slice (Constant 1))) Add (Name b))"),
    ("-b", "(Expr (UnaryOp USub (Name b)))"),
    ("from . import x as y", "(ImportFrom ~ [(alias x y)] 1)"),
    ("x = '(a) ~'", "(Assign [(Name x)] (Constant '(a) ~'))"),
    ("x: int", "(AnnAssign (Name x) (Name int) ~ 1)"),
    ("g = lambda *a, b=...: None", None),
    ("assert 0 < x <= 1e9, f'{x!r:>{w}} {{}}'", None),
    ("{**a, 'b': 2j}", None),
    ("y = [i async for i in z if i if j]", None),
    ("del a.b, c[...]", None),
    ("raise E from None", None),
    ("global a, b", None),
    ("x = True, None, b'\\x00\"', 'it\\'s \"'", None),
    ("pass", "Pass"),
    ("if x: return y", "(If (Name x) [(Return (Name y))])"),
    ("while x: pass", "(While (Name x) [Pass])"),
    ("for i in x: break", None),
    ("class A(B, k=1): x = 1; y = 2", None),
    ("def f(a, /, b: int = 1, *c, d, e=2, **g) -> str: return a", None),
    ("async def f(): await x", None),
]  # fmt: skip


@pytest.mark.parametrize(("source", "tree"), GOLDEN)
def test_tree_of_a_statement_and_back(source, tree):
    node = ast.parse(source).body[0]
    text = trees.write(node)
    if tree is not None:
        assert text == tree
    assert trees.write(trees.read(text)) == text
    assert ast.dump(ast.parse(ast.unparse(trees.read(text)))) == ast.dump(ast.parse(source))
    assert trees.is_well_formed(text)


HEADERS = [
    ("for i in range(10):", "(For (Name i) (Call (Name range) [(Constant 10)]))"),
    ("while True:", "(While (Constant True))"),
    ("if x > 0:", "(If (Compare (Name x) [Gt] [(Constant 0)]))"),
    ("with a as b, c:", "(With [(withitem (Name a) (Name b)) (withitem (Name c))])"),
    ("def f():", "(FunctionDef f (arguments))"),
    (
        "def f(x, y=1) -> t:",
        "(FunctionDef f (arguments [] [(arg x) (arg y)] ~ [] [] ~ [(Constant 1)]) [] [] (Name t))",
    ),
    ("class Foo(Bar):", "(ClassDef Foo [(Name Bar)])"),
    ("class Foo:", "(ClassDef Foo)"),
    ("try:", "(Try)"),
    ("async for i in x:", "(AsyncFor (Name i) (Name x))"),
    ("async with x:", "(AsyncWith [(withitem (Name x))])"),
    ("async def f():", "(AsyncFunctionDef f (arguments))"),
]


@pytest.mark.parametrize(("line", "tree"), HEADERS)
def test_tree_of_a_header_and_back(line, tree):
    assert trees.write(trees.parse(line)) == tree
    assert trees.write(trees.read(tree)) == tree
    assert trees.is_well_formed(tree)
    assert trees.kind(tree) == type(trees.parse(line)).__name__


def test_headers_are_of_every_kind():
    assert {type(trees.parse(line)) for line, _ in HEADERS} == set(trees.COMPOUND)


@pytest.mark.parametrize(
    "line",
    [
        "elif x:", "else:", "except E:", "for i in x:  # all:", "for i in", "@f", "x = 1; y = 2",
        "", "if x: return:", "def f(a,", "try: pass", "lambda:", "x:",
    ],
)  # fmt: skip
def test_what_is_not_one_line(line):
    with pytest.raises(SyntaxError):
        trees.parse(line)


@pytest.mark.parametrize(
    "text",
    [
        "", "(", "(Return", "(Return (Name x)", "(Return (Name x)))", "(Nonsense x)", "(Name x)y",
        "(Return (Name x y z))", "(Assign (Name x) (Constant 1))", "(Return  (Name x))", "[]",
        "(Return (Constant x))", "(Expr (BinOp (Name a) Plus (Name b)))", "(Constant 'a)",
        "(Return (Name 1))", "(Return Name)", "(Assign [] (Name x))", "(Name x)",
        "(Return (BinOp (Name a) ~ (Name b)))", "(Return (Compare (Name a) [Eq] [(Name b)))",
        "(Return (Compare (Name a) [] [(Name b)]))", "(For (Name i))", "(While)",
        "(For (Name i) (Constant 1) 2)", "(If (Name x) [] [Pass])", "Try", "(Try [])",
        "(If (Name x) [(While (Name y))])",
        "(FunctionDef f (arguments) [] [(Name d)])", "(FunctionDef f)", "(Pass)", "pass",
        "(ExceptHandler)", "(Module)", "(Module [Pass])",
    ],
)  # fmt: skip
def test_what_is_not_a_tree(text):
    assert not trees.is_well_formed(text)


def test_held_out_trees_read_back():
    for example in tasks.load("parse", "test"):
        assert trees.is_well_formed(example.target), example
        assert trees.write(trees.read(example.target)) == example.target
        assert trees.write(trees.parse(example.input)) == example.target


@pytest.fixture
def few_modules(monkeypatch):
    """A standard library of a few modules and no packages, so that training pairs load fast."""
    some = ("json", "email", "c")
    files = [f for f in python_source.standard_library() if f[0].startswith(some)]
    monkeypatch.setattr(python_source, "standard_library", lambda: files)
    monkeypatch.setattr(python_source, "installed", lambda packages: [])
    for cached in (python_source._load, python_source._in_several):
        cached.cache_clear()
    yield
    for cached in (python_source._load, python_source._in_several):
        cached.cache_clear()


@pytest.mark.parametrize("task", python_source.TASKS)
def test_splits_share_nothing(few_modules, task):
    """No input of parse, and no paragraph of prose; and the same again in the same order."""
    data = {split: tasks.load(task, split) for split in tasks.SPLITS}
    parts = {
        split: [pair.input for pair in pairs]
        if task == "parse"
        else [part for pair in pairs for part in f"{pair.input}{pair.target}".split("\n")]
        for split, pairs in data.items()
    }
    distinct = {split: set(parts[split]) for split in parts}
    assert all(len(distinct[split]) == len(parts[split]) > 0 for split in ("validation", "test"))
    assert len(distinct["train"]) == len(parts["train"]) or task == "parse"
    assert not distinct["train"] & (distinct["validation"] | distinct["test"])
    assert not distinct["validation"] & distinct["test"]
    python_source._load.cache_clear()
    assert {split: tasks.load(task, split) for split in tasks.SPLITS} == data


def test_what_prose_reads():
    """Packages are held out by module too, but those of extras and tests only train."""
    files = {split: dict(python_source.files("prose", split)) for split in tasks.SPLITS}
    packages = {split: {name.split(".")[0] for name in files[split]} for split in files}
    assert "jax" in packages["test"]
    assert "scipy" in packages["validation"]
    assert "_pytest" in packages["train"]
    more = set(python_source.MORE_PACKAGES)
    assert not more & (packages["validation"] | packages["test"])
    assert not set(files["train"].values()) & set(files["test"].values())
    parsed = {name.split(".")[0] for name, _ in python_source.files("parse", "test")}
    assert not parsed & set(python_source.PACKAGES)


def test_modules_are_split_by_their_names():
    names = [name for name, _ in python_source.standard_library()]
    splits = [python_source.split_of(name) for name in names]
    assert len(set(names)) == len(names) > 300
    assert set(splits) == set(tasks.SPLITS)
    assert splits.count("train") > 0.8 * len(names)
    assert not any(name.split(".")[0] in ("test", "lib2to3", "site-packages") for name in names)


def test_lines_of_parse(tmp_path):
    """Statements of one line and headers; no parts of either, no comments, no docstrings."""
    path = tmp_path / "m.py"
    path.write_text(
        "class A(B):\n"
        "    'A docstring.'\n"
        "    @decorated\n"
        "    def f(self):\n"
        "        try:\n"
        "            for i in x:  # with a comment:\n"
        "                if i: return 1\n"
        "                elif j:\n"
        "                    break\n"
        "        except* E:\n"
        "            pass; x = 1\n"
        "    async def g(\n"
        "        self,\n"
        "    ):\n"
        "        await h(\n"
        "            1)\n"
    )
    found = {pair.input: pair.target for pair in python_source._parse_pairs(path)}
    assert found == {
        "class A(B):": "(ClassDef A [(Name B)])",
        "def f(self):": "(FunctionDef f (arguments [] [(arg self)]))",
        "return 1": "(Return (Constant 1))",
        "if i: return 1": "(If (Name i) [(Return (Constant 1))])",
        "break": "Break",
        "pass": "Pass",
        "x = 1": "(Assign [(Name x)] (Constant 1))",
    }


def test_common_lines_are_in_training_alone(few_modules):
    """And often, since a person types them first."""
    counts = {s: Counter(pair.input for pair in tasks.load("parse", s)) for s in tasks.SPLITS}
    for line in ("try:", "pass", "return None", *({"import re"} & python_source._in_several())):
        assert [counts[split][line] for split in tasks.SPLITS] == [python_source.COPIES, 0, 0]
    rare = [line for line in counts["train"] if counts["train"][line] == 1]
    assert len(rare) > 0.9 * len(counts["train"])


def test_paragraphs_of_prose(tmp_path):
    """Docstrings and comments, in the order of the source; no markup, no code, nothing short."""
    path = tmp_path / "m.py"
    path.write_text(
        "# A comment can go on over\n# several lines, and it is one.\n"
        "def f(x):\n"
        "    '''Say it  in more than\n    a few plain words, twice.\n\n"
        "    >>> f(1)  # This is code, and not a sentence of any use.\n\n"
        "    # This stands in a docstring, and is no comment at all.\n\n    Too short.'''\n"
        "    # Names such as default_factory are words as well.\n"
        "    return 1  # What follows code is not looked at, long as it is.\n"
        "    # A table | has bars, and this | is left out | for that reason.\n"
        "    # Args: a list of names, and what each of them is there for.\n"
        "class A:\n    'What comes last in a module is read last, whatever it is.'\n"
    )
    assert list(python_source._paragraphs(path)) == [
        "A comment can go on over several lines, and it is one.",
        "Say it in more than a few plain words, twice.",
        "Names such as default_factory are words as well.",
        "What comes last in a module is read last, whatever it is.",
    ]


def test_stretches_of_prose():
    """In order, as long as they may be, and nothing that is too short."""
    lines = [f"{'x' * 390} {i}" for i in range(9)] + ["x" * 999, "The rest."]
    found = list(prose.stretches(lines))
    assert "\n".join(found) == "\n".join(lines)
    assert [len(text.split("\n")) for text in found] == [3, 3, 3, 2]
    assert all(len(text) <= prose.LONGEST_STRETCH for text in found)
    assert list(prose.stretches(["x" * (prose.SHORTEST_STRETCH - 1)])) == []
    assert list(prose.stretches([])) == []
    opening, rest = prose.split_opening("One two three four.\nFive.")
    assert (opening, rest) == ("One two three", " four.\nFive.")


def test_provenance(few_modules):
    data = {split: tasks.load("parse", split) for split in tasks.SPLITS}
    record = tasks.provenance("parse", data)
    assert json.loads(json.dumps(record)) == record
    assert record["pairs"]["test"] == len(data["test"])
    assert record["packages"]["jax"]
    changed = {**data, "test": [Example("x", "y"), *data["test"][1:]]}
    assert tasks.provenance("parse", changed)["sha256"]["test"] != record["sha256"]["test"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"input": "a", "target": "b"}\n{"input": "a"', "line 2: not JSON"),
        ('{"input": "a"}', "line 1: the field 'target' must be a string, is None"),
        ("[1]", r"line 1: not a JSON object.* Give an object with input and target"),
        ("[" * 100_000, "line 1: not JSON"),
        ("\n", "has no pairs"),
    ],
)
def test_wrong_lines_are_named(tmp_path, text, message):
    path = tmp_path / "pairs.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        jsonl.load(path)


def test_jsonl_and_its_errors(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"input": "a", "target": "b", "more": 1}\n\n{"input": "c", "target": ""}\n')
    expected = [Example("a", "b"), Example("c", "")]
    assert tasks.load("jsonl", "validation", files=[path] * 3) == expected
    path.rename(tmp_path / "test.jsonl")
    assert tasks.load("jsonl", "test", files=str(tmp_path)) == expected
    (tmp_path / "validation.jsonl").write_text('{"input": "d", "target": "e"}\n')
    both = tasks.load("jsonl", "validation+test", files=str(tmp_path))
    assert both == [Example("d", "e"), *expected]
    with pytest.raises(ValueError, match=r"no such file: .*train\.jsonl"):
        tasks.load("jsonl", "train", files=tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        jsonl.load(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="needs 3 files"):
        tasks.load("jsonl", "train")
    with (tmp_path / "test.jsonl").open("ab") as file:
        file.truncate(10**11)
    with pytest.raises(ValueError, match=r"test\.jsonl has more than .* bytes, which is too"):
        jsonl.load(tmp_path / "test.jsonl")
    with pytest.raises(ValueError, match="no task 'prase': choose from parse"):
        tasks.load("prase", "test")
    with pytest.raises(ValueError, match="no split 'dev'"):
        tasks.load("parse", "dev")


QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write a line.", "Once more."]},
    {"question_id": 161, "category": "translation", "turns": ["Say: no"], "reference": ["nein"]},
    {"question_id": 99, "category": "math", "turns": ["2 + 2"], "reference": []},
]


def write_questions(path, rows=QUESTIONS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_questions_of_a_file(tmp_path):
    """MT-bench's categories are one kind; either name selects."""
    path = write_questions(tmp_path / "question.jsonl")
    found = questions.load(path)
    assert [one.question_id for one in found] == [81, 161, 99]
    assert [one.kind for one in found] == ["conversation", "translation", "conversation"]
    assert found[0].turns == ("Write a line.", "Once more.")
    assert [one.reference for one in found] == ["", "nein", ""]
    assert questions.load(path, ["conversation"]) == [found[0], found[2]]
    assert questions.load(tmp_path, ["math", "translation"]) == found[1:]
    assert tasks.load("spec_bench", "test", path, ["translation"]) == [Example("Say: no", "nein")]
    with pytest.raises(ValueError, match=r"category 'rag': it has conversation, writing, tra"):
        questions.load(path, ["math", "rag"])
    speed = {"question_id": "a1", "category": "math", "sub_category": "x", "turns": ["2 + 2"]}
    (one,) = questions.load(write_questions(path, [speed]))  # as SPEED-Bench has it
    assert one.kind == "math"


def test_questions_of_a_directory_and_of_a_data_set(tmp_path):
    """Files as in DeepSpec's eval_datasets, whose rows have turns alone, and a hub's layout."""
    for name in ("gsm8k", "alpaca"):
        write_questions(tmp_path / f"{name}.jsonl", [{"turns": ["a"]}, {"turns": ["b"]}])
    found = [(one.category, one.question_id) for one in questions.load(tmp_path)]
    assert found == [("alpaca", 1), ("alpaca", 2), ("gsm8k", 1), ("gsm8k", 2)]
    place = tmp_path / "hub"
    place.mkdir()
    columns = {name: [row[name] for row in QUESTIONS] for name in QUESTIONS[0]}
    pq.write_table(pa.table(columns), place / "train-00000-of-00001.parquet")
    assert [one.turns for one in questions.load(place)] == [tuple(r["turns"]) for r in QUESTIONS]
    pq.write_table(pa.table(columns), place / "validation-00000-of-00001.parquet")
    with pytest.raises(ValueError, match="has the splits train, validation, and none is named"):
        questions.load(place)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="nothing cannot be read as a data set"):
        questions.load(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"turns": ["a"]', "line 2: not JSON .*on each line"),
        ("[1]", "line 2: not a JSON object"),
        ('{"question": "a"}', "line 2: no turns. Give {"),
        ('{"turns": []}', r"line 2: turns=\[\] should be a list of one text or more. Give {"),
        ('{"turns": "a"}', "line 2: turns='a' should be a list"),
        ('{"turns": ["a", 3]}', r"line 2: turns\[1\]=3 should be a text that is not blank"),
        ('{"turns": [" "]}', r"line 2: turns\[0\]=' ' should be a text"),
        (r'{"turns": ["\ud83d"]}', r"line 2: turns\[0\] holds half a character"),
        ('{"turns": ["a"], "category": 3}', "line 2: category=3 should be a text"),
        ('{"turns": ["a"], "question_id": [3]}', r"line 2: question_id=\[3\] should be a number"),
    ],
)
def test_wrong_questions_are_named(tmp_path, line, message):
    path = tmp_path / "question.jsonl"
    path.write_text(f"{json.dumps(QUESTIONS[0])}\n{line}")
    with pytest.raises(ValueError, match=message) as caught:
        questions.load(path)
    assert len(str(caught.value).splitlines()) == 1


def test_questions_that_are_not_there(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    for place, message in (
        ("empty.jsonl", "has no questions. Give {"),
        ("none.jsonl", "No such file of questions: .*Spec-Bench's is https"),
        ("a/b/c", "No such file of questions"),
    ):
        with pytest.raises(ValueError, match=message):
            questions.load(tmp_path / place)
    with pytest.raises(ValueError, match="no/set cannot be read as a data set"):
        questions.load("no/set")  # tests are offline
    with pytest.raises(ValueError, match="no train split: set split to test"):
        tasks.load("spec_bench", "train", tmp_path)
    with pytest.raises(ValueError, match="needs data_dir, a file of questions"):
        tasks.load("spec_bench", "test")


@pytest.fixture
def corpora_root(tmp_path):
    corpora.write(tmp_path)
    return tmp_path


def test_corpora_of_the_paper_from_directories(corpora_root):
    """In order, with T5's prefixes; the training file, which is broken, is left alone."""
    for place in (corpora_root / "wmt/wmt14", [str(corpora_root / "wmt/wmt14")]):
        assert tasks.load("wmt14_en_de", "test", files=place) == [
            Example(f"translate English to German: {english}", german)
            for english, german in corpora.GERMAN.items()
        ]
    assert tasks.load("cnn_dailymail", "test", files=corpora_root / "abisee/cnn_dailymail") == [
        Example(f"summarize: {article}", highlights)
        for article, highlights in corpora.HIGHLIGHTS.items()
    ]


def test_corpora_stay_in_their_files(corpora_root):
    """Pairs are made as they are asked for: one, a part, or one after the other."""
    place = corpora_root / "wmt/wmt14"
    rows, whole = (find("wmt14_en_de", "test", place) for find in (tasks.stream, tasks.load))
    assert not isinstance(rows, list)
    assert (len(rows), rows[3], rows[2:5], list(rows)) == (8, whole[3], whole[2:5], whole)


def test_errors_of_the_paper_s_corpora(corpora_root, monkeypatch):
    wmt = corpora_root / "wmt/wmt14"
    with pytest.raises(ValueError, match=r"de-en/train-.* cannot be read"):
        tasks.load("wmt14_en_de", "train", files=wmt)
    with pytest.raises(ValueError, match=r"3\.0\.0/test-.*parquet of .*wmt14 cannot be read"):
        tasks.load("cnn_dailymail", "test", files=wmt)
    with pytest.raises(ValueError, match="No such directory: nowhere"):
        tasks.load("wmt14_en_de", "test", files="nowhere")
    with pytest.raises(ValueError, match="takes one directory"):
        tasks.load("wmt14_en_de", "test", files=[wmt, wmt])
    with pytest.raises(ValueError, match="run `hf download wmt/wmt14 --repo-type dataset") as error:
        tasks.load("wmt14_en_de", "test")  # tests are offline
    assert "--include 'de-en/test-*.parquet'" in str(error.value)
    for file in wmt.glob("de-en/test-*"):
        pq.write_table(pa.table({"text": ["x"]}), file)
    with pytest.raises(ValueError, match=r"has the columns \['text'\]"):
        tasks.load("wmt14_en_de", "test", files=wmt)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError, match=r"needs the package datasets: pip install -e '\.\[data\]'"
    ):
        tasks.load("wmt14_en_de", "test", files=wmt)
