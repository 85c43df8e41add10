"""Random numbers whose every outcome is taken, in place of numpy's `Generator`.

`outcomes` runs a function once for each outcome of all its draws, by backtracking. A uniform number
is an object: a comparison with a number has two outcomes, and narrows the interval that the number
lies in. So `rng.random() < p / q` runs unchanged, and so do `np.searchsorted(np.cumsum(p), u)` and
`np.argmax(logits + rng.gumbel(size=n))`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

NEGLIGIBLE = 1e-12  # outcomes that are less likely are left out
MAX_OUTCOMES = 50_000  # of one draw, and entries of an array
MAX_DRAWS = 300_000  # and comparisons of drawn numbers, in all runs on one table
REPEATED = 64  # runs of one table that are repeated, to find noise of the function's own
WAY_OUT = (
    "Compare each random number with plain numbers, draw tokens by rng.choice, or draw samples "
    "instead of enumerating: rng='generator' (--rng=generator), or rng='key' for jax."
)

Result = TypeVar("Result")


class Refused(ValueError):
    """The function does something that cannot be enumerated."""


class TooMany(Refused):
    """The function has too many outcomes, or draws without an end."""


class _Unlikely(BaseException):
    """Leaves a run whose probability is negligible; no `except Exception` stops it."""


class _Spent(BaseException):
    """Leaves the last run, after `MAX_DRAWS` draws; no `except Exception` stops it."""


@dataclasses.dataclass
class Branch:
    """A draw: its possible outcomes with their probabilities, and which of them is taken."""

    possible: list[tuple[int, float]]
    taken: int = 0


def outcomes(function: Callable[["Random"], Result]) -> Iterator[tuple[float, Result]]:
    """Run a function for every outcome of its draws: (probability, result), one after the other.

    The first runs are repeated with the same outcomes, and must give the same results.

    Raises:
      Refused: the function draws noise of its own.
      TooMany: all runs together draw more than `MAX_DRAWS` numbers.
    """
    path: list[Branch] = []
    steps = iter(range(MAX_DRAWS))
    for count in itertools.count():
        random = Random(path, steps)
        try:
            result = function(random)
            if random.depth < len(path):
                raise own_noise()
            if count < REPEATED and function(Random(path, steps)) != result:
                raise own_noise()
            yield random.weight, result
        except _Unlikely:
            pass
        except _Spent:
            raise TooMany(
                f"It draws more than {MAX_DRAWS:,} numbers over all outcomes of one table. A loop "
                f"that draws until it accepts has no end here. {WAY_OUT}"
            ) from None
        while path and path[-1].taken + 1 == len(path[-1].possible):
            path.pop()
        if not path:
            return
        path[-1].taken += 1


def own_noise() -> Refused:
    """The error for two runs with the same outcomes that differ."""
    return Refused(
        "It draws its own noise: two runs with the same outcomes of `rng` differ. Take every "
        "random number from the argument rng, or draw samples: rng='generator' or 'key'."
    )


class Random:
    """Draws like numpy's `Generator`, along a path of outcomes.

    Args:
      path: the outcomes to take; later ones are appended.
      steps: yields once for each draw that is left.

    Attributes:
      weight: the probability of the outcomes so far.
      depth: the number of draws so far that had more than one outcome.
      used: whether a function of numpy's names was called.
    """

    def __init__(self, path: list[Branch], steps: Iterator[int]):
        self.weight, self.depth, self.used = 1.0, 0, False
        self._path, self._steps = path, steps

    def _step(self) -> None:
        if next(self._steps, None) is None:
            raise _Spent

    def branch(self, chances: Any) -> int:
        """Draw the index of a probability; those after the end of the path begin with the first."""
        self._step()
        possible = [(i, float(c)) for i, c in enumerate(chances) if c > NEGLIGIBLE]
        if len(possible) == 1:
            return possible[0][0]
        if self.depth == len(self._path):
            self._path.append(Branch(possible))
        branch = self._path[self.depth]
        if branch.possible != possible:
            raise own_noise()
        index, chance = possible[branch.taken]
        self.depth += 1
        self.weight *= chance
        if self.weight < NEGLIGIBLE:
            del self._path[self.depth :]
            raise _Unlikely
        return index

    def random(self, size: Any = None) -> Any:
        """Draw uniform numbers from [0, 1)."""
        return self._filled(lambda: Uniform(self), size)

    def uniform(self, low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
        """Draw uniform numbers from [low, high)."""
        return self._filled(lambda: Uniform(self) * (high - low) + low, size)

    def integers(self, low: int, high: int | None = None, size: Any = None) -> Any:
        """Draw integers from low to high − 1; with one argument from 0."""
        low, high = (0, low) if high is None else (low, high)
        return low + self.choice(high - low, size)

    def choice(self, a: Any, size: Any = None, replace: bool = True, p: Any = None) -> Any:
        """Draw from a sequence, or from 0 … a − 1, with probabilities p; without p all are equal.

        Raises:
          ValueError: p is no distribution over a.
        """
        self.used = True
        if np.ndim(a) == 0 and a > MAX_OUTCOMES:
            raise Refused(f"It draws one of {a} numbers; {MAX_OUTCOMES:,} are followed. {WAY_OUT}")
        values = np.arange(a) if np.ndim(a) == 0 else np.asarray(a)
        p = np.full(len(values), 1 / max(len(values), 1)) if p is None else p
        chances, shape = distribution(p, len(values)), shape_of(size)
        if not replace and math.prod(shape) > np.count_nonzero(chances):
            raise ValueError(f"choice: {size} draws without replacement of {len(values)} values")

        def draw() -> Any:
            nonlocal chances
            index = self.branch(chances)
            if not replace:
                chances = np.where(np.arange(len(values)) == index, 0.0, chances)
                chances = chances / chances.sum() if chances.any() else chances
            return values[index]

        drawn = np.array([draw() for _ in np.ndindex(shape)])
        return drawn.reshape(shape + values.shape[1:])[()]

    def multinomial(self, n: int, pvals: Any) -> np.ndarray:
        """Count n draws with probabilities."""
        drawn = self.choice(len(pvals), n, p=pvals)
        return np.bincount(drawn, minlength=len(pvals))

    def gumbel(self, loc: float = 0.0, scale: float = 1.0, size: Any = None) -> Any:
        """Draw numbers of the Gumbel distribution, for an argmax over them."""
        return self._filled(lambda: Gumbel(self) * scale + loc, size)

    def exponential(self, scale: float = 1.0, size: Any = None) -> Any:
        """Draw exponential numbers, for an argmin of them over probabilities."""
        return self._filled(lambda: Exponential(Gumbel(self)) / (1 / scale), size)

    def standard_exponential(self, size: Any = None) -> Any:
        """Draw exponential numbers of mean 1."""
        return self.exponential(size=size)

    def _filled(self, draw: Callable[[], Any], size: Any) -> Any:
        """One number, or an array of them."""
        self.used = True
        numbers = np.empty(shape_of(size), object)
        for index in np.ndindex(numbers.shape):
            self._step()
            numbers[index] = draw()
        return numbers[()]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Refused(
            f"rng.{name} cannot be enumerated; rng has random, uniform, choice, integers, "
            f"multinomial, gumbel and exponential. {WAY_OUT}"
        )


def shape_of(size: Any) -> tuple[int, ...]:
    """The shape of an array of draws; `size` is None, a number or a shape, as in numpy."""
    shape = () if size is None else tuple(int(n) for n in np.atleast_1d(size))
    if math.prod(shape) > MAX_OUTCOMES:
        raise Refused(f"It draws an array of size {size} at once. {WAY_OUT}")
    return shape


def distribution(p: Any, size: int) -> np.ndarray:
    """Check and normalise probabilities, as numpy's `choice` does."""
    chances = np.asarray(p, np.float64)
    if chances.shape != (size,):
        raise ValueError(f"choice: p has shape {chances.shape}, a has {size} entries")
    if not np.isfinite(chances).all() or (chances < 0).any():
        raise ValueError(f"choice: p = {chances} has entries that are no probabilities")
    if abs(chances.sum() - 1) > 1e-6:
        raise ValueError(f"choice: p = {chances} sums to {chances.sum():.6g}, not 1")
    return chances / chances.sum()


class _Number:
    """A random number that is known as far as it was compared."""

    def __float__(self) -> float:
        raise Refused(f"It takes the value of a random number (float, int, bool). {WAY_OUT}")

    __int__ = __index__ = __bool__ = __float__
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return False if _is_number(other) or isinstance(other, _Number) else NotImplemented

    def _below(self, other: Any) -> bool:
        """Whether the number is less than another."""
        raise NotImplementedError

    # Equal numbers have probability 0: < and <= are one. Nothing compares with NaN.
    def __lt__(self, other: Any) -> Any:
        return other is not self and _compared(other, lambda: self._below(other))

    def __gt__(self, other: Any) -> Any:
        return other is not self and _compared(other, lambda: not self._below(other))

    __le__, __ge__ = __lt__, __gt__

    # Subclasses define times and plus.
    def __mul__(self, other: Any) -> Any:
        return self._times(_number(other)) if _is_number(other) else _undefined(other)

    def __add__(self, other: Any) -> Any:
        return self._plus(_number(other)) if _is_number(other) else _undefined(other)

    def __truediv__(self, other: Any) -> Any:
        return self * (1 / _number(other)) if _is_number(other) else _undefined(other)

    def __sub__(self, other: Any) -> Any:
        return self + -_number(other) if _is_number(other) else _undefined(other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __neg__(self) -> Any:
        return self * -1.0

    __rmul__, __radd__ = __mul__, __add__

    def _times(self, factor: float) -> Any:
        raise Refused(f"It multiplies a random number. {WAY_OUT}")

    def _plus(self, term: float) -> Any:
        raise Refused(f"It adds to a random number. {WAY_OUT}")


def _is_number(other: Any) -> bool:
    return not isinstance(other, _Number) and np.ndim(other) == 0


def _number(other: Any) -> float:
    try:
        return float(other)
    except (TypeError, ValueError):
        raise Refused(f"It computes with a random number and {other!r}. {WAY_OUT}") from None


def _undefined(other: Any) -> Any:
    """NotImplemented for arrays, which then go through their entries."""
    if isinstance(other, _Number):
        raise Refused(f"It computes with two random numbers. {WAY_OUT}")
    return NotImplemented


def _compared(other: Any, below: Callable[[], bool]) -> Any:
    if isinstance(other, _Number):
        return below()
    if np.ndim(other):
        return NotImplemented
    return False if math.isnan(_number(other)) else below()


class Uniform(_Number):
    """A monotone function of a uniform number.

    Args:
      interval: where the uniform number lies, [low, high]; functions of one number share it.
      inverse: maps a threshold to the uniform number that reaches it.
      rising: whether the function rises.
    """

    def __init__(
        self,
        random: Random,
        interval: list[float] | None = None,
        inverse: Callable[[float], float] = float,
        rising: bool = True,
    ):
        self._random, self._inverse, self._rising = random, inverse, rising
        self._interval = [0.0, 1.0] if interval is None else interval

    def _map(self, inverse: Callable[[float], float], rising: bool = True) -> "Uniform":
        """Compose with a function that has this inverse."""
        return Uniform(
            self._random,
            self._interval,
            lambda threshold: self._inverse(inverse(threshold)),
            self._rising == rising,
        )

    def _times(self, factor: float) -> Any:
        return self._map(lambda t: t / factor, factor > 0) if factor else 0.0

    def _plus(self, term: float) -> Any:
        return self._map(lambda t: t - term)

    def log(self) -> "Uniform":
        """The natural logarithm; numpy's `log` calls it."""
        return self._map(lambda t: math.exp(min(t, 700.0)))

    def _below(self, other: Any) -> bool:
        if isinstance(other, _Number):
            raise Refused(f"It compares two random numbers. {WAY_OUT}")
        low, high = self._interval
        point = min(max(self._inverse(_number(other)), low), high)
        share = (point - low) / (high - low)
        under = self._random.branch([1 - share, share]) == 1
        if NEGLIGIBLE < share < 1 - NEGLIGIBLE:
            self._interval[under] = point
        return under == self._rising


class Gumbel(_Number):
    """A number of the Gumbel distribution, times a scale, plus a shift.

    The larger of two such numbers is again of that distribution, whichever of them it is. So an
    argmax is enumerated comparison by comparison. The smaller one must not be used again.

    Args:
      noise: [location of the noise, whether it was the smaller of two].
    """

    def __init__(
        self,
        random: Random,
        noise: list[Any] | None = None,
        shift: float = 0.0,
        scale: float = 1.0,
    ):
        self._random, self._shift, self._scale = random, shift, scale
        self._noise: list[Any] = [0.0, False] if noise is None else noise

    def _times(self, factor: float) -> Any:
        if factor < 0:
            raise Refused(f"It takes the negative of a Gumbel number. {WAY_OUT}")
        shift, scale = self._shift * factor, self._scale * factor
        return Gumbel(self._random, self._noise, shift, scale) if factor else 0.0

    def _plus(self, term: float) -> Any:
        return Gumbel(self._random, self._noise, self._shift + term, self._scale)

    def _below(self, other: Any) -> bool:
        if not isinstance(other, Gumbel):
            if _is_number(other) and abs(_number(other)) == math.inf:
                return _number(other) > 0
            raise Refused(f"It compares a Gumbel number with another number. {WAY_OUT}")
        if other._noise is self._noise or self._scale != other._scale:
            raise Refused(f"It compares Gumbel numbers that share noise, or scales. {WAY_OUT}")
        if self._noise[1] or other._noise[1]:
            raise Refused(f"It uses Gumbel noise again, behind an argmax. {WAY_OUT}")
        if -math.inf in (self._shift, other._shift):
            return self._shift < other._shift
        mine, its = (n._shift / n._scale + n._noise[0] for n in (self, other))
        both = float(np.logaddexp(mine, its))
        below = self._random.branch([math.exp(mine - both), math.exp(its - both)]) == 1
        larger, location, smaller = (other, its, self) if below else (self, mine, other)
        larger._noise[0] += both - location
        smaller._noise[1] = True
        return below


class Exponential(_Number):
    """An exponential time divided by a rate, or a rate divided by an exponential time.

    Args:
      gumbel: minus the logarithm of the time, plus that of the rate.
      inverted: whether this is a rate divided by a time.
    """

    def __init__(self, gumbel: Gumbel, inverted: bool = False):
        self._gumbel, self._inverted = gumbel, inverted

    def __truediv__(self, other: Any) -> Any:
        if not _is_number(other):
            return _undefined(other)
        logarithm = _logarithm(_number(other))
        return Exponential(self._gumbel + (-logarithm if self._inverted else logarithm))

    def __rtruediv__(self, other: Any) -> Any:
        return Exponential(self._gumbel + _logarithm(_number(other)), not self._inverted)

    def _below(self, other: Any) -> bool:
        if not isinstance(other, Exponential) or self._inverted != other._inverted:
            raise Refused(f"It compares an exponential number with another number. {WAY_OUT}")
        if self._inverted:
            return self._gumbel._below(other._gumbel)
        return not self._gumbel._below(other._gumbel)


def _logarithm(number: float) -> float:
    return math.log(number) if number > 0 else -math.inf
