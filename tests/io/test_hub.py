"""Loading and saving Hugging Face's directories; what is fetched from the hub."""

import dataclasses
import json
import threading
import time
import warnings

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import gpt_variants
import llama_variants
import t5_variants
from checkpoint_edits import WORDS, assert_same, edit_json, edit_weights, make_tokenizer
from family_rows import ROWS
from specjax import devices
from specjax.checkpoints import Checkpoint, load, outline, parameters, save, saving, tensors
from specjax.models.gpt import GPT, GPTConfig
from specjax.models.language_model import LanguageModel
from specjax.models.layers import arrange
from specjax.models.llama import Llama, Qwen3Config, Rope
from specjax.models.t5 import T5, T5Config

V1_0 = t5_variants.VARIANTS["v1_0"]


@pytest.fixture
def directory(tmp_path):
    """A complete checkpoint of the v1.0 variant."""
    return t5_variants.write(tmp_path / "model", V1_0)


@dataclasses.dataclass
class Elsewhere:
    """A device for tests that put the model nowhere."""

    platform: str

    def memory_stats(self):
        return None


def stored_embedding(checkpoint):
    """As the files have it, (V, E)."""
    return arrange(checkpoint.model.module(), platform=None).embedding[...]


# --- what is loaded ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_files_of_other_dtypes(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(tensors, "CHUNK", 64)  # several chunks to a tensor
    loaded = load(t5_variants.write(tmp_path, V1_0, dtype=dtype))
    embedding = stored_embedding(loaded)
    assert embedding.dtype == jnp.float32  # the default on a CPU
    expected = t5_variants.tensors(V1_0)["shared.weight"].astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(embedding, expected)
    half = stored_embedding(load(tmp_path, dtype=jnp.bfloat16))
    np.testing.assert_array_equal(half, expected.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("stored", "chosen"),
    [(np.float32, "float32"), (ml_dtypes.bfloat16, "bfloat16"), (np.float16, "bfloat16")],
)
def test_dtype_follows_the_files_on_an_accelerator(tmp_path, stored, chosen, monkeypatch):
    monkeypatch.setattr(devices, "find", lambda device: Elsewhere("gpu"))
    model = load(t5_variants.write(tmp_path, V1_0, dtype=stored)).model
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model)} == {chosen}


def test_what_else_is_stored(directory):
    """Copies of the embedding are no head, and what early checkpoints store is not read."""
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

    def add(tensors):
        tensors[unused] = np.ones((8, 2), np.float32)
        for name in ("lm_head", "encoder.embed_tokens", "decoder.embed_tokens"):
            tensors[f"{name}.weight"] = tensors["shared.weight"].copy()

    plain = load(directory)
    edit_weights(directory, add)
    assert load(directory).config.tie_word_embeddings
    assert_same(load(directory), plain)
    edit_weights(directory, lambda t: {n: x for n, x in t.items() if n != "shared.weight"})
    assert_same(load(directory), plain)


def test_surplus_tensors(directory):
    """They are left out with a warning, whatever their type is."""
    layer = "encoder.block.2.layer.0.layer_norm.weight"
    narrow = np.zeros(2, ml_dtypes.float8_e4m3fn)
    add = {"counter": np.zeros(3, np.int32), "narrow": narrow, layer: np.ones(16, np.float32)}
    edit_weights(directory, lambda tensors: tensors | add)
    with pytest.warns(UserWarning, match="'counter', 'enc.*', 'narrow' in the .* belong to no"):
        load(directory)


def test_an_index_that_lists_too_much_or_too_little(tmp_path, directory):
    """It decides only which of several shards a tensor is read from."""
    made = t5_variants.write(tmp_path / "sharded", V1_0, shards=2)
    index, shards = made / "model.safetensors.index.json", sorted(made.glob("model-*"))
    listed = json.loads(index.read_text())["weight_map"]
    for shard in shards:
        other = next(name for name, place in listed.items() if place != shard.name)
        held = load_file(shard) | {other: np.zeros(3, np.float16)}
        save_file({**held, "surplus": np.ones(1)}, shard)
    changed = {**listed, "lm_head.weight": shards[0].name}
    del changed[max(listed)]
    index.write_text(json.dumps({"weight_map": changed}))
    with pytest.warns(UserWarning, match=r"'surplus' in the weights belong to no layer"):
        assert_same(load(made), load(directory))


def test_ids_come_from_generation_config_before_config(directory):
    edit_json(directory / "config.json", eos_token_id=1, decoder_start_token_id=None)
    assert load(directory).eos_ids == (1,)
    edit_json(
        directory / "generation_config.json",
        eos_token_id=[7, 1],
        decoder_start_token_id=3,
        pad_token_id=2,
    )
    found = load(directory)
    assert (found.start_id, found.pad_id, found.eos_ids) == (3, 2, (1, 7))


def test_an_id_of_minus_one_is_none(tmp_path):
    made = gpt_variants.write(tmp_path, gpt_variants.VARIANTS["tied"])
    edit_json(made / "config.json", eos_token_id=2, pad_token_id=-1)
    edit_json(made / "generation_config.json", eos_token_id=-1)
    found = load(made)
    assert (found.eos_ids, found.pad_id) == ((), found.start_id)
    edit_json(made / "generation_config.json", eos_token_id=[-1, 3])
    assert load(made).eos_ids == (3,)


def test_an_eos_beyond_the_vocabulary_is_said(directory):
    edit_json(directory / "generation_config.json", eos_token_id=[1, 40])
    with pytest.warns(
        UserWarning, match="eos_token_id=40 is no id of a vocabulary of 40"
    ) as caught:
        assert load(directory).eos_ids == (1, 40)
    assert caught[0].filename == __file__


def test_a_checkpoint_shows_itself_in_one_line(directory):
    shown = repr(load(directory))
    assert "parameters, float32, 40 ids" in shown
    assert len(shown) < 200 + len(str(directory))
    assert "\n" not in shown


# --- how it is read ----------------------------------------------------------------------------


def test_no_second_copy_is_made_of_the_weights(directory, monkeypatch):
    """On a CPU a parameter is the very memory that it was read into."""
    places = []

    def noted(tensor, out, part):
        places.append((out.ctypes.data, out.nbytes))

    monkeypatch.setattr(parameters, "read_into", noted)
    model = load(directory).model
    arrays = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(model)]
    assert set(arrays) <= {start for start, _ in places}


def test_parameters_are_read_in_threads(directory, monkeypatch):
    """Two are under way at once; an error of one is the error of loading, and ends it."""
    monkeypatch.setattr(devices, "cores", lambda: 2)
    both, read = threading.Barrier(2), parameters.read_into
    count = len(jax.tree.leaves(outline(directory).model))
    begun = []

    def waits(tensor, out, part):
        begun.append(tensor)
        if len(begun) <= 2:
            both.wait(timeout=30)
        if len(begun) > 2:
            time.sleep(0.01)
            raise ValueError("damaged")
        read(tensor, out, part)

    monkeypatch.setattr(parameters, "read_into", waits)
    with pytest.raises(ValueError, match="damaged"):
        load(directory)
    assert 2 < len(begun) < count


def test_readers_place_arrays_where_jax_does(directory, monkeypatch):
    """`jax.default_device` is set for a thread, and readers are others."""
    place, found = jax.device_put, set()

    def seen(*args, **options):
        found.add(jax.config.jax_default_device)
        return place(*args, **options)

    monkeypatch.setattr(jax, "device_put", seen)
    with jax.default_device(device := jax.local_devices()[0]):
        load(directory)
    assert found == {device}


def test_a_bar_in_a_terminal(directory, monkeypatch, capsys):
    monkeypatch.setattr(parameters, "SHOWN_AFTER", 0)
    load(directory)
    assert not capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    load(directory)
    assert "\rweights:" in capsys.readouterr().err


# --- tokenizers and settings -------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_gpt_projections_lie_in_the_files_as_input_first(tmp_path, backend, monkeypatch):
    monkeypatch.setattr(devices, "find", lambda device: Elsewhere(backend))
    variant = gpt_variants.VARIANTS["untied"]
    module = load(gpt_variants.write(tmp_path, variant)).model.module()
    stored = gpt_variants.tensors(variant)["transformer.h.1.mlp.c_fc.weight"]
    weight = module.layers[1].feed_forward.input.weight[...]
    assert module.input_first == (backend == "cpu")
    np.testing.assert_array_equal(weight, stored if backend == "cpu" else stored.T)


@pytest.mark.parametrize(
    ("module", "name", "longest"),
    [(t5_variants, "v1_0", 50), (gpt_variants, "tied", 16), (llama_variants, "llama3", 50)],
)
def test_the_tokenizer_bounds_ids_and_texts(module, name, longest, tmp_path):
    """Without one, every row of the embedding is an id."""
    made = module.write(tmp_path, module.VARIANTS[name])
    positions = load(made).config.max_positions
    assert load(made).max_source_len == (positions or 512)
    edit_json(made / "config.json", **{} if positions else {"n_positions": 1024})
    assert load(made).max_source_len == (positions or 1024)
    assert (load(made).tokenizer, load(made).model.vocab_size) == (None, 40)
    make_tokenizer(model_max_length=50).save_pretrained(made)
    found = load(made)
    assert (found.model.vocab_size, found.config.vocab_size) == (len(WORDS), 40)
    assert found.max_source_len == longest
    assert found.tokenizer("cab")["input_ids"] == [5, 3, 4, 1]


def test_settings_that_are_not_followed_are_named_in_one_warning(directory):
    """Those that change nothing are not named."""
    file = directory / "generation_config.json"
    edit_json(file, num_beams=1, length_penalty=2.0, repetition_penalty=1.0, max_length=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(directory)
    edit_json(file, num_beams=4, no_repeat_ngram_size=3, repetition_penalty=1.2)
    edit_json(file, min_length=0, bad_words_ids=None, forced_eos_token_id=1)
    task = {"prefix": "summarize: ", "num_beams": 2, "min_length": 30, "max_length": 200}
    edit_json(directory / "config.json", task_specific_params={"summarization": task})
    with pytest.warns(UserWarning, match="specjax does not follow") as caught:
        load(directory)
    (warning,) = caught
    text = str(warning.message)
    assert warning.filename == __file__
    asked = "num_beams=4, length_penalty=2.0, no_repeat_ngram_size=3, repetition_penalty=1.2"
    for setting in (*asked.split(", "), "forced_eos_token_id=1", "max_length"):
        assert (setting in text) == (setting != "max_length")
    assert "for the task 'summarization' num_beams=2, min_length=30" in text
    assert "bad_words" not in text
    assert "prefix" not in text


# --- saving ------------------------------------------------------------------------------------

YARN = Rope("yarn", 50.0, 2.0, 16, slow=0.5, fast=9.0, attention_factor=1.5, truncate=False)
IDS = {"bos_token_id": 2, "pad_token_id": 3}
WHOLE = {
    "float32": (T5, T5Config(32, 8, 4, 8, 1, 1, 2, decoder_start_token_id=2, pad_token_id=3)),
    "float16": (GPT, GPTConfig(32, 20, 8, 1, 2, **IDS)),
    "bfloat16": (
        Llama,
        Qwen3Config(32, 8, 12, 3, 2, 1, 6, 20, YARN, 4, (1,), attention_bias=True, **IDS),
    ),
}


@pytest.mark.parametrize("dtype", WHOLE)
def test_everything_of_a_checkpoint_is_saved(dtype, tmp_path):
    module, config = WHOLE[dtype]
    longest = config.max_positions or 99
    before = Checkpoint(
        name="new",
        model=LanguageModel.of(module(config, rngs=nnx.Rngs(0)), vocab_size=len(WORDS)),
        config=config,
        tokenizer=make_tokenizer(model_max_length=longest),
        eos_ids=(1, 5),
        max_source_len=longest,
        prefix="parse: ",
        metadata={"data": "0f0f"},
    )
    directory = tmp_path / "deep" / "model"
    save(directory, before, dtype=jnp.dtype(dtype))
    after = load(directory)
    kept = ("config", "eos_ids", "max_source_len", "prefix", "metadata", "start_id", "pad_id")
    for field in kept:
        assert getattr(after, field) == getattr(before, field), field
    assert after.model.vocab_size == len(WORDS)
    assert after.tokenizer.get_vocab() == before.tokenizer.get_vocab()
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a.astype(dtype).astype(a.dtype), b),
        before.model.params,
        after.model.params,
    )
    assert [path.name for path in directory.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (module, name)
        for module in dict.fromkeys(ROWS[row].variants for row in ROWS)
        for name in module.VARIANTS | getattr(module, "OTHERS", {})
    ],
)
def test_what_is_saved_is_loaded(module, name, tmp_path):
    """Nothing of the config or the weights is lost. Bare names are saved as full ones, without the
    masks."""
    variant = (module.VARIANTS | getattr(module, "OTHERS", {}))[name]
    first = load(module.write(tmp_path / "a", variant))
    save(tmp_path / "b", first)
    assert_same(load(tmp_path / "b"), first)
    if hasattr(variant, "bare"):
        variant = dataclasses.replace(variant, bare=False)
    stored, expected = load_file(tmp_path / "b" / "model.safetensors"), module.tensors(variant)
    assert stored.keys() == expected.keys()
    jax.tree.map(np.testing.assert_array_equal, stored, expected)


def test_a_failed_save_leaves_what_was_there(directory, monkeypatch):
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    checkpoint = load(directory)

    def fail(path, *_):
        path.write_bytes(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(saving, "write_file", fail)
    for place in (directory, directory.with_name("new")):
        with pytest.raises(OSError, match="disk full"):
            save(place, checkpoint)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert list(directory.parent.iterdir()) == [directory]


def test_saving_again_replaces_a_model_and_no_other_file(directory):
    """And it leaves the model in memory as it was."""
    checkpoint = load(directory)
    shapes = jax.tree.map(jnp.shape, checkpoint.model)
    doubled = jax.tree.map(lambda x: 2 * x, checkpoint.model)
    save(directory, dataclasses.replace(checkpoint, model=doubled))
    assert_same(load(directory), dataclasses.replace(checkpoint, model=doubled))
    (directory / "README.md").write_text("a card")
    with pytest.raises(ValueError, match=r"holds README\.md, which would not be replaced but lost"):
        save(directory, checkpoint)
    assert (directory / "README.md").read_text() == "a card"
    checkpoint.model.module().embedding.set_value(jnp.zeros(()))  # its variables are its own
    assert jax.tree.map(jnp.shape, checkpoint.model) == shapes


# --- the hub -----------------------------------------------------------------------------------

BESIDE = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
BINS = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
OTHERS = ["tf_model.h5", "rust_model.ot", "onnx/model.safetensors", "onnx/tokenizer.json", "README"]
OTHERS += ["model.fp16.safetensors", "training_args.bin", "optimizer.bin", ".gitattributes"]


@pytest.mark.parametrize(
    ("weights", "kept"),
    [
        (["model.safetensors", "pytorch_model.bin", "flax_model.msgpack"], ["model.safetensors"]),
        (["pytorch_model.bin", "flax_model.msgpack"], ["pytorch_model.bin"]),
        (["flax_model.msgpack"], ["flax_model.msgpack"]),
        (
            ["pytorch_model.bin.index.json", *BINS, "flax_model.msgpack"],
            ["pytorch_model.bin.index.json", *BINS],
        ),
        (
            ["model.safetensors.index.json", "model-00001-of-00001.safetensors", *BINS],
            ["model.safetensors.index.json", "model-00001-of-00001.safetensors"],
        ),
    ],
)
def test_one_format_is_downloaded(weights, kept, directory, monkeypatch):
    asked = {}

    def snapshot_download(name, *, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(directory)

    offered = [*OTHERS, *weights, *BESIDE, "spiece.model"]
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name: offered)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load("google/t5-v1_1-xxl").name == "google/t5-v1_1-xxl"
    assert asked["name"] == "google/t5-v1_1-xxl"
    fetched = huggingface_hub.utils.filter_repo_objects(offered, allow_patterns=asked["patterns"])
    assert sorted(fetched) == sorted([*BESIDE, *kept])
