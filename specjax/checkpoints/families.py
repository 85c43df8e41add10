"""The families of models: functions and names to read and to write each."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from specjax.checkpoints import gemma, gpt, llama, t5, t5gemma
from specjax.checkpoints.tensors import Tensor

DRAFTER = "specjax_drafter"  # the field of config.json that names a drafter's kind


class Family(NamedTuple):
    """The functions and names of a `model_type`; `t5.py` documents each function."""

    config_class: type[Any]
    build: Callable[..., nnx.Module]
    select_tensors: Callable[[Mapping[str, Any], Mapping[str, Tensor]], dict[str, Tensor]]
    config_from_hub: Callable[[Mapping[str, Any], Mapping[str, Tensor]], Any]
    config_to_hub: Callable[[Any], dict[str, Any]]
    tensor_names: Callable[[Any], dict[tuple, dict[str, int]]]
    defaults: Mapping[str, Any]
    turned: tuple[str, ...]  # suffixes of tensors that files store as (in, out)


# A new family is a module, a file like t5.py and a line here.
FAMILIES = {
    **{
        kind: Family(
            config_class,
            t5.build,
            t5.select_tensors,
            t5.config_from_hub,
            t5.config_to_hub,
            t5.tensor_names,
            t5.DEFAULTS[kind],
            (),
        )
        for kind, config_class in t5.CONFIGS.items()
    },
    "gpt2": Family(
        gpt.GPTConfig,
        gpt.build,
        gpt.select_tensors,
        gpt.config_from_hub,
        gpt.config_to_hub,
        gpt.tensor_names,
        gpt.DEFAULTS,
        gpt.TURNED,
    ),
    **{
        kind: Family(
            config_class,
            llama.build,
            llama.select_tensors,
            llama.config_from_hub,
            llama.config_to_hub,
            llama.tensor_names,
            llama.DEFAULTS[kind],
            (),
        )
        for kind, config_class in llama.CONFIGS.items()
    },
    **{
        kind: Family(
            config_class,
            llama.build,
            gemma.select_tensors,
            gemma.config_from_hub,
            gemma.config_to_hub,
            llama.tensor_names,
            gemma.DEFAULTS[kind],
            (),
        )
        for kind, config_class in gemma.CONFIGS.items()
    },
    **{
        kind: Family(
            config_class,
            t5gemma.build,
            t5gemma.select_tensors,
            t5gemma.config_from_hub,
            t5gemma.config_to_hub,
            t5gemma.tensor_names,
            t5gemma.DEFAULTS[kind],
            (),
        )
        for kind, config_class in t5gemma.CONFIGS.items()
    },
}


def family_of(raw: Mapping[str, Any], directory: Path) -> Family:
    """Find the family of a config.json; ValueError if there is none."""
    if DRAFTER in raw:
        raise ValueError(
            f"{directory} holds no model but a drafter of the kind {raw[DRAFTER]!r}, which belongs "
            "to one target. Give its directory as the draft, specjax.generate(target, directory, "
            "…), or load it by specjax.drafters.load(directory, target)."
        )
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"{directory / 'config.json'}: model_type={kind!r} is not supported; supported are "
            f"{', '.join(map(repr, FAMILIES))}."
        )
    return FAMILIES[kind]
