"""transformers on the same weights and inputs, where torch is installed."""

import importlib
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import checkpoints, devices
from specjax.measure import provenance
from specjax.models.checkpoint import Checkpoint


def absent() -> str:
    """Why there is no peer here; empty where there is one."""
    if importlib.util.find_spec("torch") is None:
        return "skipped: torch is not installed"
    platform = devices.find().platform
    if platform not in ("cpu", "gpu"):
        return f"skipped: no peer runs on a {platform}"
    return ""


class Transformers:
    """Greedy decoding of one target, alone or assisted by one draft."""

    def __init__(self, target: Checkpoint, draft: Checkpoint | None):
        self._torch: Any = importlib.import_module("torch")
        self._transformers: Any = importlib.import_module("transformers")
        self._transformers.logging.set_verbosity_error()
        self._torch.set_num_threads(provenance.environment()["cores"])
        self._device = "cuda" if devices.device_of(target.model).platform == "gpu" else "cpu"
        self._target = self._copy(target)
        self._draft: Any = None if draft is None else self._copy(draft)

    def _copy(self, checkpoint: Checkpoint) -> Any:
        """The same weights, by way of a directory."""
        dtype = jax.tree.leaves(checkpoint.model.params)[0].dtype
        with tempfile.TemporaryDirectory() as parent:
            directory = Path(parent) / "model"
            checkpoints.save(directory, checkpoint, dtype=jnp.dtype(dtype))
            model = self._transformers.T5ForConditionalGeneration.from_pretrained(
                directory, dtype=getattr(self._torch, dtype.name)
            )
            # What is mapped from the file must be read before the file goes.
            return model.to(self._device).eval()

    def generate(
        self, ids: Sequence[Sequence[int]], tokens: int, gamma: int = 0
    ) -> list[list[int]]:
        """So many tokens for each row.

        Args:
          gamma: tokens of the assistant in every round, however sure it is. 0: no assistant.
        """
        torch, library = self._torch, self._transformers
        given = torch.tensor(ids, device=self._device)
        # A cache that grows: its own has as many layers as the encoder, and the decoder has more.
        one, other = library.DynamicCache(), library.DynamicCache()
        options: dict[str, Any] = {"past_key_values": library.EncoderDecoderCache(one, other)}
        if gamma:
            options["assistant_model"] = self._draft
            drafting = self._draft.generation_config
            drafting.num_assistant_tokens = gamma
            drafting.num_assistant_tokens_schedule = "constant"
            drafting.assistant_confidence_threshold = 0.0
        with torch.inference_mode():
            found = self._target.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                do_sample=False,
                num_beams=1,
                max_new_tokens=tokens,
                **options,
            )
        return found[:, 1:].cpu().tolist()
