"""Checkpoints of every format: each gives the parameters that safetensors give, and is converted
to them. Files that are damaged or hostile are in test_hostile_files.py."""

import dataclasses
import json
import pickle
import re
import shutil
import zipfile
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from flax import serialization

import checkpoint_formats as formats
import gpt_variants
import llama_variants
import make_checkpoint_data
import t5_variants
from checkpoint_edits import assert_same, contents
from specjax.checkpoints import convert, load, save, tensors
from specjax.checkpoints.formats import torch_files
from specjax.checkpoints.tensors import Held, Turned, equal, read_into
from specjax.checkpoints.weights import FLAX, find_tensors
from specjax.cli import convert as convert_command
from tiny_models import covering

DATA = make_checkpoint_data.DATA
V1_0, V1_1 = t5_variants.VARIANTS["v1_0"], t5_variants.VARIANTS["v1_1"]
MODELS = {
    "t5 v1.0": (t5_variants, "v1_0"),
    "t5 v1.1": (t5_variants, "v1_1"),
    "gpt2": (gpt_variants, "untied"),
    "bare gpt2": (gpt_variants, "bare"),
    "llama": (llama_variants, "llama3"),
    "qwen2": (llama_variants, "qwen2"),
}


def weights_of(module, variant):
    """Arrays of a variant; scalars too."""
    return {name: np.asarray(array) for name, array in module.tensors(variant).items()}


@pytest.fixture
def directory(tmp_path):
    """A T5 in torch's format."""
    made = t5_variants.write(tmp_path / "model", V1_0)
    return formats.rewrite(made, t5_variants.tensors(V1_0), "bin")


@pytest.fixture
def t5x_directory(tmp_path):
    """A T5 in T5X's format."""
    return formats.write_t5x(tmp_path / "run" / "checkpoint_7", t5_variants.tensors(V1_1))


# --- every format, every family ----------------------------------------------------------------


FORMS = ("bin", "bin-sharded", "legacy", "legacy-sharded", "flax", "flax-sharded")


@pytest.mark.parametrize(("model", "form"), covering(MODELS, FORMS, count=12))
def test_each_format_gives_the_same_parameters(model, form, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "CHUNK", 64)  # several pieces to a tensor
    module, name = MODELS[model]
    variant = module.VARIANTS[name]
    if form.startswith("flax") and getattr(variant, "bare", False):
        pytest.skip("Flax models stored neither masks nor bare names")
    plain = load(module.write(tmp_path / "plain", variant))
    arrays = weights_of(module, variant)
    found = load(formats.rewrite(module.write(tmp_path / "other", variant), arrays, form))
    assert_same(found, plain)


@pytest.mark.parametrize("form", ["safetensors", "bin", "legacy", "flax", "t5x"])
def test_a_part_of_a_tensor(form, tmp_path, monkeypatch):
    """What a device of a mesh reads: some rows, some columns, turned or not."""
    monkeypatch.setattr(tensors, "CHUNK", 64)
    arrays = t5_variants.tensors(V1_1)
    if form == "t5x":
        directory = formats.write_t5x(tmp_path / "checkpoint_7", arrays)
    else:
        directory = t5_variants.write(tmp_path, V1_1)
        directory = directory if form == "safetensors" else formats.rewrite(directory, arrays, form)
    for tensor in find_tensors(directory).values():
        part = tuple(slice(size // 3, size // 3 + (size + 1) // 2) for size in tensor.shape)
        whole = contents(tensor)
        out = np.full(whole[part].shape, np.nan, tensor.dtype)
        read_into(tensor, out, part)
        np.testing.assert_array_equal(out, whole[part])
        out.fill(np.nan)
        read_into(Turned.of(tensor), out.T, part[::-1])
        np.testing.assert_array_equal(out, whole[part])


GIN = {
    "a binding": "network.T5Config.mlp_activations = {}",
    "a macro": "KINDS = {}  # of T5 1.1\n\nnetwork.T5Config:\n  mlp_activations = %KINDS",
}


@pytest.mark.parametrize(
    ("name", "said"),
    covering(
        ("v1_0", "v1_1", "deep_decoder", "deep_encoder", "odd_heads"),
        ("nothing", *GIN, "config.json"),
    ),
)
def test_t5x_gives_the_same_parameters(name, said, tmp_path):
    variant = t5_variants.VARIANTS[name]
    distance = {"relative_attention_max_distance": 128}  # all of T5X's have that
    variant = dataclasses.replace(variant, config={**variant.config, **distance})
    plain = t5_variants.write(tmp_path / "plain", variant)
    made = formats.write_t5x(tmp_path / "run" / "checkpoint_7", t5_variants.tensors(variant))
    if said == "config.json":
        shutil.copy(plain / "config.json", made)
    elif said != "nothing":
        kinds = "('relu',)" if variant.raw["feed_forward_proj"] == "relu" else "('gelu', 'linear')"
        (made.parent / "config.gin").write_text(GIN[said].format(kinds))
    found, expected = load(made), load(plain)
    assert found.eos_ids == (1,)
    assert_same(found, expected)


def test_of_a_t5x_run_the_last_step_is_read(t5x_directory):
    other = {name: 2 * array for name, array in t5_variants.tensors(V1_1).items()}
    formats.write_t5x(t5x_directory.with_name("checkpoint_10"), other)
    assert_same(load(t5x_directory.parent), load(t5x_directory.parent / "checkpoint_10"))


@pytest.mark.parametrize("version", [2, 3])
def test_t5x_in_half_precision_and_with_arrays_in_the_file_itself(version, tmp_path):
    arrays = {n: a.astype(ml_dtypes.bfloat16) for n, a in t5_variants.tensors(V1_0).items()}
    inline = ("token_embedder/embedding", "encoder/layers_1/attention/query/kernel")
    made = formats.write_t5x(tmp_path / "t5x", arrays, version=version, inline=inline)
    variant = dataclasses.replace(V1_0, config={"relative_attention_max_distance": 128})
    plain = t5_variants.write(tmp_path / "plain", variant, dtype=ml_dtypes.bfloat16)
    assert_same(load(made), load(plain))


@pytest.mark.parametrize(
    ("name", "axis"), [("v1_1", 1), ("odd_heads", 0), ("umt5", 1), ("umt5", 0), ("umt5_tied", None)]
)
def test_t5x_with_scanned_layers(name, axis, tmp_path):
    """All layers in one array, and heads with an axis; umT5's biases, with None one by one."""
    variant = (t5_variants.VARIANTS | t5_variants.OTHERS)[name]
    distance = {"relative_attention_max_distance": 128}
    variant = dataclasses.replace(variant, config={**variant.config, **distance})
    change = partial(formats.scanned, axis=axis, num_heads=variant.raw["num_heads"])
    made = formats.write_t5x(
        tmp_path / "t5x",
        t5_variants.tensors(variant),
        chunk=5,
        inline=("decoder/decoder/self_attention/key/kernel",),
        change=dict if axis is None else change,
    )
    assert_same(load(made), load(t5_variants.write(tmp_path / "plain", variant)))


def test_the_best_format_is_read(directory):
    """Safetensors before torch's files, and these before flax's."""
    for name in ("flax_model.msgpack", "pytorch_model.bin"):
        (directory / name).write_bytes(b"never read" if name.startswith("f") else b"")
    formats.write_torch(directory / "pytorch_model.bin", t5_variants.tensors(V1_0))
    expected = load(directory)
    t5_variants.write(directory, V1_0)
    (directory / "pytorch_model.bin").write_bytes(b"never read")
    assert_same(load(directory), expected)


# --- what torch and flax write -----------------------------------------------------------------


@pytest.mark.parametrize("file", ["torch_zip.bin", "torch_legacy.bin"])
@pytest.mark.parametrize("chunk", [8, 1 << 22])
def test_files_of_torch_itself(file, chunk, monkeypatch):
    """Every dtype, tied and non-contiguous tensors, in pieces of one number or as a whole."""
    monkeypatch.setattr(tensors, "CHUNK", chunk)
    found = torch_files.find(DATA / file)
    for name in ("float64", "float32", "float16", "bfloat16", "bool", "uint8", "int64"):
        np.testing.assert_array_equal(
            contents(found[name]), make_checkpoint_data.numbers((2, 3), name)
        )
        assert found[name].dtype.name == name
    whole = make_checkpoint_data.numbers((4, 6), "float32")
    expected = {"whole": whole, "tied": whole, "turned": whole.T, "rows": whole[1:3]}
    expected |= {"columns": whole[:, 1:4:2], "one": whole[2, 3], "empty": whole[:0]}
    expected |= {"expanded": np.broadcast_to(whole[1:2], (3, 6)), "parameter": whole}
    for name, array in expected.items():
        np.testing.assert_array_equal(contents(found[name]), array, err_msg=name)
        assert found[name].shape == array.shape
    assert found["tied"] == found["whole"] != found["rows"]


def test_a_piece_is_no_longer_than_a_chunk(monkeypatch):
    monkeypatch.setattr(tensors, "CHUNK", 48)
    found = torch_files.find(DATA / "torch_zip.bin")
    for name in ("whole", "turned", "columns"):
        pieces = [piece for _, piece in found[name].pieces()]
        assert len(pieces) > 1
        assert max(piece.nbytes for piece in pieces) <= 48


def test_equality_whatever_the_layout(tmp_path):
    rng = np.random.default_rng(0)
    array = rng.normal(size=(7, 5)).astype(np.float32)
    other = array.copy()
    other[6, 4] += 1
    formats.write_torch(tmp_path / "a.bin", {"x": array, "turned": array.T, "other": other})
    found = torch_files.find(tmp_path / "a.bin")
    assert equal(found["x"], found["x"])
    assert equal(found["x"], Held.of(array))
    assert equal(found["x"], Turned.of(found["turned"]))
    assert not equal(found["x"], found["other"])
    assert not equal(found["x"], Turned.of(Held.of(other.T)))
    assert not equal(found["x"], found["turned"])


def test_an_archive_whose_checksums_were_not_computed(tmp_path):
    """As torch writes with `set_crc32_options(False)`: zeros stand for them."""
    file, ones = tmp_path / "a.bin", np.ones((2, 2), np.float32)
    formats.write_torch(file, {"x": ones})
    with zipfile.ZipFile(file) as archive:
        sums = [info.CRC.to_bytes(4, "little") for info in archive.infolist()]
    data = file.read_bytes()
    for checksum in sums:
        data = data.replace(checksum, bytes(4))
    file.write_bytes(data)
    np.testing.assert_array_equal(contents(torch_files.find(file)["x"]), ones)


def test_flax_files_are_read_as_flax_reads_them(tmp_path, monkeypatch):
    """Arrays of many dtypes, in several parts too, beneath `params` or not."""
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 40)
    rng = np.random.default_rng(0)
    names = ("float64", "float32", "float16", "bfloat16", "int64", "uint8", "bool")
    arrays = {f"a/{name}": (3 * rng.random((7, 5))).astype(name) for name in names}
    arrays |= {"scalar": np.float32(3).reshape(()), "empty": np.zeros((0, 3), np.float32)}
    arrays |= {"long" * 90: np.ones(70_000, np.uint8)}
    file = tmp_path / "x.msgpack"
    for above in ("", "params/"):
        formats.write_flax(file, {above + name: array for name, array in arrays.items()})
        assert b"__msgpack_chunked_array__" in file.read_bytes()
        theirs = serialization.msgpack_restore(file.read_bytes())
        theirs = theirs["params"] if above else theirs
        found = FLAX.find(file)
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            here = theirs["a"][name[2:]] if "/" in name else theirs[name]
            np.testing.assert_array_equal(here, array)
            np.testing.assert_array_equal(contents(found[name]), array, err_msg=name)
            assert found[name].dtype == array.dtype


def test_chunks_that_hold_the_fill_value_alone_may_be_missing(t5x_directory):
    query = t5x_directory / "target.encoder.layers_0.attention.query.kernel"
    file = query / ".zarray"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, "fill_value": 0.5}))
    (query / "1.0").unlink()
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    found = contents(find_tensors(t5x_directory)[name])
    np.testing.assert_array_equal(found.T[10:, :10], 0.5)


# --- spiece.model ------------------------------------------------------------------------------

STORED = json.loads((DATA / "spiece_ids.json").read_text(encoding="utf-8"))


@pytest.fixture
def with_spiece(request, tmp_path):
    """A T5, or another family, with the stored sentencepiece model and nothing else of a
    tokenizer."""
    variant = t5_variants.OTHERS.get(getattr(request, "param", "t5"), V1_0)
    variant = dataclasses.replace(variant, config={**variant.config, "vocab_size": 160})
    made = t5_variants.write(tmp_path / "model", variant)
    (made / "spiece.model").write_bytes((DATA / "spiece.model").read_bytes())
    extra = {"extra_ids": make_checkpoint_data.EXTRA_IDS}
    (made / "tokenizer_config.json").write_text(json.dumps(extra))
    return made


@pytest.mark.parametrize("with_spiece", ["t5", "mt5", "umt5"], indirect=True)
def test_a_spiece_model_gives_the_ids_of_transformers(with_spiece, tmp_path):
    """And it is saved as a tokenizer.json with the same ids."""
    convert(with_spiece, tmp_path / "out")
    assert not (tmp_path / "out" / "spiece.model").exists()
    for found in map(load, (with_spiece, tmp_path / "out")):
        assert found.model.vocab_size == STORED["size"]
        for text, ids in STORED["ids"].items():
            assert found.tokenizer(text)["input_ids"] == ids, text
        for token, i in STORED["special"].items():
            assert found.tokenizer.convert_tokens_to_ids(token) == i
        assert set(found.tokenizer.all_special_tokens) == set(STORED["special"])
        ids = found.tokenizer("the house is wonderful")["input_ids"]
        assert found.tokenizer.decode(ids, skip_special_tokens=True) == "the house is wonderful"


def test_what_is_beside_a_spiece_model_is_followed(with_spiece):
    (with_spiece / "tokenizer_config.json").write_text('{"model_max_length": 77}')
    special = {"eos_token": {"content": "</s>"}, "additional_special_tokens": None}
    (with_spiece / "special_tokens_map.json").write_text(json.dumps(special))
    with pytest.raises(ValueError, match="the tokenizer has 250 ids and the model only 160"):
        load(with_spiece)
    (with_spiece / "tokenizer_config.json").write_text('{"model_max_length": 77, "extra_ids": 0}')
    assert load(with_spiece).max_source_len == 77
    (with_spiece / "tokenizer_config.json").write_text('{"extra_ids": "many"}')
    with pytest.raises(ValueError, match="extra_ids='many' should be an integer"):
        load(with_spiece)


def test_t5x_finds_its_pieces_beside_its_steps(tmp_path):
    variant = dataclasses.replace(V1_0, config={"vocab_size": 260})
    made = formats.write_t5x(tmp_path / "run" / "checkpoint_7", t5_variants.tensors(variant))
    pieces = (DATA / "spiece.model").read_bytes()
    (made.parent / "sentencepiece.model").write_bytes(pieces)
    text = "parse: return self.line"
    assert load(made).tokenizer(text)["input_ids"] == STORED["ids"][text]


# --- convert -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "model"), [("bin", "t5 v1.1"), ("legacy-sharded", "gpt2"), ("flax", "llama")]
)
def test_what_is_converted_is_what_is_saved(form, model, tmp_path):
    module, name = MODELS[model]
    variant = module.VARIANTS[name]
    arrays = weights_of(module, variant)
    made = formats.rewrite(module.write(tmp_path / "made", variant), arrays, form)
    said = []
    convert(made, tmp_path / "converted", progress=lambda *counts: said.append(counts))
    save(tmp_path / "saved", load(made))
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert files == {path.name for path in (tmp_path / "converted").iterdir()}
    for file in files:
        ours = (tmp_path / "converted" / file).read_bytes()
        assert ours == (tmp_path / "saved" / file).read_bytes()
    assert_same(load(tmp_path / "converted"), load(made))
    whole = 4 * sum(array.size for array in arrays.values())
    assert said[-1] == (whole, whole)
    assert [count for count, _ in said] == sorted({count for count, _ in said})


def test_convert_keeps_half_precision_unless_told(tmp_path):
    arrays = {n: a.astype(ml_dtypes.bfloat16) for n, a in t5_variants.tensors(V1_0).items()}
    made = formats.rewrite(t5_variants.write(tmp_path / "made", V1_0), arrays, "bin")
    convert(made, tmp_path / "same")
    convert(made, tmp_path / "wide", dtype=np.float32)
    stored = {t.dtype.name for t in find_tensors(tmp_path / "same").values()}
    assert stored == {"bfloat16"}
    assert {t.dtype.name for t in find_tensors(tmp_path / "wide").values()} == {"float32"}
    assert_same(load(tmp_path / "same"), load(tmp_path / "wide"))


def test_convert_into_its_own_directory(t5x_directory, directory):
    """Only if asked to, and what it would not write again is no model that it replaces."""
    held = {path.name for path in t5x_directory.iterdir()}
    for overwrite, said in ((True, "would not be replaced but lost"), (False, "but lost")):
        with pytest.raises(ValueError, match=said):
            convert(t5x_directory, t5x_directory, overwrite=overwrite)
    assert {path.name for path in t5x_directory.iterdir()} == held
    before = load(directory)
    with pytest.raises(ValueError, match=r"holds config\.json already.* --overwrite"):
        convert(directory, directory)
    convert(directory, directory, overwrite=True)
    assert {p.name for p in directory.iterdir()} >= {"config.json", "model.safetensors"}
    assert not (directory / "pytorch_model.bin").exists()
    assert_same(load(directory), before)


def test_a_converted_model_keeps_nothing_of_the_one_before(t5x_directory, tmp_path):
    """Neither its chat template nor its tokenizer, shards and index."""
    place = tmp_path / "place"
    convert(t5x_directory, place)
    whole = {path.name for path in place.iterdir()}
    older = ("chat_template.jinja", "tokenizer_config.json", "vocab.json", "flax_model.msgpack",
             "model.safetensors.index.json", "model-00001-of-00002.safetensors")  # fmt: skip
    for name in older:
        (place / name).write_text("{}")
    (place / "additional_chat_templates").mkdir()
    convert(t5x_directory, place, overwrite=True)
    assert {path.name for path in place.iterdir()} == whole
    (place / "thesis.tex").touch()
    for write in (lambda: convert(t5x_directory, place, overwrite=True),
                  lambda: save(place, load(t5x_directory))):  # fmt: skip
        with pytest.raises(ValueError, match=r"holds thesis\.tex, which would not be replaced"):
            write()
    assert load(place).config == load(t5x_directory).config


def test_convert_from_a_shell(directory, tmp_path, capsys):
    """One line each of progress, result and error; the bar is for terminals."""
    out = tmp_path / "out"
    convert_command.main([str(directory), str(out), "--dtype=bfloat16"])
    said = capsys.readouterr()
    assert re.fullmatch(rf"{out}: a t5 with 0\.0 MB of .* no tokenizer\n", said.out)
    assert said.err == f"converting {directory} into {out}\n"
    assert {t.dtype.name for t in find_tensors(out).values()} == {"bfloat16"}
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps({}, 2))
    with pytest.raises(SystemExit) as left:
        convert_command.main([str(directory), str(tmp_path / "other")])
    assert left.value.code == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(r"error: .*pytorch_model\.bin cannot be read: it ", said)
    assert not (tmp_path / "other").exists()
