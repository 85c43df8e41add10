"""Loading and saving Hugging Face directories, and every way in which one can be wrong."""

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
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import gemma_variants
import gpt_variants
import llama_variants
import t5_variants
import t5gemma_variants
from family_rows import ROWS
from specjax import checkpoints, devices
from specjax.checkpoints import Checkpoint, load, outline, parameters, save, saving, tensors
from specjax.models.gpt import GPT, GPTConfig
from specjax.models.language_model import LanguageModel
from specjax.models.layers import arrange
from specjax.models.llama import Llama, Qwen3Config, Rope
from specjax.models.t5 import T5, T5Config

V1_0, V1_1 = t5_variants.VARIANTS["v1_0"], t5_variants.VARIANTS["v1_1"]


def variants_of(module):
    """Every variant of a layout, by name."""
    return module.VARIANTS | getattr(module, "OTHERS", {})


DAMAGED = r"model\.safetensors is cut short or damaged \(.+\)\. Copy or download it again"
WORDS = ("<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz")


def make_tokenizer(words=WORDS, **options):
    """One token a letter; </s> at the end, as T5's tokenizer does."""
    tokenizer = Tokenizer(models.WordLevel(dict(zip(words, range(99), strict=False)), "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        **options,
    )


@pytest.fixture
def directory(tmp_path):
    """A complete checkpoint of the v1.0 variant."""
    return t5_variants.write(tmp_path / "model", V1_0)


def edit_json(path, **changes):
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**raw, **changes}))


def edit_weights(directory, edit):
    """Apply `edit` to the dict of tensors."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


@dataclasses.dataclass
class Elsewhere:
    """A device for tests that put the model nowhere."""

    platform: str

    def memory_stats(self):
        return None


def stored_embedding(checkpoint):
    """As the files have it, (V, E)."""
    return arrange(checkpoint.model.module(), platform=None).embedding[...]


def assert_same_params(a, b):
    jax.tree.map(np.testing.assert_array_equal, a.model, b.model)


# --- what is loaded ----------------------------------------------------------------------------


def test_sharded_equals_single(tmp_path, directory):
    sharded = t5_variants.write(tmp_path / "sharded", V1_0, shards=3)
    assert not (sharded / "model.safetensors").exists()
    assert_same_params(load(sharded), load(directory))


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


@pytest.mark.parametrize(
    ("config", "own_head", "tied", "scaled"),
    [
        ({}, False, True, True),  # v1.0, silent
        ({"tie_word_embeddings": True}, False, True, True),  # v1.0
        ({"tie_word_embeddings": False}, True, False, False),  # v1.1
        # v1.1 as transformers 5 saves it
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, True, False, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, False, True, True),
        ({"tie_word_embeddings": False, "scale_decoder_outputs": True}, True, False, True),
    ],
)
def test_the_files_decide_on_tying_and_scaling(tmp_path, config, own_head, tied, scaled):
    variant = dataclasses.replace(V1_0, config=config, own_head=own_head)
    found = load(t5_variants.write(tmp_path, variant)).config
    assert (found.tie_word_embeddings, found.scale_decoder_outputs) == (tied, scaled)


def test_a_promised_head_that_is_missing_is_the_embedding(tmp_path):
    """As in transformers."""
    variant = dataclasses.replace(V1_0, config={"tie_word_embeddings": False})
    directory = t5_variants.write(tmp_path, variant)
    with pytest.warns(UserWarning, match=r"no 'lm_head\.weight', so the embedding") as caught:
        found = load(directory).config
    assert [warning.filename for warning in caught] == [__file__]
    assert (found.tie_word_embeddings, found.scale_decoder_outputs) == (True, False)


def test_a_stored_copy_of_the_embedding_is_no_head(directory):
    def add_copies(tensors):
        for name in ("lm_head", "encoder.embed_tokens", "decoder.embed_tokens"):
            tensors[f"{name}.weight"] = tensors["shared.weight"].copy()

    plain = load(directory)
    edit_weights(directory, add_copies)
    assert load(directory).config.tie_word_embeddings
    assert_same_params(load(directory), plain)
    edit_weights(directory, lambda tensors: tensors.pop("shared.weight"))
    assert_same_params(load(directory), plain)


def test_the_unused_bias_of_early_checkpoints_is_ignored(directory):
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    edit_weights(directory, lambda tensors: tensors.update({name: np.ones((8, 2), np.float32)}))
    load(directory)


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


def test_no_second_copy_is_made_of_the_weights(directory, monkeypatch):
    """On a CPU a parameter is the very memory that it was read into."""
    places = []
    monkeypatch.setattr(
        parameters, "read_into", lambda tensor, out: places.append((out.ctypes.data, out.nbytes))
    )
    model = load(directory).model
    arrays = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(model)]
    assert set(arrays) <= {start for start, _ in places}


def test_parameters_are_read_in_threads(directory, monkeypatch):
    """Two are under way at once; an error of one is the error of loading, and ends it."""
    monkeypatch.setattr(devices, "cores", lambda: 2)
    both, read = threading.Barrier(2), parameters.read_into
    count = len(jax.tree.leaves(outline(directory).model))
    begun = []

    def waits(tensor, out):
        begun.append(tensor)
        if len(begun) <= 2:
            both.wait(timeout=30)
        if len(begun) > 2:
            time.sleep(0.01)
            raise ValueError("damaged")
        read(tensor, out)

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


# --- tokenizers --------------------------------------------------------------------------------


def test_the_tokenizer_bounds_the_vocabulary(directory):
    make_tokenizer(model_max_length=64).save_pretrained(directory)
    found = load(directory)
    assert found.model.vocab_size == len(WORDS) == 29
    assert found.config.vocab_size == 40
    assert found.max_source_len == 64
    assert found.tokenizer("cab")["input_ids"] == [5, 3, 4, 1]


def test_without_a_tokenizer_every_id_is_real(directory):
    found = load(directory)
    assert found.tokenizer is None
    assert found.model.vocab_size == 40
    assert found.max_source_len == 512
    edit_json(directory / "config.json", n_positions=1024)
    assert load(directory).max_source_len == 1024


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(directory):
    make_tokenizer([*WORDS, *"ABCDEFGHIJKLMNOP"]).save_pretrained(directory)
    with pytest.raises(ValueError, match="tokenizer has 45 ids and the model only 40"):
        load(directory)


def test_a_damaged_tokenizer_is_named(directory):
    make_tokenizer().save_pretrained(directory)
    (directory / "tokenizer.json").write_text('{"version": "1.0", ')
    with pytest.raises(ValueError, match=r"tokenizer in .* cannot be read .*download it again"):
        load(directory)


def test_a_tokenizer_without_its_json_says_what_to_do(directory):
    make_tokenizer().save_pretrained(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer\.json.*pip install sentencepiece"):
        load(directory)


# --- errors of a checkpoint --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["./no/such/place", "/no/such/place", "a/b/c", ""])
def test_no_such_directory(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "":  # the working directory, which has no config.json
        with pytest.raises(FileNotFoundError, match=r"no config\.json"):
            load(name)
        return
    with pytest.raises(FileNotFoundError, match="No such directory: "):
        load(name)


def test_a_name_that_no_file_can_have():
    for read in (load, checkpoints.described):
        with pytest.raises(FileNotFoundError, match=r"^'x*… cannot be read: File name too long"):
            read("x" * 5000)


def test_no_such_hub_name(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"'google-t5/t5-smal' is neither .*hf download"):
        load("google-t5/t5-smal")


def test_a_file_is_not_a_directory(directory):
    with pytest.raises(ValueError, match=r"config\.json is a file; give the directory"):
        load(directory / "config.json")


def test_missing_config(directory):
    (directory / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load(directory)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", '{"model_type": "t5"', "[1, 2]", "\x00"])
def test_damaged_json(directory, file, text):
    (directory / file).write_text(text)
    with pytest.raises(ValueError, match=file):
        load(directory)


def test_a_repository_of_gguf(monkeypatch):
    files = ["README.md", "x-q4_0.gguf", "x-q8_0.gguf"]
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name: files)
    with pytest.raises(FileNotFoundError, match=r"hf download a/x-GGUF x-q4_0\.gguf`, and give"):
        load("a/x-GGUF")


def test_no_weights(directory):
    (directory / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor .* Copy"):
        load(directory)
    (directory / "x.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"Give the file .*x\.gguf itself\.$"):
        load(directory)


@pytest.mark.parametrize(
    "change", [{"shape": [40, 15]}, {"dtype": "F99"}, {"data_offsets": [0]}, {"shape": [-1]}]
)
def test_damaged_entry(directory, change):
    file = directory / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["shared.weight"] |= change
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ValueError, match=DAMAGED):
        load(directory)


def test_weights_are_floats(tmp_path):
    """Bytes are read past where a file has them as masks, and nowhere else."""
    directory = t5_variants.write(tmp_path, V1_0, dtype=np.uint8)
    with pytest.raises(ValueError, match="is stored as uint8; weights should be floats"):
        load(directory)


@pytest.mark.parametrize(("dtype", "name"), [(np.int8, "I8"), (ml_dtypes.float8_e4m3fn, "F8_E4M3")])
def test_unsupported_dtype(tmp_path, dtype, name):
    directory = t5_variants.write(tmp_path, V1_0, dtype=dtype)
    with pytest.raises(ValueError, match=f"is stored as {name}; supported are F64, F32"):
        load(directory)


@pytest.mark.parametrize("name", [5, None])
def test_a_name_is_a_text_or_a_path(name):
    with pytest.raises(ValueError, match=f"{name} must be a directory or a hub name, as text"):
        load(name)


def test_a_type_that_no_layer_needs_is_left_out(directory):
    """With the warning of all surplus tensors."""
    add = {"counter": np.zeros(3, np.int32), "narrow": np.zeros(2, ml_dtypes.float8_e4m3fn)}
    edit_weights(directory, lambda tensors: tensors.update(add))
    with pytest.warns(UserWarning, match="'counter', 'narrow' in the weights belong to no layer"):
        load(directory)


def test_missing_tensors(directory):
    def remove(tensors):
        for name in [name for name in tensors if "decoder" in name]:
            del tensors[name]

    edit_weights(directory, remove)
    with pytest.raises(ValueError, match=r"layers beyond the 0 of decoder\.block\.\* are missing"):
        load(directory)


def test_surplus_tensors(directory):
    extra = {"encoder.block.2.layer.0.layer_norm.weight": np.ones(16, np.float32)}
    edit_weights(directory, lambda tensors: tensors.update(extra))
    with pytest.warns(UserWarning, match=r"'encoder\.block\.2\.\S+ in the weights belong to no"):
        load(directory)


def test_wrong_shape(directory):
    edit_json(directory / "config.json", vocab_size=48)
    with pytest.raises(ValueError, match=r"'shared\.weight' has shape \(40, 16\).* \(48, 16\)"):
        load(directory)


def test_two_embeddings(directory):
    other = {"decoder.embed_tokens.weight": np.ones((40, 16), np.float32)}
    edit_weights(directory, lambda tensors: tensors.update(other))
    with pytest.raises(ValueError, match=r"decoder\.embed_tokens\.weight' differs from 'shared"):
        load(directory)


def test_missing_shard(tmp_path):
    directory = t5_variants.write(tmp_path, V1_0, shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00003\.safetensors is missing"):
        load(directory)


def test_shards_of_different_checkpoints(tmp_path):
    directory = t5_variants.write(tmp_path, V1_0, shards=2)
    save_file({"x": np.ones(1)}, directory / "model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"missing from the weights"):
        load(directory)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": {'])
def test_damaged_index(tmp_path, index):
    directory = t5_variants.write(tmp_path, V1_0, shards=2)
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        load(directory)


# --- configs -----------------------------------------------------------------------------------

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


@pytest.mark.parametrize("kind", checkpoints.FAMILIES)
def test_defaults_are_those_of_transformers(kind):
    """Also what follows from others: windows, rotations, and sizes that are null."""
    theirs, family = transformers.AutoConfig.for_model(kind), checkpoints.FAMILIES[kind]
    for field, default in family.defaults.items():
        assert default is None or default == getattr(theirs, field), field
    ours = family.config_from_hub({"model_type": kind, "eos_token_id": 2}, {})
    if kind.startswith("t5gemma"):
        encoder = theirs.encoder.text_config if kind == "t5gemma2" else theirs.encoder
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
        check_decoder(ours, theirs.decoder)
        check_decoder(ours.encoder, encoder)
        assert getattr(ours, "eoi_token_index", EOI) == EOI
    elif kind == "gpt2":
        assert (ours.n_inner, ours.pad_token_id, ours.start_id) == (4 * 768, 50256, 50256)
    elif "d_kv" in family.defaults:
        assert ours.num_decoder_layers == ours.num_layers
        assert (ours.start_id, ours.pad_token_id, ours.scale_decoder_outputs) == (
            0,
            0,
            kind != "mt5",
        )
    else:
        check_decoder(ours, theirs)


EOI = transformers.AutoConfig.for_model("t5gemma2").encoder.eoi_token_index


def check_decoder(ours, theirs):
    """Compare the config of a stack in the Llama layout with transformers' own."""
    gemma = hasattr(theirs, "query_pre_attn_scalar")
    more = ("bos_token_id", "pad_token_id", "query_pre_attn_scalar", *CAPS) if gemma else ()
    for field in (*SIZES, *more):
        expected = getattr(theirs, field) or (0.0 if field in CAPS else getattr(theirs, field))
        assert getattr(ours, field) == expected, field
    assert ours.head_dim == getattr(theirs, "head_dim", 4096 // 32)
    assert ours.sliding_window == (getattr(theirs, "sliding_window", 0) or 0)
    ropes = theirs.rope_parameters
    whole = ropes.get("full_attention", ropes)
    assert (ours.rope.kind, ours.rope.theta) == ("default", whole["rope_theta"])
    if gemma:
        local = ["sliding_attention" if window else "full_attention" for window in ours.windows]
        assert local == theirs.layer_types
    if "sliding_attention" in ropes:
        assert ours.local_rope.theta == ropes["sliding_attention"]["rope_theta"]


NESTED = {"full_attention": {"rope_theta": 2.0}}
NO_WINDOW = "'sliding_attention', but there is no window"
MORE_LAYERS = {"num_hidden_layers": 9}
REFUSED = {  # changes of config.json, and the message, by module and variant
    (t5_variants, "v1_0"): [
        ({"model_type": "bert"}, "model_type='bert' is not supported.*'t5'"),
        ({"model_type": None}, "model_type=None is not supported.*'t5'"),
        ({"d_model": 0}, "d_model=0 should be an integer ≥ 1"),
        ({"layer_norm_epsilon": 1e18}, r"layer_norm_epsilon=1e\+18 should be a number in \[0, 1\)"),
        ({"num_heads": "two"}, "num_heads='two' should be an integer ≥ 1"),
        ({"d_kv": 8.0}, "d_kv=8.0 should be an integer ≥ 1"),
        ({"vocab_size": -1}, "vocab_size=-1 should be an integer ≥ 1"),
        ({"d_model": 2**63}, f"d_model={2**63} should be at most {2**31 - 1}"),
        ({"relative_attention_max_distance": 4}, "max_distance=4 should be above half"),
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj='gated-tanh'"),
        ({"dense_act_fn": "silu"}, "dense_act_fn='silu' is not supported; .* dense_act_fn='relu'"),
        ({"is_gated_act": True}, "is_gated_act=True is not supported"),
        ({"hidden_size": 32}, "hidden_size=32 is not supported; .* hidden_size=16"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder=False is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        *(({"eos_token_id": value}, "eos_token_id=") for value in ("</s>", [1, "x"], -2, True)),
    ],
    (gpt_variants, "tied"): [
        ({"scale_attn_weights": False}, "scale_attn_weights=False is not supported.*=True"),
        ({"scale_attn_by_inverse_layer_idx": True}, "=True is not supported.*=False"),
        ({"add_cross_attention": True}, "add_cross_attention=True is not supported.*=False"),
        ({"activation_function": "silu"}, "activation_function='silu' is not supported"),
        ({"n_head": 0}, "n_head=0 should be an integer ≥ 1"),
        ({"n_inner": "64"}, "n_inner='64' should be an integer ≥ 1"),
        ({"bos_token_id": 40}, "bos_token_id=40 is no id of a vocabulary of 40"),
        ({"pad_token_id": -2}, "pad_token_id=-2 should be an integer ≥ 0"),
    ],
    (llama_variants, "llama3"): [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; .* hidden_act='silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type='longrope' is not .*llama3, yarn"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None should be a number > 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor='2' should be"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor=None should"),
        ({"rope_theta": -1}, "rope_theta=-1 should be a number > 0"),
        ({"rope_scaling": NESTED}, "full_attention.* are not one set of settings"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' are not one set"),
        ({"hidden_size": None}, "hidden_size=None should be an integer ≥ 1"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads='2' should be an integer ≥ 1"),
        ({"num_key_value_heads": 3}, "heads=4 is not divisible by num_key_value_heads=3"),
        ({"head_dim": 3}, "head_dim=3 is odd"),
        ({"hidden_size": 1, "head_dim": None}, "head_dim=0 is odd or 0"),
        ({"rope_scaling": {"type": "yarn"}, "rope_theta": 1.0}, "rope_theta=1 above 1"),
        ({"rope_scaling": {"type": "yarn", "beta_slow": 1e-320}}, "beta_slow=1e-320 should be"),
        ({"bos_token_id": [1, 2]}, r"bos_token_id=\[1, 2\] should be an integer ≥ 0"),
        ({"pad_token_id": -2}, "pad_token_id=-2 should be an integer ≥ 0"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window=0 should be an integer"),
        ({"model_type": "qwen3_moe"}, "'qwen3_moe' is not supported.*'llama', 'mistral', 'qwen2'"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types=.* each of 2"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, NO_WINDOW),
    ],
    (gemma_variants, "gemma2"): [
        ({"hidden_activation": "relu"}, "hidden_activation='relu' is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not"),
        ({"final_logit_softcapping": 0}, "softcapping=0 should be a number > 0, or null"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 should be an integer"),
        ({"head_dim": None}, "head_dim=None should be an integer ≥ 1"),
        ({"sliding_window": None}, NO_WINDOW),
    ],
    (gemma_variants, "gemma3"): [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"rope_parameters": {"rope_theta": 2.0}}, "'full_attention' and 'sliding_att"),
        ({"layer_types": ["full_attention"]}, "for each of 3 layers"),
    ],
    (t5gemma_variants, "t5gemma"): [
        ({"decoder": {"hidden_activation": "relu"}}, "decoder: hidden_activation='relu'"),
        ({"encoder": {"head_dim": "x"}}, "encoder: head_dim='x' should be an integer"),
        ({"encoder": {"vocab_size": 41}}, "vocab_size=41 differs from the decoder's 40"),
        ({"decoder": {"cross_attention_hidden_size": 16}}, "decoder: cross_attention_hidden_size"),
        ({"decoder": MORE_LAYERS}, "num_hidden_layers=9, but layers beyond"),
        ({"encoder": MORE_LAYERS}, "num_hidden_layers=9, but layers beyond"),
        ({"encoder": 5}, "encoder=5 should be an object"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder=False is not"),
    ],
    (t5gemma_variants, "t5gemma2"): [
        ({"decoder": {"hidden_size": 32}}, "hidden_size=16 differs from the decoder's"),
        ({"decoder": {"attn_logit_softcapping": 9.0}}, "decoder: attn_logit_softcapping=9.0 is"),
        ({"encoder": {"text_config": [1]}}, r"text_config=\[1\] should be an object"),
        ({"encoder": {"eoi_token_index": "x"}}, "eoi_token_index='x' should be an int"),
    ],
}


@pytest.mark.parametrize(
    ("module", "name", "changes", "message"),
    [(*place, *case) for place, cases in REFUSED.items() for case in cases],
)
def test_configs_that_are_refused(module, name, changes, message, tmp_path, monkeypatch):
    monkeypatch.setattr(parameters, "without_params", None)  # would be called to build
    variant = module.VARIANTS[name]
    made = module.write(tmp_path, variant)
    stacks = {
        key: {**variant.raw[key], **value}
        for key, value in changes.items()
        if key in ("encoder", "decoder") and isinstance(value, dict)
    }
    edit_json(made / "config.json", **changes | stacks)
    with pytest.raises(ValueError, match=message):
        load(made)


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


# --- settings that specjax does not follow -----------------------------------------------------


def test_unfollowed_settings_are_named_in_one_warning(directory):
    edit_json(
        directory / "generation_config.json",
        num_beams=4,
        length_penalty=2.0,
        no_repeat_ngram_size=3,
        repetition_penalty=1.2,
        min_length=0,
        bad_words_ids=None,
        forced_eos_token_id=1,
    )
    task = {"prefix": "summarize: ", "num_beams": 2, "min_length": 30, "max_length": 200}
    edit_json(directory / "config.json", task_specific_params={"summarization": task})
    with pytest.warns(UserWarning, match="specjax does not follow") as caught:
        load(directory)
    (warning,) = caught
    text = str(warning.message)
    assert warning.filename == __file__
    for setting in (
        "num_beams=4",
        "length_penalty=2.0",
        "no_repeat_ngram_size=3",
        "repetition_penalty=1.2",
        "forced_eos_token_id=1",
        "for the task 'summarization' num_beams=2, min_length=30",
    ):
        assert setting in text
    assert "bad_words" not in text
    assert "prefix" not in text
    assert "max_length" not in text


def test_settings_that_change_nothing_are_not_named(directory):
    edit_json(
        directory / "generation_config.json",
        num_beams=1,
        length_penalty=2.0,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        max_length=20,
        transformers_version="5.23.0",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(directory)


# --- saving ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (module, name)
        for module in dict.fromkeys(ROWS[row].variants for row in ROWS)
        for name in variants_of(module)
    ],
)
def test_what_is_saved_is_loaded(module, name, tmp_path):
    """Nothing of the config or the weights is lost. Bare names are saved as full ones, without the
    masks."""
    variant = variants_of(module)[name]
    first = load(module.write(tmp_path / "a", variant))
    save(tmp_path / "b", first)
    again = load(tmp_path / "b")
    assert again.config == first.config
    assert type(again.config) is type(first.config)
    assert again.eos_ids == first.eos_ids
    assert_same_params(again, first)
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


def test_saving_leaves_the_model_as_it_was(directory):
    checkpoint = load(directory)
    shapes = jax.tree.map(jnp.shape, checkpoint.model)
    save(directory.with_name("b"), checkpoint)
    checkpoint.model.module().embedding.set_value(jnp.zeros(()))  # its variables are its own
    assert jax.tree.map(jnp.shape, checkpoint.model) == shapes


def test_saving_again_replaces_a_model_and_no_other_file(directory):
    checkpoint = load(directory)
    doubled = jax.tree.map(lambda x: 2 * x, checkpoint.model)
    save(directory, dataclasses.replace(checkpoint, model=doubled))
    assert_same_params(load(directory), dataclasses.replace(checkpoint, model=doubled))
    (directory / "README.md").write_text("a card")
    with pytest.raises(ValueError, match=r"holds README\.md, which would not be replaced but lost"):
        save(directory, checkpoint)
    assert (directory / "README.md").read_text() == "a card"


# --- GPT-2 -------------------------------------------------------------------------------------

TIED, UNTIED = gpt_variants.VARIANTS["tied"], gpt_variants.VARIANTS["untied"]


@pytest.fixture
def gpt_directory(tmp_path):
    """A complete checkpoint with a tied head."""
    return gpt_variants.write(tmp_path / "gpt", TIED)


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_gpt_projections_lie_in_the_files_as_input_first(tmp_path, backend, monkeypatch):
    monkeypatch.setattr(devices, "find", lambda device: Elsewhere(backend))
    module = load(gpt_variants.write(tmp_path, UNTIED)).model.module()
    stored = gpt_variants.tensors(UNTIED)["transformer.h.1.mlp.c_fc.weight"]
    weight = module.layers[1].feed_forward.input.weight[...]
    assert module.input_first == (backend == "cpu")
    np.testing.assert_array_equal(weight, stored if backend == "cpu" else stored.T)


def test_a_gpt_reads_no_more_than_its_positions(gpt_directory):
    make_tokenizer(model_max_length=64).save_pretrained(gpt_directory)
    assert load(gpt_directory).max_source_len == 16


def test_the_files_decide_whether_a_gpt_is_tied(gpt_directory):
    def add_head(tensors, factor):
        tensors["lm_head.weight"] = factor * tensors["transformer.wte.weight"]

    plain = load(gpt_directory)
    edit_weights(gpt_directory, lambda tensors: add_head(tensors, np.float32(1)))
    assert_same_params(load(gpt_directory), plain)  # a copy
    edit_json(gpt_directory / "config.json", tie_word_embeddings=False)
    assert not load(gpt_directory).config.tie_word_embeddings
    edit_json(gpt_directory / "config.json", tie_word_embeddings=True)
    edit_weights(gpt_directory, lambda tensors: add_head(tensors, np.float32(2)))
    assert not load(gpt_directory).config.tie_word_embeddings


def test_a_promised_head_that_a_gpt_lacks(gpt_directory):
    edit_json(gpt_directory / "config.json", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"'lm_head\.weight' missing from the weights"):
        load(gpt_directory)


def test_a_gpt_projection_that_lies_the_other_way(gpt_directory):
    name = "transformer.h.1.mlp.c_fc.weight"
    edit_weights(gpt_directory, lambda t: t.update({name: t[name].T.copy()}))
    with pytest.raises(ValueError, match=r"c_fc\.weight' has shape \(64, 16\).* for \(16, 64\)"):
        load(gpt_directory)


# --- Llama, Mistral, Qwen ----------------------------------------------------------------------


@pytest.fixture
def llama_directory(tmp_path):
    """A complete checkpoint with groups of heads and scaled rotations."""
    return llama_variants.write(tmp_path / "llama", llama_variants.VARIANTS["llama3"])


@pytest.mark.parametrize("name", ["llama3", "linear", "yarn"])
def test_both_spellings_of_scalings(llama_directory, name):
    """As transformers wrote them before version 5, and as it does since; the older one wins."""
    scaling = {
        "llama3": llama_variants.LLAMA3,
        "linear": {"rope_type": "linear", "factor": 3.0},
        "yarn": {**llama_variants.YARN, "mscale": 1.0},
    }[name]
    scaling = {key: value for key, value in scaling.items() if key != "rope_theta"}
    file = llama_directory / "config.json"
    edit_json(file, rope_theta=500.0, rope_scaling=scaling)
    old = load(llama_directory).config
    assert (old.rope.kind, old.rope.theta) == (name, 500.0)
    parameters = {**scaling, "rope_theta": 500.0}
    edit_json(file, rope_theta=None, rope_scaling=None, rope_parameters=parameters)
    assert load(llama_directory).config == old
    edit_json(file, rope_theta=500.0, rope_scaling=scaling, rope_parameters={"rope_theta": 2.0})
    assert load(llama_directory).config == old
    edit_json(file, rope_theta=7.0, rope_scaling=None, rope_parameters=None)
    assert load(llama_directory).config.rope == Rope("default", 7.0)


def test_ids_of_a_llama(llama_directory):
    file = llama_directory / "config.json"
    edit_json(file, eos_token_id=[7, 5], pad_token_id=None)
    found = load(llama_directory)
    assert (found.start_id, found.pad_id, found.eos_ids) == (1, 1, (5, 7))
    edit_json(file, bos_token_id=None)
    found = load(llama_directory)
    assert (found.start_id, found.pad_id, found.eos_ids) == (7, 7, (5, 7))
    edit_json(file, eos_token_id=None)
    with pytest.raises(ValueError, match="neither bos_token_id nor eos_token_id"):
        load(llama_directory)


def test_windows_of_a_qwen_follow_its_flag(tmp_path):
    """A window that is not used, as most of them say, is none."""
    variant = llama_variants.VARIANTS["qwen2_windows"]
    directory = llama_variants.write(tmp_path, variant)
    assert load(directory).config.windows == (0, 4, 4)
    edit_json(directory / "config.json", use_sliding_window=False)
    assert load(directory).config.windows == (0, 0, 0)
    edit_json(directory / "config.json", use_sliding_window=True, max_window_layers=3)
    assert load(directory).config.sliding_window == 0


def test_the_files_decide_whether_a_llama_is_tied(llama_directory):
    file = llama_directory / "config.json"
    edit_json(file, tie_word_embeddings=True)
    assert not load(llama_directory).config.tie_word_embeddings
    name, embedding = "lm_head.weight", "model.embed_tokens.weight"
    edit_weights(llama_directory, lambda t: t.update({name: t[embedding].copy()}))
    assert load(llama_directory).config.tie_word_embeddings
    edit_json(file, tie_word_embeddings=None)
    assert not load(llama_directory).config.tie_word_embeddings
    edit_weights(llama_directory, lambda t: t.pop(name))
    with pytest.raises(ValueError, match=r"'lm_head\.weight' missing from the weights"):
        load(llama_directory)


def test_a_padded_vocabulary_of_a_llama(llama_directory):
    make_tokenizer().save_pretrained(llama_directory)
    found = load(llama_directory)
    assert (found.model.vocab_size, found.config.vocab_size) == (29, 40)
    assert found.max_source_len == found.config.max_positions == 64


# --- Gemma 2 and 3 -----------------------------------------------------------------------------


@pytest.mark.parametrize("old", [True, False])
def test_the_text_model_of_a_gemma3_that_reads_images(old, tmp_path):
    """Names as transformers wrote them before version 5, and since; the ids are the outer ones."""
    variant = gemma_variants.VARIANTS["gemma3"]
    plain = load(gemma_variants.write(tmp_path / "plain", variant))
    made = gemma_variants.write(tmp_path / "both", variant)
    whole = {"model_type": "gemma3", "text_config": variant.raw, "eos_token_id": [2, 5]}
    (made / "config.json").write_text(json.dumps(whole))

    def renamed(tensors):
        found = {
            f"language_model.{name}" if old else name.replace("model.", "model.language_model."): x
            for name, x in tensors.items()
        }
        vision = "vision_tower.post_layernorm.weight"
        found[vision if old else f"model.{vision}"] = np.zeros(2, np.float32)
        tensors.clear()
        tensors.update(found)

    edit_weights(made, renamed)
    found = load(made)
    assert (found.config, found.eos_ids) == (plain.config, (2, 5))
    assert_same_params(found, plain)


# --- T5Gemma -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t5gemma", "t5gemma2"])
def test_other_names_of_a_t5gemmas_tensors(name, tmp_path):
    """Tied copies, a model without its head, names of before transformers 5, a vision model."""
    variant = t5gemma_variants.VARIANTS[name]
    plain = load(t5gemma_variants.write(tmp_path / "plain", variant))
    made = t5gemma_variants.write(tmp_path / "made", variant)

    def renamed(tensors):
        found = {n.removeprefix("model.").replace("text_model.", ""): x for n, x in tensors.items()}
        if name == "t5gemma2":
            found |= {n.replace("enc", "dec"): x for n, x in found.items() if "encoder.embed" in n}
            found["encoder.vision_tower.post_layernorm.weight"] = np.zeros(2, np.float32)
        found["lm_head.out_proj.weight"] = found["decoder.embed_tokens.weight"]
        tensors.clear()
        tensors.update(found)

    edit_weights(made, renamed)
    found = load(made)
    assert found.config == plain.config
    assert_same_params(found, plain)


def test_a_t5gemmas_ids_are_the_outer_ones_or_its_decoders(tmp_path):
    variant = t5gemma_variants.VARIANTS["t5gemma"]
    made = t5gemma_variants.write(tmp_path, variant)
    found = load(made)
    assert (found.start_id, found.eos_ids, found.pad_id) == (3, (1,), 0)
    edit_json(made / "config.json", eos_token_id=[1, 5], bos_token_id=4)
    edit_json(made / "generation_config.json", decoder_start_token_id=6)
    found = load(made)
    assert (found.start_id, found.eos_ids, found.pad_id) == (6, (1, 5), 0)


# --- what the model needs decides --------------------------------------------------------------


@pytest.mark.parametrize("module", [t5_variants, gpt_variants, llama_variants])
def test_a_tied_matrix_under_the_name_of_the_head(module, tmp_path):
    name = {t5_variants: "v1_0", gpt_variants: "tied", llama_variants: "qwen2"}[module]
    made = module.write(tmp_path, module.VARIANTS[name])
    edit_json(made / "config.json", tie_word_embeddings=True)
    edit_weights(made, lambda t: t.pop("lm_head.weight", None))
    plain = load(made)
    (embedding,) = {"shared.weight", "transformer.wte.weight", "model.embed_tokens.weight"} & set(
        load_file(made / "model.safetensors")
    )
    edit_weights(made, lambda t: t.update({"lm_head.weight": t.pop(embedding)}))
    found = load(made)
    assert found.config == plain.config
    assert_same_params(found, plain)


def test_an_index_that_lists_too_much_or_too_little(tmp_path, directory):
    """It decides only which of several shards a tensor is read from."""
    made = t5_variants.write(tmp_path / "sharded", V1_0, shards=2)
    index, shard = made / "model.safetensors.index.json", made / "model-00001-of-00002.safetensors"
    listed = json.loads(index.read_text())["weight_map"]
    other = next(name for name, place in listed.items() if place != shard.name)
    held = load_file(shard)
    save_file({**held, "surplus": np.ones(1), other: np.zeros(3, np.float16)}, shard)
    unlisted = next(iter(held))
    changed = {**listed, "lm_head.weight": shard.name}
    del changed[unlisted]
    index.write_text(json.dumps({"weight_map": changed}))
    with pytest.warns(UserWarning, match=r"'surplus' in the weights belong to no layer"):
        assert_same_params(load(made), load(directory))


def test_an_id_of_minus_one_is_none(gpt_directory):
    edit_json(gpt_directory / "config.json", eos_token_id=2, pad_token_id=-1)
    edit_json(gpt_directory / "generation_config.json", eos_token_id=-1)
    found = load(gpt_directory)
    assert (found.eos_ids, found.pad_id) == ((), found.start_id)
    edit_json(gpt_directory / "generation_config.json", eos_token_id=[-1, 3])
    assert load(gpt_directory).eos_ids == (3,)


def test_an_eos_beyond_the_vocabulary_is_said(directory):
    edit_json(directory / "generation_config.json", eos_token_id=[1, 40])
    with pytest.warns(
        UserWarning, match="eos_token_id=40 is no id of a vocabulary of 40"
    ) as caught:
        assert load(directory).eos_ids == (1, 40)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("ids", [2**31, [1, 2**40], 10**60])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_ids_that_int32_does_not_hold(ids, file, directory):
    edit_json(directory / file, eos_token_id=ids)
    with pytest.raises(ValueError, match=rf"{file}: eos_token_id=.* should be an id below 2³¹"):
        load(directory)


@pytest.mark.parametrize("count", [3, 900, 10**9, 2**63])
@pytest.mark.parametrize("field", ["num_layers", "num_decoder_layers"])
def test_layers_are_counted_before_any_is_built(field, count, directory, monkeypatch):
    monkeypatch.setattr(parameters, "without_params", None)  # would be called to build
    edit_json(directory / "config.json", **{field: count})
    with pytest.raises(
        ValueError, match=rf"{field}={count}.*(beyond the 2|at most 1000|below 2³¹)"
    ):
        load(directory)


@pytest.mark.parametrize("dtype", ["float64", "float7", "int8", 5])
def test_dtypes_that_are_refused(dtype, directory, tmp_path):
    message = rf"dtype={dtype!r} must be one of float32, bfloat16, float16"
    with pytest.raises(ValueError, match=message):
        load(directory, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        save(tmp_path / "new", load(directory), dtype=dtype)
    with pytest.raises(ValueError, match=message):
        checkpoints.convert(directory, tmp_path / "new", dtype=dtype)


@pytest.mark.parametrize("argument", ["device", "mesh"])
def test_arguments_of_another_kind(argument, directory):
    with pytest.raises(ValueError, match=f"{argument}=5 must be a jax"):
        load(directory, **{argument: 5})


def test_a_checkpoint_shows_itself_in_one_line(directory):
    shown = repr(load(directory))
    assert "parameters, float32, 40 ids" in shown
    assert len(shown) < 200 + len(str(directory))
    assert "\n" not in shown
