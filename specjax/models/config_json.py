"""What the families have in common when they read a config.json and the tensors beside it."""

from collections.abc import Collection, Mapping
from typing import Any

from specjax.models.safetensors_files import Tensor, equal


def fill_in(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `defaults`, from `raw` where it has them and they are not null."""
    return {**defaults, **{key: raw[key] for key in defaults if raw.get(key) is not None}}


def check_sizes(fields: Mapping[str, Any], *, other: Collection[str]) -> None:
    """ValueError unless all fields but `other` are integers: ids ≥ 0, sizes ≥ 1."""
    for key, value in fields.items():
        least = 0 if key.endswith("_token_id") else 1
        if key not in other and (type(value) is not int or value < least):
            raise ValueError(f"config.json: {key}={value!r} should be an integer ≥ {least}.")


def check_built(raw: Mapping[str, Any], built: Mapping[str, Any]) -> None:
    """ValueError if a field has another value than the one that is built, its absence's meaning."""
    for key, value in built.items():
        if raw.get(key) not in (None, value):
            raise ValueError(
                f"config.json: {key}={raw[key]!r} is not supported; choose a model with "
                f"{key}={value!r}."
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
