"""Settings of a tuned run: a value that `specjax.tune` makes and `specjax.generate` takes."""

import dataclasses
import math
import os
import pathlib
from typing import Any

from specjax.policies.costs import Costs
from specjax.support import files


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """Drafting arguments of `generate` that suit one machine, pair and batch size.

    For example:

        settings = specjax.tune(target, draft, texts)
        settings.save("settings.json")
        specjax.generate(target, draft, texts, settings=specjax.Settings.load("settings.json"))
    """

    gamma: int
    """Drafted tokens per target call, with a policy at most; 0: plain decoding is the fastest."""
    policy: str = ""
    """Name of a draft-length policy, with its settings; empty: γ tokens in every round."""
    costs: Costs | None = None
    """Times of rounds and calls on the machine that measured them, for the policy. Seconds."""
    tree: str = "chain"
    rule: str = ""
    """Name of the acceptance rule; empty: the paper's."""
    widths: tuple[int, ...] = ()
    """Verify passes of fewer positions, as in `generate`."""
    words: str = ""
    """The findings of `tune` in words, with the reasons for these settings."""

    def __eq__(self, other: object) -> bool:
        """Whether all fields and all costs are equal; unknown times are equal."""
        return isinstance(other, Settings) and self.as_row() == other.as_row()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        kept = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("costs", "words") and getattr(self, field.name) != field.default
        }
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in kept.items())})"

    def __str__(self) -> str:
        return "\n".join(part for part in (repr(self), self.words) if part)

    def save(self, path: str | os.PathLike) -> None:
        """Write a JSON file; an unknown time is null."""
        files.write_json(pathlib.Path(path), self.as_row())

    def as_row(self) -> dict[str, Any]:
        """The fields as JSON has them; an unknown time is None."""
        return vars(self) | {"costs": _as_json(self.costs)}

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Settings":
        """Read settings that `save` wrote; ValueError if the file holds anything else."""
        row = files.read_json(pathlib.Path(path))
        known = {field.name for field in dataclasses.fields(cls)}
        if "gamma" not in row or not set(row) <= known:
            raise ValueError(f"{os.fspath(path)} holds no settings: `Settings.save` writes them.")
        if (costs := row.get("costs")) is not None:
            row["costs"] = Costs.measured(**_known(costs))
        return cls(**row | {"widths": tuple(row.get("widths", ()))})


def _as_json(costs: Costs | None) -> dict[str, Any] | None:
    if costs is None:
        return None
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in costs.as_row().items()
    }


def _known(row: dict[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in row.items()}
