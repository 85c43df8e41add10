"""A draft-length policy of your own, and its check.

    python examples/own_policy.py

`Patient` drafts as much as it may until `patience` rounds in a row had a rejection, then one token
until a round has none.
"""

import jax.numpy as jnp
from jax import Array

from specjax.policies import Policy
from specjax.pytrees import pytree
from specjax.testing import check_policy


@pytree
class Patient(Policy):
    patience: Array  # () int32

    def init(self, keys, gamma_max):
        """Rounds in a row that had a rejection, one number for each row of the batch."""
        return jnp.zeros(keys.shape, jnp.int32)

    def begin(self, state, live, gamma_max):
        """The state, and the longest draft that each row may make."""
        return state, jnp.where(state < self.patience, gamma_max, 1)

    def update(self, state, round_):
        """The state after a round; rows that had finished keep theirs."""
        bad = round_.accepted < round_.verified
        return jnp.where(round_.active, jnp.where(bad, state + 1, 0), state)


def main():
    check_policy(Patient(jnp.int32(2)))  # prints how long its drafts were
    print("Patient decides by the past of its own row, and the output's distribution is as before.")


if __name__ == "__main__":
    main()
