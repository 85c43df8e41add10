"""The audit of transformers' own verification step."""

import functools
import sys

import pytest

from command_line import ROOT
from specjax.audit import audit

pytest.importorskip("torch")
sys.path.append(str(ROOT / "examples"))

import audit_transformers

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_transformers_verifies_exactly(dtype):
    found = audit(audit_transformers.verify, dtype=dtype)
    assert found.exact, str(found)


def test_an_ensemble_is_another_distribution():
    """With weight w it keeps tokens by w·p + (1 − w)·q."""
    mixed = functools.partial(audit_transformers.verify, assistant_ensemble_weight=0.5)
    found = audit(mixed)
    assert not found.exact
    # Half of the probability that the draft has too much stays: p = (.7, .3), q = (.5, .5).
    assert found.findings[0].total_variation == pytest.approx(0.1, abs=1e-9)
