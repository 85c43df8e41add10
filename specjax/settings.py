"""How to draft, as one value: `Drafting`, and the `Settings` that `specjax.tune` returns."""

import dataclasses
import math
import os
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypedDict

import numpy as np

from specjax import trees
from specjax.batching import bucket
from specjax.contracts import check_part
from specjax.defaults import GAMMA
from specjax.policies import Policy
from specjax.policies.costs import Costs, checked
from specjax.rules import AcceptanceRule
from specjax.support import files, runs
from specjax.support.ranges import shown, truth, whole
from specjax.trees import Shape

MAX_GAMMA = 1024


class Fields(TypedDict, total=False):
    """The fields of `Drafting` but the costs, as keyword arguments."""

    gamma: int | None
    policy: Policy | str | None
    tree: Shape | str | None
    rule: AcceptanceRule | str | None
    passes: Sequence[int]
    check_tokens: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Drafting:
    """How rounds draft and what they accept. Parts are values, or names as flags write them.

        Drafting(gamma=7, policy="svip(threshold=0.3)")
        Drafting(tree=specjax.trees.fixed(3, 2, 1), rule=specjax.rules.Block())

    Raises:
      ValueError: a number out of range, or a value that is no such part. Names are looked up when
        a loop is built.
    """

    gamma: int | None = None
    """Drafted tokens per target call; with a policy the most. None: 4, or the depth of the tree."""
    policy: Policy | str | None = None
    """How long drafts are, and which of their tokens are verified; None: gamma, always."""
    costs: Costs | None = None
    """Times of rounds and calls on the machine that measured them, for a policy's name. Seconds."""
    tree: Shape | str | None = None
    """The shape of drafts; None: a chain."""
    rule: AcceptanceRule | str | None = None
    """The acceptance rule; None: the paper's, `rules.Token()`."""
    passes: Sequence[int] = ()
    """Numbers of positions of smaller verify passes, for all rows of the batch together."""
    check_tokens: bool = True
    """Whether to refuse a draft whose tokens are not the target's."""

    min_gamma: ClassVar[int] = 1

    def __post_init__(self):
        """Check types and ranges; ValueError that names the field."""
        given: dict[str, Any] = {
            "policy": self._part("policy"),
            "rule": self._part("rule"),
            "costs": checked(self.costs),
            "passes": _sizes(self.passes),
            "check_tokens": truth("check_tokens", self.check_tokens),
        }
        if self.gamma is not None:
            given["gamma"] = whole("gamma", self.gamma, f"[{self.min_gamma}, ∞)")
            interval = f"[{self.min_gamma}, {MAX_GAMMA}]"
            whole("gamma", self.gamma, interval, "a row never drafts past its max_new_tokens")
        if not isinstance(self.tree, str):
            trees.parse(self.tree)
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def _part(self, name: str) -> Any:
        value = getattr(self, name)
        if value is not None and not isinstance(value, str):
            check_part(name, value, ", or its name")
        return value or None if isinstance(value, str) else value

    @property
    def shape(self) -> Shape:
        """The shape of drafts; ValueError if there is none of its name."""
        return trees.parse(self.tree)

    @property
    def depth(self) -> int:
        """The longest chain or path of tokens that a round may draft."""
        gamma = GAMMA if self.gamma is None else self.gamma
        return getattr(self.shape, "depth", gamma)

    def given(self) -> dict[str, Any]:
        """The fields of `Drafting` that are not its defaults."""
        both = [(one.name, getattr(self, one.name), one.default) for one in _FIELDS]
        return {name: value for name, value, default in both if value is not default}

    def __eq__(self, other: object) -> bool:
        """Whether all fields and all costs are equal; unknown times are equal."""
        return isinstance(other, Drafting) and self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        left_out = ("costs", "tree") if self.tree in ("chain", trees.chain()) else ("costs",)
        kept = {name: value for name, value in self.given().items() if name not in left_out}
        fields = ", ".join(f"{name}={value!r}" for name, value in kept.items())
        return f"{type(self).__name__}({fields})"

    def as_row(self) -> dict[str, Any]:
        """The fields as JSON has them, parts by their names; an unknown time is None.

        Raises:
          ValueError: a policy or rule that is no name.
        """
        row = self._values()
        for name in ("policy", "rule"):
            if not isinstance(row[name] or "", str):
                raise ValueError(f"{name}={shown(row[name])} has no name, which a file holds.")
            row[name] = row[name] or ""
        # Files of 0.2 have neither field, and their runs are still continued.
        unchanged: dict[str, Any] = {"check_tokens": True, "tuned_for": {}}
        return {k: value for k, value in row.items() if k not in unchanged or value != unchanged[k]}

    def _values(self) -> dict[str, Any]:
        tree = self.tree if isinstance(self.tree, str) else trees.text_of(self.shape)
        costs = self.costs and {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in self.costs.as_row().items()
        }
        return vars(self) | {"costs": costs, "tree": tree}


_FIELDS = dataclasses.fields(Drafting)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Settings(Drafting):
    """Drafting that suits one machine, pair and batch size, as `specjax.tune` finds it.

        settings = specjax.tune(target, draft, texts)
        settings.save("settings.json")
        specjax.generate(target, draft, texts, settings=specjax.Settings.load("settings.json"))

    γ = 0: plain decoding is the fastest.
    """

    words: str = ""
    """The findings of `tune` in words, with the reasons for these settings."""
    tuned_for: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Models, dtype, device, sampling, batch size and limit that `tune` measured with, as
    `decoding.conditions.conditions` describes them; empty: not known."""

    min_gamma: ClassVar[int] = 0

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.words, str):
            raise ValueError(f"words={shown(self.words)} must be a text.")
        if not isinstance(self.tuned_for, Mapping):
            raise ValueError(f"tuned_for={shown(self.tuned_for)} must be values by name.")

    def __str__(self) -> str:
        return "\n".join(part for part in (repr(self), self.words) if part)

    def save(self, path: str | os.PathLike) -> None:
        """Write a JSON file; an unknown time is null."""
        files.write_json(pathlib.Path(path), self.as_row())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Settings":
        """Read settings that `save` wrote; ValueError if the file holds anything else."""
        files.check_regular(pathlib.Path(path))
        row = files.read_json(pathlib.Path(path))
        widths = row.pop("widths", ())  # of 0.2: positions of each row
        try:
            whole("gamma", row.get("gamma"), "[0, ∞)", "0 is plain decoding")
            if widths:
                rows = bucket(row.get("tuned_for", {}).get("batch_size", 1))
                row["passes"] = [width * rows for width in widths]
            costs = row.get("costs")
            if unknown := row.keys() - {field.name for field in dataclasses.fields(cls)}:
                raise ValueError(f"there is no field {min(unknown)!r}.")
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


def _sizes(passes: Any) -> tuple[int, ...]:
    if np.ndim(passes) == 0:
        raise ValueError(f"passes={shown(passes)} must be a list of whole numbers.")
    return tuple(whole("passes", size, "[1, ∞)") for size in passes)
