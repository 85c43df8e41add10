"""Checkpoints: `load` one from a directory or the hub, `save` one, `convert` one to safetensors.

Weights in safetensors, in torch's pickles (which are read, never run), in flax's msgpack and in
T5X's zarr folders come in by one door, `tensors`. They go a piece at a time to their place in the
fused parameters, in the dtype they will have, so loading needs hardly more memory than the model
itself.

- `finding`: a name → its directory, its configs
- `families`, `config_json`: configs → what is built, and what its tensors are called
- `weights`, `tensors`: files of every format → tensors by name
- `parameters`: tensors → the parameters of a module, and back
- `tokenizers`: the tokenizer, marks and limits
- `loading`, `saving`: all of it → a `Checkpoint`, and back

What is listed here is imported from here; all else, from its module.
"""

from specjax.checkpoints.families import DRAFTER, FAMILIES
from specjax.checkpoints.finding import fingerprint
from specjax.checkpoints.loading import described, load, outline, shapes
from specjax.checkpoints.parameters import filled, unfilled
from specjax.checkpoints.saving import convert, save
from specjax.models.checkpoint import DEFAULT_MAX_SOURCE_LEN, Checkpoint, start_field

__all__ = [
    "DEFAULT_MAX_SOURCE_LEN",
    "DRAFTER",
    "FAMILIES",
    "Checkpoint",
    "convert",
    "described",
    "filled",
    "fingerprint",
    "load",
    "outline",
    "save",
    "shapes",
    "start_field",
    "unfilled",
]
