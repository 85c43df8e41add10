"""What training reads: a tokenizer that loses nothing, and batches of pairs."""

import itertools
import json

import numpy as np
import pytest

from command_line import ROOT
from experiments import tasks
from experiments.tasks import python_source
from experiments.tasks.examples import Example
from experiments.train import batches
from experiments.train import tokenizer as tokenizers
from experiments.train.batches import Order, Pair
from specjax import checkpoints


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = [text for pair in tasks.load("parse", "test") for text in (pair.input, pair.target)]
    made = tokenizers.to_transformers(tokenizers.train(texts, 600), max_length=500)
    directory = tmp_path_factory.mktemp("tokenizer") / "it"
    tokenizers.save(made, directory)
    (directory / "config.json").write_text('{"model_type": "t5"}')  # as beside a model
    return tokenizers.load(directory)


def test_a_tokenizer_is_not_written_over_a_file(tokenizer, tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match="file is a file, not a directory"):
        tokenizers.save(tokenizer, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_tokenizer_has_t5s_specials(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert len(tokenizer) == 600
    assert tokenizer.model_max_length == 500
    assert tokenizer("x = 1")["input_ids"][-1] == 1


@pytest.mark.parametrize(
    "text",
    ["x = '  two\\t  '", "é — 你好 😀", "\tif  x :\n\n  y", "(Return (Name _a1))", " ", "a  "],
)
def test_tokenizer_gives_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_tokenizer_gives_every_example_back(tokenizer):
    for pair in tasks.load("parse", "validation"):
        for text in (pair.input, pair.target):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_an_identifier_has_the_same_pieces_everywhere(tokenizer):
    name = "unlikely_identifier"
    pieces = tokenizer(name)["input_ids"][:-1]
    for text in (f"x.{name} = 1", f"(Assign [(Attribute (Name x) {name})] (Constant 1))"):
        ids = tokenizer(text)["input_ids"]
        assert any(ids[i : i + len(pieces)] == pieces for i in range(len(ids)))


def test_tokenizer_errors(tmp_path):
    with pytest.raises(ValueError, match="vocab_size=100: bytes and specials alone need 259"):
        tokenizers.train(["x"], 100)
    with pytest.raises(ValueError, match=r"give 2\d\d pieces, not vocab_size=400"):
        tokenizers.train(["x y"], 400)
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        tokenizers.load(tmp_path)


def _pairs(count: int) -> list[Pair]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 12, size=(count, 2))
    return [Pair(np.full(s, 5, np.int32), np.full(t, 6, np.int32)) for s, t in sizes]


def test_batches_of_an_epoch_are_distinct_pairs_that_fit():
    pairs, buckets = _pairs(200), ((6, 6), (8, 10))
    order = Order(batches.lengths(pairs), buckets, target_tokens=30, seed=3)
    seen = []
    for bucket, chosen in order.epoch(0):
        batch = batches.collate([pairs[i] for i in chosen], buckets[bucket])
        assert batch.target.shape == ([5, 3][bucket], buckets[bucket][1])
        assert (batch.source_len == (batch.source > 0).sum(1)).all()
        seen += list(chosen)
    assert len(seen) == len(set(seen))
    assert order.epoch(0) != order.epoch(1)


def test_order_depends_on_the_step_alone():
    order = Order(batches.lengths(_pairs(60)), ((12, 12),), target_tokens=60, seed=3)
    count = 3 * order.batches_per_epoch
    whole = [pairs.tolist() for _, pairs in itertools.islice(order.from_step(0), count)]
    for step in (1, order.batches_per_epoch, count - 2):
        _, first = next(order.from_step(step))
        assert first.tolist() == whole[step]


def test_pairs_longer_than_every_bucket_are_counted():
    """By source or by target; what fits both sides of no one bucket is left out too."""
    sizes = [(6, 6), (7, 3), (3, 10), (7, 11), (9, 1), (6, 10)]
    pairs = [Pair(np.full(s, 5, np.int32), np.full(t, 6, np.int32)) for s, t in sizes]
    buckets = ((6, 6), (8, 5), (5, 10))
    assert batches.left_out(pairs, buckets) == 3
    assert batches.left_out(pairs, ((9, 11),)) == 0
    read = batches.in_order(pairs, buckets, target_tokens=12)
    assert sum((batch.target_len > 0).sum() for batch in read) == 3


def test_real_ids_are_told_from_padding_by_length():
    pair = Pair(np.array([0, 4]), np.array([0, 5, 0]))
    batch = batches.collate([pair, Pair(np.array([1]), np.zeros(0, np.int32))], (3, 4))
    assert batch.real.tolist() == [[True, True, True, False], [False] * 4]
    assert batch.source_len.tolist() == [2, 1]


def test_inputs_of_training_in_another_split_are_counted():
    """By the input, or by the target where there is no input; once, with the numbers."""
    train = [Example("a", "x"), Example("b", "y"), Example("", "z")]
    data = {
        "train": train,
        "validation": [Example("c", "x"), Example("", "y")],
        "test": [Example("a", "other"), Example("", "z"), Example("d", "z")],
    }
    with pytest.warns(UserWarning, match="jsonl: 2 of 3 inputs of test are in the training split"):
        tasks.warn_of_overlap("jsonl", data)
    data["test"] = data["test"][2:]
    tasks.warn_of_overlap("jsonl", data)  # warnings are errors here
    data["test"] = train
    tasks.warn_of_overlap("prose", data)  # whose openings are not distinct


def test_a_split_is_compared_with_what_was_held_out(tmp_path):
    """By the hashes that a model has from its training; of another task nothing is known."""

    def write(split, text):
        row = {"input": text, "target": text}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")

    for split in tasks.SPLITS:
        write(split, split)
    data = {split: tasks.load("jsonl", split, tmp_path) for split in tasks.SPLITS}
    then = json.dumps(tasks.provenance("jsonl", data))
    assert tasks.not_held_out(then, "jsonl", "validation+test", tmp_path) == ""
    write("test", "new")
    assert tasks.not_held_out(then, "jsonl", "validation", tmp_path) == ""
    found = tasks.not_held_out(then, "jsonl", "validation+test", tmp_path)
    assert found.startswith("The test split of jsonl differs from what was held out")
    assert (
        tasks.not_held_out(then, "parse", "test") == tasks.not_held_out("", "jsonl", "test") == ""
    )


def test_another_python_has_another_held_out_text(monkeypatch):
    """The families were trained on one version's sources; the sentence names both."""
    recorded = checkpoints.load(ROOT / "families" / "parse" / "draft-tiny").metadata[
        "training_data"
    ]
    other = [Example("new = 1", "(Assign [(Name new)] (Constant 1))")]
    monkeypatch.setattr(python_source, "load", lambda task, split: other)
    monkeypatch.setattr(tasks.platform, "python_version", lambda: "3.13.9")
    found = tasks.not_held_out(recorded, "parse", "test")
    assert "The test split of parse differs from what was held out" in found
    assert "(Python 3.11.7; here 3.13.9)" in found


def test_evaluation_reads_every_pair_once():
    pairs = _pairs(50)
    cut = batches.in_order(pairs, ((6, 6), (12, 12)), target_tokens=36)
    assert sum((b.target > 0).sum() for b in cut) == sum(len(p.target) for p in pairs)
    assert all((b.source_len >= 1).all() for b in cut)


def test_too_few_pairs_for_a_batch():
    with pytest.raises(ValueError, match="2 pairs do not fill one batch"):
        Order(batches.lengths(_pairs(2)), ((12, 12),), target_tokens=60, seed=0)
