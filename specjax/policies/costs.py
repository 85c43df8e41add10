"""Costs: the table of times of calls and rounds on one machine.

A jitted loop cannot read a clock, so the table is made outside it, in seconds:
`measure.costing` times whole calls. Policies, the choice of a tree, replay, its
oracle and every predicted speedup read the same table.
Only ratios matter to them, so another unit, such as target steps, works as well.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specjax.pytrees import pytree, set_fields
from specjax.support.ranges import listed, number, shown, whole

_UNKNOWN = float("nan")


@pytree
class Costs:
    """Times on one machine at one batch size, all in one unit; float32. NaN: not measured.

    For example:

        Costs(draft=0.1, verify=[1.0, 1.1, 1.2])  # in target steps, for drafts of up to 2 tokens
        Costs(0.002, [0.011, 0.013, 0.024], positions=[8, 16, 40])  # in seconds, of eight rows

    Policies of draft lengths read the times by drafted tokens (`round_times`), those that decide
    slot by slot the ones of any number of positions (`exact`); `of_rows` makes the former of these.
    """

    draft: Float[Array, ""]  # of one call of the drafter, its distribution and draw
    verify: Float[Array, " K"]  # of a round's target call, by 0 … γ_max drafted tokens
    rest: Float[Array, " K"]  # of all else in a round; in fitted tables `verify` includes it
    token: Float[Array, ""]  # of plain decoding: one target call, its distribution and draw
    call: Float[Array, ""]  # of a call of the loop, beyond its rounds
    plain_call: Float[Array, ""]  # of a call of plain decoding, beyond its tokens
    # Time of a round's first call of the drafter if nothing is drafted after it. NaN: not known.
    refused: Float[Array, ""]
    # Errors of these costs on the timed calls, as shares; 0 if nothing was fitted.
    error: Float[Array, ""]  # the median over calls
    largest_error: Float[Array, ""]
    drop: Float[
        Array, ""
    ]  # the largest share by which a longer draft or a wider pass was timed as cheaper
    # The share of tested tokens that measured calls accepted. NaN: not known.
    alpha: Float[Array, ""]
    # The variance of α between outputs, as a share of α(1 − α). NaN: not known.
    between: Float[Array, ""]
    alpha_error: Float[Array, ""]  # the standard error of alpha. NaN: not known
    # Positions of all rows in each target call of `verify`, ascending.
    positions: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def __init__(
        self,
        draft: float | Array,
        verify: Sequence[float] | Array,
        *,
        rest: float | Sequence[float] | Array = 0.0,
        token: float | Array | None = None,
        call: float | Array = 0.0,
        plain_call: float | Array = 0.0,
        refused: float | Array = _UNKNOWN,
        error: float | Array = 0.0,
        largest_error: float | Array = 0.0,
        drop: float | Array = 0.0,
        alpha: float | Array = _UNKNOWN,
        between: float | Array = _UNKNOWN,
        alpha_error: float | Array = _UNKNOWN,
        positions: Sequence[int] | None = None,
    ):
        """Make a table from plain numbers, by default in target steps.

        JAX arrays are not checked: differences of timings, `rest` or `call`, may be negative.

        Args:
          verify: times by 0 … γ_max drafted tokens, or of calls with these `positions`.
          rest: times of the same calls, or one number for all.
          token: default 1; with `positions` the time of the smallest call and its `rest`.
          refused, alpha, between, alpha_error: NaN if not known.

        Raises:
          ValueError: no number, a negative one outside `rest`, verify empty or not positive
            throughout, rest of another length, a share outside [0, 1], or positions that do not
            ascend or have another length.
        """
        shares = {"alpha": alpha, "between": between, "alpha_error": alpha_error}
        times: dict[str, Any] = {"call": call, "plain_call": plain_call, "refused": refused}
        errors = {"error": error, "largest_error": largest_error, "drop": drop}
        for group, interval in ((shares, "[0, 1]"), (times | errors, "[0, ∞)")):
            for name, value in group.items():
                if not isinstance(value, Array) and value == value:  # NaN: not known
                    number(name, value, interval)
        if not isinstance(draft, Array):
            number("draft", draft, "[0, ∞)")
        if not isinstance(verify, Array):
            why = "one for each of 0 … γ_max drafted tokens"
            verify = [number("verify", time, "(0, ∞)", why) for time in listed("verify", verify)]
        if not isinstance(rest, Array):
            each: list[Any] = listed("rest", rest) if np.ndim(rest) else [rest] * len(verify)
            if len(each) != len(verify):
                raise ValueError(f"rest={rest!r} must be one number, or as many as verify has.")
            rest = [x if x != x else number("rest", x, "(-∞, ∞)") for x in each]
        usual = range(1, len(verify) + 1)
        given = usual if positions is None else listed("positions", positions)
        sizes = tuple(whole("positions", size, "[1, ∞)") for size in given)
        if len(sizes) != len(verify) or list(sizes) != sorted({*sizes}):
            raise ValueError(
                f"positions={sizes} and verify={verify}: give ascending sizes and a time for each."
            )
        if token is None:
            token = 1.0 if positions is None else verify[0] + rest[0]
        elif not isinstance(token, Array) and token == token:
            number("token", token, "[0, ∞)")
        fields: dict[str, Any] = {"draft": draft, "verify": verify, "rest": rest, "token": token}
        fields |= times | errors | shares
        arrays = {name: jnp.asarray(x, jnp.float32) for name, x in fields.items()}
        set_fields(self, **arrays, positions=sizes)

    @classmethod
    def measured(cls, **times: Any) -> "Costs":
        """Make a table from timings, whose differences may be negative."""
        times["rest"] = np.broadcast_to(times.get("rest", 0.0), len(times["verify"]))
        arrays: Any = {name: jnp.asarray(time, jnp.float32) for name, time in times.items()}
        return cls(**arrays)

    @classmethod
    def from_row(cls, row: Any) -> "Costs":
        """Make a table from `as_row`, where None too is not known.

        Raises:
          ValueError: no such mapping, or a value that `Costs` refuses. Fixed times of calls are
            differences and may be negative.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(row, Mapping) or not {"draft", "verify"} <= {*row} <= {*names}:
            raise ValueError(f"costs={shown(row)} must have draft and verify, and no other names.")
        read: dict[str, Any] = {
            name: _UNKNOWN if value is None and name != "positions" else value
            for name, value in row.items()
        }
        if isinstance(read.get("rest"), list):
            read["rest"] = [_UNKNOWN if time is None else time for time in read["rest"]]
        for name in ("call", "plain_call"):
            if (time := read.get(name, _UNKNOWN)) == time:
                read[name] = jnp.float32(number(name, time, "(-∞, ∞)"))
        return cls(**read)

    @property
    def gamma_max(self) -> int:
        """The longest draft that has a cost."""
        return len(self.verify) - 1

    @property
    def c(self) -> float:
        """The time of a draft step in target steps, the paper's c."""
        return float(self.draft) / float(self.token)

    def v(self, gamma: int) -> float:
        """The time of the target call over γ+1 positions, in target steps; the paper assumes 1.

        Raises:
          ValueError: a γ that has no cost.
        """
        whole("gamma", gamma, f"[0, {self.gamma_max}]", "the costs are for no longer drafts")
        return float(np.asarray(self.verify)[gamma]) / float(self.token)

    def overhead(
        self, gamma: int, tokens: float | None = None, rounds: float | None = None
    ) -> float:
        """Time of a round beyond γ draft steps and the target call, in target steps.

        Given an output's tokens and rounds, it includes a share of the fixed times of a call. A
        plain call takes tokens · token + plain_call, a speculative one rounds · round + call. Their
        ratio is the speedup, and equals τ/(γc + v + overhead) with τ = tokens/rounds:

            overhead = (round + call/rounds) / (token + plain_call/tokens) − γc − v

        Not clipped: it is negative if separately timed phases take longer than together.
        """
        v, token = self.v(gamma), float(self.token)
        spent = float(np.asarray(self.round_times(self.gamma_max))[gamma])
        if tokens is not None and rounds is not None and not np.isnan(self.call + self.plain_call):
            token += float(self.plain_call) / tokens
            spent += float(self.call) / rounds
        return spent / token - gamma * self.c - v

    def speedup(
        self, gamma: int, tokens: float, rounds: float, draft_calls: float | None = None
    ) -> float | None:
        """Predicted speedup over plain decoding: τ/(γc + v + overhead), τ = tokens/rounds.

        None if noise in the timings makes the time of a round negative or 0.

        Args:
          tokens, rounds: counts of an output; they share the fixed times of a call, if known.
          draft_calls: of its rounds, if not γ in each: the limit, the policy or the drafter may end
            a draft.
        """
        length = gamma if draft_calls is None else draft_calls / rounds
        lasts = length * self.c + self.v(gamma) + self.overhead(gamma, tokens, rounds)
        return tokens / rounds / lasts if lasts > 0 else None

    def round_times(self, gamma_max: int) -> Float[Array, " K"]:
        """Times of whole rounds, by 0 … γ_max drafted tokens.

        Raises:
          ValueError: the table is for another γ_max.
        """
        if self.verify.shape != (gamma_max + 1,):
            raise ValueError(
                f"The costs are for γ_max={len(self.verify) - 1} and not for {gamma_max}: measure "
                "them for the γ_max that decodes."
            )
        drafts = self.draft * jnp.arange(gamma_max + 1, dtype=jnp.float32)
        return drafts + self.verify + self.rest

    def alone(self, widths: Sequence[int]) -> dict[int, float]:
        """Times of rounds with 1 … γ_max drafted tokens whose pass has room for no more.

        They are interpolated between the passes that have a cost, from a token's on. Passes of a
        few positions may take a tenth more. The policy's time is included.

        Args:
          widths: positions of each row, in the passes of the timed loop.
        """
        gamma, verify = self.gamma_max, np.asarray(self.verify + self.rest, np.float64)
        known = sorted({width - 1 for width in widths if 1 < width <= gamma} | {gamma})
        first = float(np.fmin(verify[0], float(self.token)))
        passes = np.interp(range(gamma + 1), [0, *known], [first, *verify[known]])
        return {k: float(passes[k] + k * float(self.draft)) for k in range(1, gamma + 1)}

    def exact(self, positions: Int[Array, "..."], depth: int | Array) -> Float[Array, "..."]:
        """Time of a round whose target call has the smallest size that holds these positions.

        Positions beyond the last size cost the slope of the largest convex function below the
        times, or the mean time of a position where that is not positive.

        Args:
          positions: of all rows.
          depth: calls of the drafter; a round without one takes a step of plain decoding.
        """
        at = jnp.searchsorted(jnp.asarray(self.positions, jnp.int32), positions)
        at = jnp.minimum(at, len(self.positions) - 1)
        return self.of_calls(self.verify[at] + self.beyond(positions), depth, self.rest[at])

    def of_calls(
        self, calls: Float[Array, "..."], depth: int | Array, rest: Array
    ) -> Float[Array, "..."]:
        """Times of rounds from those of their target calls. Arguments: as in `exact`."""
        drafting = jnp.asarray(depth, jnp.float32) * self.draft
        return jnp.where(jnp.asarray(depth) == 0, self.token, drafting + rest + calls)

    def beyond(self, positions: Int[Array, "..."]) -> Float[Array, "..."]:
        """Time of positions beyond the last size."""
        at = jnp.asarray(self.positions, jnp.float32)
        each = self.verify[-1] / at[-1]
        if len(at) > 1:
            slope = jnp.max((self.verify[-1] - self.verify[:-1]) / (at[-1] - at[:-1]))
            each = jnp.where(slope > 0, slope, each)
        return each * jnp.maximum(positions.astype(jnp.float32) - at[-1], 0.0)

    def of_rows(self, rows: int, gamma_max: int) -> "Costs":
        """The table by 0 … γ_max drafted tokens in each row of a batch, as a policy reads it."""
        sizes = rows * jnp.arange(1, gamma_max + 2, dtype=jnp.int32)
        verify = self.exact(sizes, 1) - self.draft - self.rest[0]
        rest = jnp.broadcast_to(self.rest[0], verify.shape)
        return dataclasses.replace(
            self, verify=verify, rest=rest, positions=tuple(np.asarray(sizes).tolist())
        )

    def of_plain(self) -> "Costs":
        """The costs of plain decoding, in the form of a loop whose rounds draft nothing."""
        verify, zero = jnp.full_like(self.verify, self.token), jnp.zeros_like(self.draft)
        return dataclasses.replace(
            self, draft=zero, verify=verify, rest=0 * self.rest, call=self.plain_call
        )

    def outside(self, more: float | Array) -> "Costs":
        """Costs for the decision whether to enter the loop.

        A round without a draft costs at most a token of plain decoding, if that is known. Drafts
        must gain the share `more` over it.
        """
        first = jnp.fmin(self.verify[0] + self.rest[0], self.token) / (1 + more)
        return dataclasses.replace(
            self, verify=self.verify.at[0].set(first), rest=self.rest.at[0].set(0.0)
        )

    def as_row(self) -> dict[str, Any]:
        """The fields as plain numbers, for a file of results: `Costs(**row)` reads them.

        Positions of a single row go without saying.
        """
        row = {name: np.asarray(value).tolist() for name, value in vars(self).items()}
        if self.positions == tuple(range(1, len(self.positions) + 1)):
            del row["positions"]
        return row


def mean(one: Costs, other: Costs) -> Costs:
    """Average two measurements of the same loop, field by field."""
    return jax.tree.map(lambda a, b: (a + b) / 2, one, other)


def required(table: Costs | None) -> Costs:
    """Return the table; ValueError if it is no `Costs`."""
    if isinstance(table, Costs):
        return table
    raise ValueError(
        f"costs={table!r} must be a table: `specjax.policies.Costs` makes one of plain numbers, "
        "and `specjax.tune` of timings."
    )


def checked(table: Costs | None) -> Costs | None:
    """Return the table, or None if none is given; ValueError for anything else."""
    return None if table is None else required(table)
