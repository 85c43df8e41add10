"""What the parts of a loop must return, checked for parts of a user's own.

`watched` returns a method whose own rule, policy and drafter check each result against a table of
what is due. The loop calls it while it is traced, so a check costs nothing at run time.
Parts of this package are left as they are.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from specjax.pytrees import check_pytree, set_fields
from specjax.support.ranges import has, shown, whole


class Numbers(NamedTuple):
    """An array that is due: its kind, and the shapes that it may have."""

    kind: str  # a key of `_KINDS`
    shapes: tuple[tuple[int | None, ...], ...]  # None: any number

    def __str__(self):
        dims = (", ".join("any" if n is None else str(n) for n in shape) for shape in self.shapes)
        return " or ".join(f"{self.kind}[{shape}]" for shape in dims)

    def fits(self, found: Any) -> bool:
        """Whether an array, or a number of Python, is what is due."""
        if not _is_array(found):
            return False
        shape = np.shape(found)
        shapes = [due for due in self.shapes if len(due) == len(shape)]
        fitting = (all(n in (None, m) for n, m in zip(due, shape, strict=True)) for due in shapes)
        return any(fitting) and _KINDS[self.kind](_dtype(found))


_KINDS: dict[str, Callable[[Any], bool]] = {
    "bool": lambda dtype: dtype == jnp.bool_,
    "integers": lambda dtype: jnp.issubdtype(dtype, jnp.integer),
    "floats": lambda dtype: jnp.issubdtype(dtype, jnp.floating),
    # A uniform number of fewer bits would settle acceptance coarsely.
    "float32": lambda dtype: jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4,
    "numbers": lambda dtype: True,
}


class Same(NamedTuple):
    """A state like the one that the function was given."""

    state: Any

    def __str__(self):
        return f"the given state {layout(self.state)}".strip()

    def fits(self, found: Any) -> bool:
        one, other = (cast(Any, jax.tree.structure(state)) for state in (found, self.state))
        return bool(one == other) and layout(found) == layout(self.state)


class First(NamedTuple):
    """A first state: the first axis of each array is the rows; or any state."""

    rows: int | None

    def __str__(self):
        return "a state" + (
            "" if self.rows is None else f" whose arrays have {self.rows} rows each"
        )

    def fits(self, found: Any) -> bool:
        leaves = jax.tree.leaves(found)
        by_row = self.rows is None or all(np.shape(x)[:1] == (self.rows,) for x in leaves)
        return all(map(_is_array, leaves)) and by_row


def _each(kind: str, rows: int) -> Numbers:
    """One number for each row, or one for all."""
    return Numbers(kind, ((rows,), ()))


# What each function must return, by its own arguments, whose names stand in errors.


def of_policy(_: Any, rows: int) -> dict[str, Callable[..., Any]]:
    """What the functions of a policy must return."""
    return {
        "init": lambda keys, gamma_max: First(rows),
        "begin": lambda state, live, gamma_max: (Same(state), _each("integers", rows)),
        "nodes": lambda state, most: _each("integers", rows),
        "keep_drafting": lambda state, seen: (Same(state), _each("bool", rows)),
        "go_on": lambda state, drafting, logprob: (Same(state), _each("bool", rows)),
        "chance": lambda state, slot: _each("floats", rows),
        "verifies": lambda state, slot: Numbers("bool", ((),)),
        "update": lambda state, round_: Same(state),
        "resume": lambda fresh, past, rows: Same(fresh),
    }


def of_rule(_: Any, rows: int) -> dict[str, Callable[..., Any]]:
    """What the functions of an acceptance rule must return."""

    def like(array, *axes):
        return Numbers("float32", (tuple(array.shape[axis] for axis in axes),))

    return {
        "target_distribution": lambda logits, sampling: like(logits, *range(logits.ndim)),
        "given_noise": lambda logprobs, keys, position: like(logprobs, 0, 1),
        "acceptance": lambda target_logprobs, draft_logprobs: like(
            target_logprobs, *range(target_logprobs.ndim - 1)
        ),
        "stop": lambda target_logprobs, draft_logprobs, drafts, draft_len: like(
            target_logprobs, 0, 1
        ),
        "next_probs": lambda target_logprobs, draft_logprobs, drafts, draft_len, accepted: like(
            target_logprobs, 0, 2
        ),
    }


def of_drafter(drafter: Any, _: int) -> dict[str, Callable[..., Any]]:
    """What the functions of a drafter must return."""

    def hidden(by_row):
        return Numbers("numbers", ((len(by_row), None),))

    return {
        "start": lambda inputs, buffer_len: (First(None), First(None)),
        "observe": lambda tokens, start, hidden, count, context, state: Same(state),
        "begin": lambda tokens, length, context, state, *, lags=True: (hidden(length), Same(state)),
        "extend": lambda token, position, context, state: (hidden(token), Same(state)),
        "logits": lambda hidden: Numbers("floats", ((*hidden.shape[:-1], drafter.vocab_size),)),
        "learn": lambda tokens, length, round_, judge, context, state: Same(state),
        "resume": lambda fresh, past, rows: Same(fresh),
    }


class Kind(NamedTuple):
    """A kind of parts: what distinguishes one from other values, and what else it has."""

    noun: str
    base: str  # the class to inherit from
    functions: tuple[str, ...]  # those that a value of no such kind lacks
    fields: tuple[str, ...]  # what a part has beside the functions of the table
    table: Callable[[Any, int], dict[str, Callable[..., Any]]]
    check: str  # of `specjax.testing`

    def lacks(self, part: Any) -> list[str]:
        """What a value lacks of such a part."""
        names = (*self.table(part, 0), *self.fields)
        optional = ("learn", "resume") if self.check == "check_drafter" else ()
        return [name for name in names if name not in optional and not hasattr(part, name)]


PARTS = {  # by the field of a method
    "policy": Kind(
        "a draft-length policy", "specjax.policies.Policy", ("begin", "update"),
        ("needs_shorter", "fixed", "reads_batch", "carries", "fills", "prefers_plain"),
        of_policy, "check_policy",
    ),
    "rule": Kind(
        "an acceptance rule", "specjax.rules.Token", ("stop", "next_probs"),
        ("reveals_shorter", "under"), of_rule, "check_rule",
    ),
    "drafter": Kind(
        "a drafter", "specjax.drafters.base.Drafter", ("begin", "extend", "logits"),
        ("vocab_size",), of_drafter, "check_drafter",
    ),
}  # fmt: skip


def check_part(name: str, part: Any, alternative: str = "") -> None:
    """Raise ValueError unless a value is a part that jit can take apart.

    Args:
      name: the argument's, a key of `PARTS`.
      alternative: what else it may be, such as ", or its name".
    """
    kind = PARTS[name]
    has(name, part, kind.functions, kind.noun + alternative)
    check_pytree(name, part)
    lacks = kind.lacks(part)
    if lacks:
        raise ValueError(
            f"{name}: {type(part).__name__} lacks {', '.join(lacks)}. Inherit from {kind.base}, "
            "which has a default for each that may be left out."
        )
    if name == "drafter":
        whole(f"{type(part).__name__}.vocab_size", part.vocab_size, "[1, ∞)")


class WrongPart(ValueError):
    """A part that cannot be called, or that returned what is not due."""

    def __init__(self, fault: str, kind: Kind):
        super().__init__(f"{fault}. `specjax.testing.{kind.check}` tries it alone.")
        self.fault = fault


def is_own(part: Any) -> bool:
    """Whether a part is a user's own, and not of this package."""
    return part is not None and type(part).__module__.partition(".")[0] != "specjax"


def watched(method: Any, rows: int) -> Any:
    """The method with own parts that check what they return; itself where there are none.

    Args:
      rows: of the batch.

    Raises:
      ValueError: by a call of such a part; the message names its function, and what is due.
    """
    parts = {name: getattr(method, name, None) for name in PARTS}
    new = {name: watched_part(part, PARTS[name], rows) for name, part in parts.items()}
    new = {name: part for name, part in new.items() if part is not parts[name]}
    return _replaced(method, new)


def _replaced(value: Any, fields: dict[str, Any]) -> Any:
    """A copy with other fields; unlike that of `dataclasses.replace` it is made without checks."""
    if fields:
        value = copy.copy(value)
        set_fields(value, **fields)
    return value


def watched_part(part: Any, kind: Kind, rows: int) -> Any:
    """A part, or one that it holds, as one that checks its results if it is a user's own."""
    if not is_own(part):  # such as a switch among drafters
        new = {}
        for field in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
            old = getattr(part, field.name)
            several = isinstance(old, tuple)
            each = [watched_part(one, kind, rows) for one in (old if several else (old,))]
            if any(a is not b for a, b in zip(each, old if several else (old,), strict=True)):
                new[field.name] = tuple(each) if several else each[0]
        return _replaced(part, new)
    if not hasattr(part, "__dict__") or kind.lacks(part):
        return part
    table = kind.table(part, rows).items()
    return _replaced(
        part, {name: _asking(part, name, due, kind) for name, due in table if hasattr(part, name)}
    )


def _asking(part: Any, name: str, due: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    """The part's function, which checks its result."""
    function, label = getattr(part, name), f"{type(part).__name__}.{name}"

    def asked(*values: Any, **options: Any) -> Any:
        try:
            inspect.signature(function).bind(*values, **options)
        except TypeError as error:
            called = f"{label} is called with {inspect.signature(due)}"
            raise WrongPart(f"{called}: {error}", kind) from None
        try:
            found = function(*values, **options)
        except Exception as error:
            error.add_note(f"Raised by {label}. `specjax.testing.{kind.check}` tries it alone.")
            raise
        wanted = due(*values, **options)
        if not _fits(found, wanted):
            raise WrongPart(f"{label} returned {_brief(found)} where {_text(wanted)} is due", kind)
        return found

    return asked


def _fits(found: Any, wanted: Any) -> bool:
    if type(wanted) is tuple:
        pair = isinstance(found, tuple | list) and len(found) == len(wanted)
        return pair and all(_fits(*both) for both in zip(found, wanted, strict=True))
    return wanted.fits(found)


def _text(wanted: Any) -> str:
    return f"({', '.join(map(str, wanted))})" if type(wanted) is tuple else str(wanted)


def _brief(found: Any) -> str:
    """What was returned, with arrays by dtype and shape."""
    if type(found) in (tuple, list):
        return f"({', '.join(map(_brief, found))})"
    leaves = jax.tree.leaves(found)
    return layout(found) if leaves and all(map(_is_array, leaves)) else shown(found)


def layout(state: Any) -> str:
    """The arrays of a state with paths, dtypes and shapes, such as ".count int32[4]"."""
    parts = [
        f"{jax.tree_util.keystr(path)} {_dtype(leaf)}{list(np.shape(leaf))}".strip()
        if _is_array(leaf)
        else f"{jax.tree_util.keystr(path)} {shown(leaf)}".strip()
        for path, leaf in jax.tree.leaves_with_path(state)
    ]
    return ", ".join(parts)


def _is_array(x: Any) -> bool:
    """Whether a value is an array, or a number or truth value of Python."""
    return hasattr(x, "dtype") or isinstance(x, bool | int | float)


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jax.dtypes.result_type(x)
