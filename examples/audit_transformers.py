"""The verification step of transformers, in the form that `specjax audit` takes.

    specjax audit examples.audit_transformers:verify

It needs torch. transformers draws from torch's own generator: `rand_like` and `multinomial` are
replaced by draws from rng, and nothing else.
"""

from unittest import mock

import torch
from transformers.generation import utils


class Uniforms:
    """The result of `torch.rand_like`, drawn from rng where it is compared."""

    def __init__(self, rng):
        self.rng = rng

    def __le__(self, other):
        return torch.from_numpy(self.rng.random(tuple(other.shape)) <= other.numpy())


def verify(drafts, draft_probs, target_probs, rng, **settings):
    """Call transformers' function for one draft, and return the tokens."""

    def rand_like(like):
        return Uniforms(rng)

    def multinomial(probs, num_samples):
        return torch.tensor([[rng.choice(probs.shape[1], p=probs[0].numpy())]])

    candidates = torch.from_numpy(drafts)[None]
    draft, target = (torch.from_numpy(p).log()[None] for p in (draft_probs, target_probs))
    with mock.patch.multiple(torch, rand_like=rand_like, multinomial=multinomial):
        tokens, _ = utils._speculative_sampling(candidates, draft, len(drafts), target, **settings)
    return tokens[0]
