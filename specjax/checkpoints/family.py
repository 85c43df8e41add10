"""The tables from which a family of models is read and written.

A `Row` names a tensor in Hugging Face's files and in GGUF's, and the parameter that it fills. The
defaults of config.json are also the fields that are written.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx

from specjax.checkpoints.config_json import ENDS
from specjax.checkpoints.formats.gguf_files import way_out
from specjax.checkpoints.tensors import Tensor, equal


class Row(NamedTuple):
    """A tensor of each layer of a stack, or one outside, and the parameter that it fills."""

    tensor: str
    """Hugging Face's name, below the layer, without the suffix."""
    parameter: str
    """Path in the module, below the layer; "": no model reads the tensor."""
    gguf: str = ""
    """GGUF's name, below the layer, without the suffix; "": it has none."""
    share: str = ""
    """The config's field that gives this tensor's share of the parameter's rows; "": all equal."""
    bias: Callable[[Any], Any] = lambda config: False
    """Whether a model has a bias beside the weight."""
    when: Callable[[Any], Any] = lambda config: True
    """Whether a model has the tensor."""
    suffix: str = ".weight"


class Stack(NamedTuple):
    """Layers, one after the other."""

    number: str
    """The config's field that has the number of layers."""
    tensors: str
    """Beginning of the layers' names in Hugging Face's files, such as "model.layers."."""
    parameters: str
    """Name of the list of layers in the module."""
    rows: tuple[Row, ...]
    gguf: str = "blk."
    """Beginning of the layers' names in GGUF."""
    config: Callable[[Any], Any] = lambda config: config
    """The part of the model's config that describes the layers."""


def untied(config: Any) -> bool:
    """Whether a model has a head that is not its embedding."""
    return not config.tie_word_embeddings


@dataclasses.dataclass(frozen=True)
class Family:
    """Functions and tables of a `model_type`."""

    config_class: type[Any]
    module: Callable[..., nnx.Module]
    architecture: str
    """Name of the class in transformers."""
    defaults: Mapping[str, Any]
    """Fields of config.json that are read and written, with transformers' defaults."""
    written: Mapping[str, Any]
    """Fields of config.json that have one value here."""
    rows: tuple[Row, ...]
    """Tensors outside the layers."""
    stacks: tuple[Stack, ...]
    select_tensors: Callable[[Mapping[str, Any], Mapping[str, Tensor]], dict[str, Tensor]]
    """(config.json, a file's tensors) → those of the model, without copies of tied ones."""
    config_from_hub: Callable[[Mapping[str, Any], Mapping[str, Tensor]], Any]
    """(config.json, selected tensors) → the config. Raises ValueError if a size is no positive
    integer, or a variant is not supported."""
    more_to_hub: Callable[[Any], dict[str, Any]] = lambda config: {}
    """The fields of config.json that are no fields of the config."""
    turned: tuple[str, ...] = ()
    """Suffixes of tensors that files store as (in, out)."""

    def build(self, config: Any, *, rngs: nnx.Rngs, dtype: Any) -> nnx.Module:
        """Build a freshly initialised model."""
        return self.module(config, rngs=rngs, dtype=dtype)

    def config_to_hub(self, config: Any) -> dict[str, Any]:
        """The architecture's fields of config.json, for transformers before and since version 5."""
        fields = {key: getattr(config, key) for key in self.defaults if key != ENDS}
        fields |= {"architectures": [self.architecture], **self.written}
        return fields | self.more_to_hub(config)

    def tensor_names(self, config: Any) -> dict[tuple, dict[str, int]]:
        """Map each parameter's path to its tensors, stacked by rows, each with its share of them.

        There are more query heads than heads of keys and values, for instance.
        """
        found: dict[tuple, dict[str, int]] = {}
        for row in self.rows:
            _add(found, row, config, "", ())
        for stack in self.stacks:
            part = stack.config(config)
            for i in range(getattr(part, stack.number)):
                for row in stack.rows:
                    _add(found, row, part, f"{stack.tensors}{i}.", (stack.parameters, i))
        return found

    def gguf_names(self) -> dict[str, str]:
        """Map GGUF's names to Hugging Face's, both without suffix and with N for the layer."""
        found = {row.gguf: row.tensor for row in self.rows}
        for stack in self.stacks:
            places = f"{stack.gguf}N.", f"{stack.tensors}N."
            found |= {places[0] + row.gguf: places[1] + row.tensor for row in stack.rows}
        return found

    def check_layers(self, config: Any, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError if a config has more layers than the names of the tensors.

        Nothing is built, and the time does not depend on the number.
        """
        for stack in self.stacks:
            field, place = stack.number, stack.tensors
            count = getattr(stack.config(config), field)
            parts = [name[len(place) :] for name in tensors if name.startswith(place)]
            there = len({part.partition(".")[0] for part in parts})
            if count > there:
                raise ValueError(
                    f"{field}={count}, but layers beyond the {there} of {place}* are missing "
                    f"from the weights, or the config is of another model. {way_out(tensors)}"
                )


def _add(
    found: dict[tuple, dict[str, int]], row: Row, config: Any, place: str, path: tuple
) -> None:
    """Add a row of a layer, whose tensors begin with `place` and whose parameters with `path`."""
    if not row.parameter or not row.when(config):
        return
    *module, last = row.parameter.split(".")
    share = getattr(config, row.share) if row.share else 1
    suffixes = {last: row.suffix} | ({"bias": ".bias"} if row.bias(config) else {})
    for leaf, suffix in suffixes.items():
        found.setdefault((*path, *module, leaf), {})[place + row.tensor + suffix] = share


def with_prefix(tensors: Mapping[str, Tensor], prefix: str, *, head: str) -> dict[str, Tensor]:
    """Add `prefix` to the names if they lack it, as in files written without a head."""
    if any(name.startswith(prefix) for name in tensors):
        return dict(tensors)
    return {name if name == head else prefix + name: tensor for name, tensor in tensors.items()}


def tie(tensors: dict[str, Tensor], copy: str, name: str) -> None:
    """Keep a tied matrix once, under `name`; `copy` stays only if it holds other numbers."""
    if name not in tensors and copy in tensors:
        tensors[name] = tensors.pop(copy)
    drop_copy(tensors, copy, name)


def drop_copy(tensors: dict[str, Tensor], copy: str, name: str) -> None:
    """Drop a tensor that holds the same numbers as another one."""
    if copy in tensors and name in tensors and equal(tensors[copy], tensors[name]):
        del tensors[copy]
