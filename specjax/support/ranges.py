"""Numbers that a user gives, checked in one place before they become arrays."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

SMALLEST = float(np.finfo(np.float32).tiny)  # XLA treats a float32 below it as 0
LARGEST = float(np.finfo(np.float32).max)
LARGEST_WHOLE = int(np.iinfo(np.int32).max)


def number(name: str, value: Any, interval: str, why: str = "") -> float:
    """Check that a value is a real number of an interval, and return it.

    Args:
      name: of the setting, for errors.
      value: what was given: a number of Python or numpy, or an array of shape ().
      interval: "[0, 1)", "(0, ∞)", …; a round bracket leaves the end out.
      why: a clause that the message ends with.

    Raises:
      ValueError: it is no number, or lies outside. What float32 cannot hold counts as 0 or ∞.
    """
    found = _scalar(value)
    if found is not None and abs(found) < SMALLEST:
        found = 0.0
    elif found is not None and abs(found) > LARGEST:
        found = math.inf if found > 0 else -math.inf
    if not _holds(interval, found):
        raise ValueError(_message(name, value, "number", interval, why))
    return float(found)


def whole(name: str, value: Any, interval: str, why: str = "") -> int:
    """Check a whole number of an interval, below 2³¹. Arguments and errors: `number`."""
    found = _scalar(value)
    if not _holds(interval, found) or found > LARGEST_WHOLE or found != int(found):
        why = "it must be below 2³¹" if found is not None and found > LARGEST_WHOLE else why
        raise ValueError(_message(name, value, "whole number", interval, why))
    return int(found)


def truth(name: str, value: Any) -> bool:
    """Check a truth value of Python or numpy; ValueError for anything else, such as "False"."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={shown(value)} must be True or False.")
    return bool(value)


def listed(name: str, values: Any) -> list[Any]:
    """List the entries of a list, tuple or array; ValueError if it is empty or of another kind."""
    array = np.ndim(values) == 1 if hasattr(values, "__array__") else isinstance(values, Sequence)
    if not array or isinstance(values, str | bytes) or not len(values):
        one = f": write ({values!r},) for one number" if _scalar(values) is not None else ""
        raise ValueError(f"{name}={values!r} must be a list of numbers, and not empty{one}.")
    return list(values)


def has(name: str, value: Any, parts: Sequence[str], kind: str) -> Any:
    """Check that a value has all parts of a kind and is no class, else ValueError.

    Args:
      name: of the argument, for errors.
      kind: what it should be, such as "a draft-length policy, or the name of one".
    """
    if isinstance(value, type):
        raise ValueError(f"{name}={shown(value)} is a class: give what it makes, {kind}.")
    if not all(hasattr(value, part) for part in parts):
        raise ValueError(f"{name}={shown(value)} must be {kind}.")
    return value


def shown(value: Any) -> str:
    """Format a value for a message, cut to 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _scalar(value: Any) -> Any:
    """A value as a number, or None; truth values are no numbers."""
    if getattr(value, "shape", None) == ():
        value = value.item()
    truth = type(value) is bool
    return value if isinstance(value, numbers.Real) and not truth else None


def _holds(interval: str, value: Any) -> bool:
    low, high = (float(end.replace("∞", "inf")) for end in interval[1:-1].split(","))
    return value is not None and (
        (low < value or (low == value and interval[0] == "["))
        and (value < high or (value == high and interval[-1] == "]"))
    )


def _message(name: str, value: Any, kind: str, interval: str, why: str) -> str:
    low, high = interval[1:-1].split(", ")
    where = f"in {interval}"
    if high == "∞":
        where = f"{'≥' if interval[0] == '[' else '>'} {low}"
        where += " and finite" if kind == "number" and interval[-1] == ")" else ""
    return f"{name}={value!r} must be a {kind} {where}{'; ' if why else ''}{why}."


def cause(error: BaseException, longest: int = 500) -> str:
    """The class of an error and the first line of its message, for the message of another one."""
    line = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {line[:longest]}"
