"""The smaller models of a target's family: what `select` tries if no draft is named."""

from pathlib import Path

import numpy as np

from specjax import checkpoints, drafters
from specjax.checkpoints.weights import find_tensors
from specjax.support.files import read_json


def _members(name: str, sizes: str) -> list[str]:
    return [name.format(size) for size in sizes.split(" ")]


# Members of one tokenizer, the smallest first.
FAMILIES = (
    _members("google-t5/t5-{}", "small base large 3b 11b"),
    _members("google/flan-t5-{}", "small base large xl xxl"),
    _members("google/t5-v1_1-{}", "small base large xl xxl"),
    _members("google/mt5-{}", "small base large xl xxl"),
    _members("google/byt5-{}", "small base large xl xxl"),
    _members("google/umt5-{}", "small base xl xxl"),
    ["distilbert/distilgpt2", *_members("openai-community/gpt2{}", " -medium -large -xl")],
    _members("Qwen/Qwen2.5-{}B", "0.5 1.5 3 7 14 32 72"),
    _members("Qwen/Qwen2.5-{}B-Instruct", "0.5 1.5 3 7 14 32 72"),
    _members("Qwen/Qwen3-{}B", "0.6 1.7 4 8 14 32"),
    _members("meta-llama/Llama-3.{}B", "2-1 2-3 1-8 1-70 1-405"),
    _members("meta-llama/Llama-3.{}B-Instruct", "2-1 2-3 1-8 1-70 1-405"),
    *(_members(f"google/gemma-2-{{}}b{kind}", "2 9 27") for kind in ("", "-it")),
    ["google/gemma-3-270m", *_members("google/gemma-3-{}b-pt", "1 4 12 27")],
    _members("google/gemma-3-{}-it", "270m 1b 4b 12b 27b"),
    *(
        _members(f"google/t5gemma-{{}}-{kind}", "s-s b-b l-l ml-ml xl-xl 2b-2b 9b-2b 9b-9b")
        for kind in ("ul2", "ul2-it", "prefixlm", "prefixlm-it")
    ),
    _members("google/t5gemma-2-{}", "270m-270m 1b-1b 4b-4b"),
)


def smaller_members(target: str) -> list[str]:
    """List models to try as drafts, the smallest first.

    For a directory these are the directories beside it with fewer parameters, for a hub name the
    smaller members of its family.

    Raises:
      ValueError: none is known.
    """
    directory = Path(target)
    found = _beside(directory) if directory.is_dir() else _of_family(target)
    if not found:
        names = ", ".join(drafters.NAMES)
        raise ValueError(f"No smaller model is known for {target}: name drafts, or try {names}.")
    return found


def _of_family(target: str) -> list[str]:
    """Smaller members by a hub name, which is often given without its owner: "t5-small"."""
    own = target.split("/")[-1]
    for family in FAMILIES:
        short = [name.split("/")[-1] for name in family]
        if own in short:
            return family[: short.index(own)]
    return []


def _beside(directory: Path) -> list[str]:
    sizes = {}
    for path in directory.resolve().parent.iterdir():
        try:
            kind = read_json(path / "config.json").get("model_type")
            tensors = find_tensors(path).values()
        except (OSError, ValueError):
            continue  # not a model, or an incomplete one
        if isinstance(kind, str) and kind in checkpoints.FAMILIES:
            sizes[path] = kind, sum(int(np.prod(tensor.shape)) for tensor in tensors)
    own = sizes.get(directory.resolve(), ("", 0))
    smaller = [path for path, (kind, size) in sizes.items() if kind == own[0] and size < own[1]]
    smaller.sort(key=lambda path: (sizes[path][1], path.name))
    return [str(directory.parent / path.name) for path in smaller]
