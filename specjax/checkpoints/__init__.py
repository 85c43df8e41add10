"""Checkpoints: `load` one from a directory or the hub, `save` one, `convert` one to safetensors.

`tensors` is the one interface to weights: safetensors, torch's pickles (which are read, never run),
flax's msgpack, T5X's zarr folders and GGUF. Pieces go straight to their place in the fused
parameters, in their final dtype. So loading needs hardly more memory than the model itself.

- `finding`: a name → its directory, its configs
- `family`, `families`, `config_json`: configs → the module to build, and the names of its tensors
- `weights`, `tensors`, `safetensors_files`: files of every format → tensors by name
- `formats`: the wall before formats of others: torch's, flax's, T5X's, GGUF, sentencepiece
- `parameters`: tensors → the parameters of a module, and back
- `tokenizers`: the tokenizer, marks and limits
- `loading`, `saving`: all of it → a `Checkpoint`, and back

Import the names below from here, and all others from their modules.
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
