"""Settings that specjax does not follow, and the warning that names them."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

UNFOLLOWED: dict[str, tuple] = {
    name: neutral
    for neutral, names in (
        ((1,), "num_beams num_beam_groups repetition_penalty encoder_repetition_penalty"),
        ((1,), "typical_p guidance_scale"),
        ((0,), "do_sample diversity_penalty penalty_alpha no_repeat_ngram_size min_length min_p"),
        ((0,), "encoder_no_repeat_ngram_size min_new_tokens epsilon_cutoff eta_cutoff"),
        (([], {}), "bad_words_ids force_words_ids suppress_tokens begin_suppress_tokens"),
        (([], {}), "sequence_bias stop_strings"),
        ((), "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id top_h"),
        ((), "watermarking_config"),
    )
    for name in names.split()
}
"""Settings, each with the values that change nothing."""


def _unfollowed(settings: Mapping[str, Any]) -> list[str]:
    names = [
        f"{key}={settings[key]!r}"
        for key, neutral in UNFOLLOWED.items()
        if settings.get(key) is not None and settings[key] not in neutral
    ]
    if (settings.get("num_beams") or 1) > 1:  # means nothing without beams
        names += [
            f"{key}={settings[key]!r}"
            for key in ("length_penalty", "early_stopping")
            if settings.get(key)
        ]
    return names


def warn(name: str | os.PathLike, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
    """Warn once, naming all settings that are not followed."""
    found = _unfollowed({**raw, **generation})
    for task, settings in (raw.get("task_specific_params") or {}).items():
        if inner := _unfollowed(settings):
            found.append(f"for the task {task!r} {', '.join(inner)}")
    if found:
        warnings.warn(
            f"{name}: its configuration asks transformers' `generate` for {'; '.join(found)}. "
            "specjax does not follow these: it decodes greedily or samples as its arguments say.",
            stacklevel=4,
        )
