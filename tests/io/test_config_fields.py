"""config.json with a value of a wrong kind in any field: read as if it were right, or refused by a
ValueError that names the file and the field. Nothing else, and nothing later."""

import json
import sys
import warnings

import numpy as np
import pytest
from safetensors.numpy import save_file

import gemma_variants
import gpt_variants
import llama_variants
import pairs
import t5_variants
import t5gemma_variants
from specjax import checkpoints, doctor
from specjax.checkpoints import parameters, t5, t5gemma
from specjax.checkpoints.config_json import FIELDS
from specjax.checkpoints.weights import SAFETENSORS
from specjax.tuning.members import smaller_members
from tiny_models import quick, slow

LAYOUTS = {
    "t5": (t5_variants, "v1_1"),
    "mt5": (t5_variants, "mt5"),
    "umt5": (t5_variants, "umt5_tied"),
    "gpt2": (gpt_variants, "tied"),
    "llama": (llama_variants, "llama3"),
    "mistral": (llama_variants, "mistral"),
    "qwen2": (llama_variants, "qwen2_windows"),
    "qwen3": (llama_variants, "qwen3_windows"),
    "gemma2": (gemma_variants, "gemma2_untied"),
    "gemma3_text": (gemma_variants, "gemma3"),
    "t5gemma": (t5gemma_variants, "t5gemma_untied"),
    "t5gemma2": (t5gemma_variants, "t5gemma2"),
}
VALUES = (None, [], {}, "x", 1.5, -1, True, [None], {"a": None}, [[]], float("nan"))
OF_SCALINGS = (
    "rope_scaling", "rope_parameters", "rope_theta", "original_max_position_embeddings",
    "sliding_window",
)  # fmt: skip
FREE = ("architectures",)  # read by nobody


def layout(name, directory):
    """The directory and config.json of a tiny model that loads."""
    module, variant = LAYOUTS[name]
    made = module.VARIANTS.get(variant) or t5_variants.OTHERS[variant]
    module.write(directory, made)
    return directory / "config.json", made.raw


def built(family):
    """The fields of which one value is implemented."""
    return sys.modules[family.config_from_hub.__module__].BUILT


def outline(directory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoints.outline(directory).config


def outcome(path, raw, said):
    """The config, or None where it is refused as it should be."""
    path.write_text(json.dumps(raw))
    try:
        return outline(path.parent)
    except ValueError as found:
        message = str(found)
    assert all(word in message for word in said), f"{said} of {raw}: {message}"
    return None


@pytest.fixture
def any_tensors(monkeypatch):
    """Tensors fit every config, and a module is built once for each: most values change none."""
    monkeypatch.setattr(parameters, "check_tensors", lambda *_: None)
    monkeypatch.setattr(parameters, "needed", lambda names, tensors: tensors)
    build, built = parameters.without_params, {}

    def without_params(family, config, *how):
        if repr(config) not in built:
            built[repr(config)] = build(family, config, *how)
        return built[repr(config)]

    monkeypatch.setattr(parameters, "without_params", without_params)


@pytest.mark.parametrize("name", quick(LAYOUTS, "t5", "gpt2", "llama", "qwen3", "gemma3_text"))
def test_every_field_of_every_kind(name, tmp_path, any_tensors):
    path, raw = layout(name, tmp_path)
    whole = outline(tmp_path)
    family = checkpoints.FAMILIES[name]
    fields = {*raw, *FIELDS, *family.defaults, *built(family), "task_specific_params"}
    if "d_kv" in family.defaults:
        fields |= {*t5.ALIASES, "is_gated_act", "dense_act_fn"}
    if "head_dim" in family.defaults:
        fields |= {*OF_SCALINGS}
    refused = 0
    for field in sorted(fields - set(FREE)):
        for value in VALUES:
            found = outcome(path, {**raw, field: value}, [str(path), field])
            refused += found is None
            for key, right in vars(whole).items() if found else ():
                kinds = (int, float) if isinstance(right, float) else (type(right),)
                assert type(getattr(found, key)) in kinds, (field, value, key)
    assert refused > 5 * len(raw)


@pytest.mark.parametrize("name", ["t5gemma", slow("t5gemma2")])
def test_every_field_of_a_stack(name, tmp_path, any_tensors):
    """Those of a T5Gemma's encoder and decoder."""
    path, raw = layout(name, tmp_path)
    inner = checkpoints.FAMILIES[t5gemma.LAYERS[name]]
    fields = {*FIELDS, *inner.defaults, *built(inner), *OF_SCALINGS}
    refused = 0
    for place in ("encoder", "decoder"):
        inner = raw[place].get("text_config", raw[place])
        for field in sorted(fields - {"text_config", "encoder", "decoder"}):
            for value in VALUES:
                changed = {**inner, field: value}
                if "text_config" in raw[place]:
                    changed = {**raw[place], "text_config": changed}
                refused += outcome(path, {**raw, place: changed}, [str(path), field]) is None
    assert refused > 200


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_every_field_of_scalings(name, tmp_path, any_tensors):
    module, variant = llama_variants, llama_variants.VARIANTS[name]
    path = module.write(tmp_path, variant) / "config.json"
    place = "rope_scaling" if name == "llama3" else "rope_parameters"
    scaling = {**variant.raw[place], "mscale": 2.0, "mscale_all_dim": 0.5, "attention_factor": 1.0}
    for field in scaling:
        for value in VALUES:
            raw = variant.raw | {place: {**scaling, field: value}}
            found = outcome(path, raw, [str(path), field])
            assert found is None or all(
                type(x) in (float, int, str, bool) for x in vars(found.rope).values()
            )


@pytest.mark.parametrize("field", ["eos_token_id", "pad_token_id", "num_beams"])
def test_fields_of_generation_config(field, tmp_path):
    """They are blamed on the file that they stand in."""
    layout("t5", tmp_path)
    path = tmp_path / "generation_config.json"
    for value in ("x", {}, {"a": None}, -2, 1.5):
        path.write_text(json.dumps({field: value}))
        with pytest.raises(ValueError, match=rf"generation_config\.json: {field}="):
            outline(tmp_path)


@pytest.mark.parametrize("settings", [{"num_beams": "four"}, ["num_beams"], "x", None])
def test_settings_for_tasks(settings, tmp_path):
    path, raw = layout("t5", tmp_path)
    path.write_text(json.dumps({**raw, "task_specific_params": {"summarization": settings}}))
    with pytest.raises(ValueError, match=r"config\.json.*task_specific_params"):
        outline(tmp_path)


INDEX = SAFETENSORS.index
WRONG = {
    "weight_map": (INDEX, {"weight_map": {"a": None}}, "puts 'a' into None"),
    "list in weight_map": (SAFETENSORS.index, {"weight_map": {"a": ["b"]}},
        r"puts 'a' into \['b'\]"),
    "list of names": (INDEX, {"weight_map": ["a"]}, "has no 'weight_map'"),
    "list": (INDEX, ["a"], "should hold a JSON object"),
    "null": (INDEX, {"a": None}, "has no 'weight_map'"),
    "config of null": ("config.json", {"a": None}, "model_type=None is not supported"),
    "config of lists": ("config.json", {"model_type": ["t5"]}, r"model_type=\['t5'\] is not"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_files_of_the_wrong_shape(case, tmp_path):
    """As `load` says it, the doctor does; `select` passes over the directory."""
    file, value, message = WRONG[case]
    target, other = tmp_path / "target", tmp_path / "other"
    t5_variants.write(target, t5_variants.VARIANTS["v1_1"], shards=2)
    t5_variants.write(other, t5_variants.VARIANTS["v1_1"])
    (target / file).write_text(json.dumps(value))
    with pytest.raises(ValueError, match=rf"{file}.*{message}"):
        checkpoints.load(target)
    plan = doctor.Plan(str(target), str(target))
    (found,) = doctor.examine(plan, doctor.CHECKS[:1])
    assert (found.name, found.verdict) == ("target files", "fail")
    assert file in found.seen
    with pytest.raises(ValueError, match="No smaller model is known"):
        smaller_members(str(other))


@pytest.mark.parametrize("header", [b"[]", b'{"a": null}', b'{"a": []}', b'{"__metadata__": 1}'])
def test_headers_of_the_wrong_shape(header, tmp_path):
    path, _ = layout("t5", tmp_path)
    file = path.with_name(SAFETENSORS.single)
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=SAFETENSORS.single):
        checkpoints.load(tmp_path)
    save_file({"a": np.zeros(1, np.float32)}, file)
    with pytest.raises(ValueError, match=r"config is of another model"):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize("value", ["40", [40], {}, True, -1])
def test_the_tokenizers_limit(value, tmp_path):
    directory = pairs.write(tmp_path / "target", padding=2)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": value}))
    with pytest.raises(ValueError, match=r"tokenizer"):
        checkpoints.load(directory)
