"""What the families have in common when they read a config.json and the tensors beside it."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from specjax.models.hub.tensors import Tensor, equal
from specjax.support.ranges import LARGEST


def fill_in(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `defaults`, from `raw` where it has them and they are not null."""
    return {**defaults, **{key: raw[key] for key in defaults if raw.get(key) is not None}}


def check_fields(raw: Mapping[str, Any]) -> None:
    """ValueError if a field has a value of a kind that it cannot have in any family.

    Null is as if the field were not there. Sizes are checked by `check_sizes`.
    """
    for key, value in raw.items():
        kind = FIELDS.get(key)
        if value is not None and kind is not None and not KINDS[kind](value):
            raise ValueError(f"{key}={value!r} should be {kind}.")


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= LARGEST


KINDS: dict[str, Callable[[Any], bool]] = {
    "an integer ≥ 0": _is_id,
    "an integer ≥ 1": lambda value: _is_id(value) and value > 0,
    "an id or a list of ids": lambda value: (
        all(map(_is_id, value)) if isinstance(value, list) else _is_id(value)
    ),
    "a finite number ≥ 0": _is_number,
    "true or false": lambda value: type(value) is bool,
    "a string": lambda value: isinstance(value, str),
    "a list of strings": lambda value: (
        isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    ),
    "an object": lambda value: isinstance(value, dict),
    "an object of objects": lambda value: (
        isinstance(value, dict) and all(isinstance(entry, dict) for entry in value.values())
    ),
}
FIELDS: dict[str, str] = {
    **dict.fromkeys(
        ("decoder_start_token_id", "bos_token_id", "pad_token_id", "max_window_layers"),
        "an integer ≥ 0",
    ),
    **dict.fromkeys(("num_beams", "n_positions", "num_decoder_layers"), "an integer ≥ 1"),
    "eos_token_id": "an id or a list of ids",
    **dict.fromkeys(("layer_norm_epsilon", "rms_norm_eps"), "a finite number ≥ 0"),
    **dict.fromkeys(
        (
            "tie_word_embeddings",
            "scale_decoder_outputs",
            "attention_bias",
            "mlp_bias",
            "use_sliding_window",
        ),
        "true or false",
    ),
    **dict.fromkeys(("feed_forward_proj", "activation_function", "hidden_act"), "a string"),
    "layer_types": "a list of strings",
    "task_specific_params": "an object of objects",
}


def check_sizes(fields: Mapping[str, Any], *, other: Collection[str]) -> None:
    """ValueError unless all fields but `other` are integers: ids ≥ 0, sizes ≥ 1."""
    for key, value in fields.items():
        least = 0 if key.endswith("_token_id") else 1
        if key not in other and (type(value) is not int or value < least):
            raise ValueError(f"{key}={value!r} should be an integer ≥ {least}.")


def check_built(raw: Mapping[str, Any], built: Mapping[str, Any]) -> None:
    """ValueError if a field has another value than the one that is built, its absence's meaning."""
    for key, value in built.items():
        if raw.get(key) not in (None, value):
            raise ValueError(
                f"{key}={raw[key]!r} is not supported; choose a model with {key}={value!r}."
            )


def is_copy(tensors: Mapping[str, Tensor], head: str, embedding: str) -> bool:
    """Whether the files hold a head that is the embedding once more."""
    return head in tensors and embedding in tensors and equal(tensors[head], tensors[embedding])


def with_prefix(
    tensors: Mapping[str, Tensor], prefix: str, *, embedding: str, head: str
) -> dict[str, Tensor]:
    """The names as a model with a head has them; files written without one lack `prefix`."""
    if embedding in tensors:
        return dict(tensors)
    return {name if name == head else prefix + name: tensor for name, tensor in tensors.items()}
