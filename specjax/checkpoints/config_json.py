"""Helpers with which all families read a config.json and the tensors beside it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specjax.support.ranges import LARGEST, LARGEST_WHOLE, shown

IDS = ("decoder_start_token_id", "bos_token_id", "pad_token_id", "eos_token_id")
NO_ID = -1
ID = "an integer ≥ 0 and below 2³¹, or -1 for none"
ENDS, TIED = "eos_token_id", "tie_word_embeddings"
LAYERS = ("num_layers", "num_decoder_layers", "n_layer", "num_hidden_layers")
MOST_LAYERS = 1000  # the largest published models have some 130


def fill_in(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `defaults` but for EOS, with the values of `raw` where these are not null."""
    given = {key: raw[key] for key in defaults if raw.get(key) is not None}
    return {key: value for key, value in {**defaults, **given}.items() if key != ENDS}


def check_fields(raw: Mapping[str, Any], fields: Mapping[str, str] | None = None) -> None:
    """Raise ValueError if a field has a value of a kind that no family allows.

    Null counts as absent. `check_sizes` checks sizes.

    Args:
      fields: the kind of each field, of `KINDS`; None: `FIELDS`.
    """
    kinds = FIELDS if fields is None else fields
    for key, value in raw.items():
        kind = kinds.get(key)
        if value is not None and kind is not None and not KINDS[kind](value):
            raise ValueError(f"{key}={shown(value)} should be {kind}.")


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_WHOLE


def _is_id_or_none(value: Any) -> bool:
    return _is_id(value) or (type(value) is int and value == NO_ID)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= LARGEST


def _of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _list_of(suits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(suits, value))


KINDS: dict[str, Callable[[Any], bool]] = {
    "an integer ≥ 0 and below 2³¹": _is_id,
    ID: _is_id_or_none,
    "an integer ≥ 1 and below 2³¹": lambda value: _is_id(value) and value > 0,
    "an id below 2³¹, or a list of them": lambda value: (
        _is_id_or_none(value) or _list_of(_is_id_or_none)(value)
    ),
    "a finite number ≥ 0": _is_number,
    "a number in [0, 1)": lambda value: _is_number(value) and value < 1,
    "true or false": _of(bool),
    "a string": _of(str),
    "a list of strings": _list_of(_of(str)),
    "a list of integers ≥ 0 and below 2³¹": _list_of(_is_id),
    "an object": _of(dict),
    "an object of objects": lambda value: (
        isinstance(value, dict) and all(map(_of(dict), value.values()))
    ),
}
NO_SIZES = ("a finite number ≥ 0", "a number in [0, 1)", "true or false", "a string")
FIELDS: dict[str, str] = {
    key: kind
    for kind, keys in {
        ID: "decoder_start_token_id bos_token_id pad_token_id",
        "an id below 2³¹, or a list of them": "eos_token_id",
        "an integer ≥ 0 and below 2³¹": "max_window_layers",
        "an integer ≥ 1 and below 2³¹": "num_beams n_positions num_decoder_layers "
        "sliding_window_pattern query_pre_attn_scalar",
        "a number in [0, 1)": "layer_norm_epsilon rms_norm_eps",
        "a finite number ≥ 0": "rope_local_base_freq attn_logit_softcapping "
        "final_logit_softcapping",
        "true or false": "tie_word_embeddings scale_decoder_outputs attention_bias mlp_bias "
        "use_sliding_window use_bidirectional_attention",
        "a string": "feed_forward_proj activation_function hidden_act hidden_activation prefix",
        "a list of strings": "layer_types",
        "an object of objects": "task_specific_params",
        "an object": "text_config encoder decoder",
    }.items()
    for key in keys.split()
}


@contextlib.contextmanager
def naming(place: str | Path) -> Iterator[None]:
    """Prefix a ValueError with the place of the error."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def text_model(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the fields of a gemma3, which reads images too, by those of its text model.

    Ids that both name are the outer ones. A T5Gemma that names no ids gets those of its decoder.
    The fields of other models stay as they are.
    """
    if raw.get("model_type") in ("t5gemma", "t5gemma2"):
        decoder = raw.get("decoder") or {}
        own = {key: decoder[key] for key in IDS if decoder.get(key) is not None}
        check_fields(own)
        return {**own, **{key: value for key, value in raw.items() if value is not None}}
    if raw.get("model_type") != "gemma3":
        return dict(raw)
    inner = {
        key: value for key, value in (raw.get("text_config") or {}).items() if value is not None
    }
    check_fields(inner)
    ids = {key: raw[key] for key in IDS if raw.get(key) is not None}
    return {**raw, **inner, **ids, "model_type": "gemma3_text"}


def check_sizes(fields: Mapping[str, Any]) -> None:
    """Raise ValueError unless ids are integers ≥ 0, and sizes integers ≥ 1.

    Fields that `FIELDS` has as something else are left out: `check_fields` checks them.
    """
    for key, value in fields.items():
        if FIELDS.get(key) in NO_SIZES:
            continue
        least = 0 if key.endswith("_token_id") else 1
        if type(value) is not int or value < least:
            raise ValueError(f"{key}={shown(value)} should be an integer ≥ {least}.")
        most = MOST_LAYERS if key in LAYERS else LARGEST_WHOLE
        if value > most:
            raise ValueError(f"{key}={value} should be at most {most}.")


def merge_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the ids of generation_config.json, the newer place, into config.json.

    An id of −1 means none, as null does.
    """
    merged = {**raw, **{key: generation[key] for key in IDS if generation.get(key) is not None}}
    for key in IDS:
        value = merged.get(key)
        if isinstance(value, list):
            merged[key] = [one for one in value if one != NO_ID]
        elif value == NO_ID:
            merged[key] = None
    return merged


def check_built(raw: Mapping[str, Any], built: Mapping[str, Any]) -> None:
    """Raise ValueError unless each field is absent or has the only value that is implemented."""
    for key, value in built.items():
        if raw.get(key) not in (None, value):
            raise ValueError(
                f"{key}={raw[key]!r} is not supported; choose a model with {key}={value!r}."
            )
