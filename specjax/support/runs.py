"""To which run a file of results belongs: a short hash of the settings that it was made with."""

import hashlib
import json
from typing import Any

from specjax.support.command_line import ROOT

# Fields that configs were given after results had been kept, with the values that change nothing.
LATER = {
    "weights": "", "cache": "", "policy": "", "rule": "", "compare": False, "filters": "",
    "carry": False, "mesh": "", "replicate_draft": True,
    "exits": (), "exit_weight": 1.0, "layer_dropout": 0.0,
    "divergence": "forward_kl", "prefixes": "data", "prefix_temperature": 1.0,
    "prefix_inputs": 512, "refresh_every": 100,
}  # fmt: skip


def settings(config) -> dict[str, Any]:
    """A config for `fingerprint`, as JSON.

    Results from before a field was there still belong to it, and so do those of another checkout:
    directories below it go by their path in there.
    """
    found = config.to_dict()
    kept = {k: v for k, v in found.items() if k not in LATER or v != LATER[k]}
    return json.loads(json.dumps(kept, default=str).replace(f"{ROOT}/", ""))


def fingerprint(*parts: Any) -> str:
    """A short hash of JSON-able values, to tell whether a file belongs to this run."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
