"""The families of models by `model_type`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.checkpoints import gemma, gpt, llama, t5, t5gemma
from specjax.checkpoints.family import Family

DRAFTER = "specjax_drafter"  # the field of config.json that names a drafter's kind
FAMILIES: dict[str, Family] = {
    kind: family
    for module in (t5, gpt, llama, gemma, t5gemma)
    for kind, family in module.FAMILIES.items()
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
