"""Calls of `specjax` are checked against the shapes and dtypes of their annotations."""

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from specjax.rules import overlap
from specjax.state import until


def test_a_wrong_shape_or_dtype():
    """Also within jit. Dimensions of one name agree within a call."""
    row = jnp.zeros((2, 3))
    assert overlap(row, row).shape == (2,)
    for other in (jnp.zeros((1, 3)), jnp.zeros((2, 3), int), 0.0):
        for call in (overlap, jax.jit(overlap)):
            with pytest.raises(TypeCheckError, match="draft_logprobs"):
                call(row, other)


def test_placeholders_in_states():
    """jax and tests put other things than arrays into a state."""
    assert jax.tree.map(lambda _: "x", until(1)).done == "x"
