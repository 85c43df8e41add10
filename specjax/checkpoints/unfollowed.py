"""Settings that specjax does not follow, and the warning that names them."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

# Settings, each with the values that change nothing.
UNFOLLOWED: dict[str, tuple] = {
    "do_sample": (False,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "exponential_decay_length_penalty": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "typical_p": (1.0,),
    "min_p": (0.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "stop_strings": ([],),
}


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
