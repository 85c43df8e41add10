"""Settings of a tuned run: a value that `specjax.tune` makes and `specjax.generate` takes."""

import dataclasses
import math
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from specjax.batching import bucket
from specjax.policies.costs import Costs, checked
from specjax.support import files, runs
from specjax.support.ranges import shown, whole


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
    passes: tuple[int, ...] = ()
    """Numbers of positions of smaller verify passes, as in `generate`."""
    words: str = ""
    """The findings of `tune` in words, with the reasons for these settings."""
    tuned_for: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Models, dtype, device, sampling, batch size and limit that `tune` measured with, as
    `decoding.conditions` describes them; empty: not known."""

    def __post_init__(self):
        """Check types and ranges; ValueError that names the field."""
        passes = self.passes
        if not isinstance(passes, tuple | list):
            raise ValueError(f"passes={shown(passes)} must be a list of whole numbers.")
        given = {
            "gamma": whole("gamma", self.gamma, "[0, ∞)", "0 is plain decoding"),
            "passes": tuple(whole("passes", size, "[1, ∞)") for size in passes),
            "costs": checked(self.costs),
        }
        for name in ("policy", "tree", "rule", "words"):
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f"{name}={shown(value)} must be a text.")
        if not isinstance(self.tuned_for, Mapping):
            raise ValueError(f"tuned_for={shown(self.tuned_for)} must be values by name.")
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        """Whether all fields and all costs are equal; unknown times are equal."""
        return isinstance(other, Settings) and self.as_row() == other.as_row()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        kept = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("costs", "words", "tuned_for")
            and getattr(self, field.name) != field.default
        }
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in kept.items())})"

    def __str__(self) -> str:
        return "\n".join(part for part in (repr(self), self.words) if part)

    def save(self, path: str | os.PathLike) -> None:
        """Write a JSON file; an unknown time is null."""
        files.write_json(pathlib.Path(path), self.as_row())

    def as_row(self) -> dict[str, Any]:
        """The fields as JSON has them; an unknown time is None."""
        row = vars(self) | {"costs": None if self.costs is None else _as_json(self.costs)}
        if not self.tuned_for:  # as in a file without this field, whose run is still continued
            del row["tuned_for"]
        return row

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Settings":
        """Read settings that `save` wrote; ValueError if the file holds anything else."""
        files.check_regular(pathlib.Path(path))
        row = files.read_json(pathlib.Path(path))
        known = {field.name for field in dataclasses.fields(cls)}
        widths = row.pop("widths", ())  # of 0.2: positions of each row
        if "gamma" not in row or not set(row) <= known:
            raise ValueError(f"{os.fspath(path)} holds no settings: `Settings.save` writes them.")
        try:
            costs = row.get("costs")
            if widths:
                rows = bucket(row.get("tuned_for", {}).get("batch_size", 1))
                row["passes"] = [width * rows for width in widths]
            return cls(**row | {"costs": None if costs is None else Costs.from_row(costs)})
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{os.fspath(path)} holds no settings: {error} `Settings.save` writes them."
            ) from None

    def warn_of_other_use(self, conditions: Mapping[str, Any]) -> None:
        """Warn of each condition that is not the one that these settings were tuned for."""
        common = {name: conditions[name] for name in self.tuned_for if name in conditions}
        known = {name: self.tuned_for[name] for name in common}
        if changes := runs.differences(known, common):
            warnings.warn(
                f"These settings were tuned for something else: {'; '.join(changes)}. They may be "
                "slow here: tune again.",
                stacklevel=5,
            )


def _as_json(costs: Costs) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in costs.as_row().items()
    }
