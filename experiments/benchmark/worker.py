"""A peer of `beside`: it loads its models, and answers each line of standard input by a line.

    python -m experiments.benchmark.worker NAME DTYPE MODEL...

The first line of its output has its `version`. A request has `ids`, `tokens` and `gamma` (0: plain
decoding); an answer has `ids` and `seconds`.
"""

import dataclasses
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from experiments.benchmark import models
from experiments.benchmark.cases import SHAPES
from specjax import checkpoints
from specjax.generation import generate
from specjax.measure import provenance

Generate = Callable[[Sequence[int], int, int], list[int]]
"""Maps a prompt's ids, the number of new tokens and γ to the new tokens."""


def specjax(dtype: str, *names: str) -> Generate:
    """Load GGUF files, or make random weights of `SHAPES`; no token ends an output."""
    how: dict[str, Any] = {"weights": dtype} if dtype == "int8" else {"dtype": dtype}
    target, *drafts = [
        models.make(name, dtype=dtype, weights="random")
        if name in SHAPES
        else dataclasses.replace(checkpoints.load(name, **how), eos_ids=())
        for name in names
    ]

    def run(ids: Sequence[int], tokens: int, gamma: int) -> list[int]:
        by: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": tokens}
        if gamma:
            by["gamma"] = gamma
        return list(generate(target, drafts[0] if gamma else None, [list(ids)], **by).tokens[0])

    return run


def transformers(dtype: str, *names: str) -> Generate:
    """Load GGUF files; the assistant drafts γ tokens in every round, however sure it is."""
    torch, library = _torch()

    def load(name: str) -> Any:
        place, file = os.path.split(name)
        options = {"gguf_file": file, "dtype": getattr(torch, dtype)}
        return library.AutoModelForCausalLM.from_pretrained(place, **options).eval()

    target, *drafts = [load(name) for name in names]

    def run(ids: Sequence[int], tokens: int, gamma: int) -> list[int]:
        options: dict[str, Any] = {}
        if gamma:
            drafting = drafts[0].generation_config
            drafting.num_assistant_tokens, drafting.assistant_confidence_threshold = gamma, 0.0
            drafting.num_assistant_tokens_schedule = "constant"
            options["assistant_model"] = drafts[0]
        target.generation_config.eos_token_id = None
        given = torch.tensor([list(ids)])
        with torch.inference_mode():
            found = target.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                do_sample=False,
                max_new_tokens=tokens,
                **options,
            )
        return found[0, len(ids) :].tolist()

    return run


def ctranslate2(dtype: str, name: str) -> Generate:
    """Convert random weights of `SHAPES` by way of transformers."""
    torch, hub = _torch()
    library: Any = importlib.import_module("ctranslate2")
    converters: Any = importlib.import_module("ctranslate2.converters.transformers")
    words = [str(i) for i in range(SHAPES[name].vocab_size)]
    with tempfile.TemporaryDirectory() as place:
        made = models.make(name, dtype="float32", weights="random")
        checkpoints.save(f"{place}/model", made, dtype=jnp.dtype("float32"))
        model = hub.T5ForConditionalGeneration.from_pretrained(f"{place}/model")
        loader = converters.T5Loader()
        with torch.inference_mode():
            spec = loader.get_model_spec(model)
        loader.set_vocabulary(spec, words)
        spec.config.bos_token = spec.config.decoder_start_token = words[made.start_id]
        spec.config.eos_token = spec.config.unk_token = words[1]
        spec.validate()
        spec.optimize(quantization=dtype)
        os.mkdir(f"{place}/converted")
        spec.save(f"{place}/converted")
        threads = {"inter_threads": 1, "intra_threads": provenance.environment()["cores"]}
        peer = library.Translator(f"{place}/converted", compute_type=dtype, **threads)

    def run(ids: Sequence[int], tokens: int, gamma: int) -> list[int]:
        del gamma  # it has no speculation
        lengths = {"max_decoding_length": tokens, "min_decoding_length": tokens}
        source = [[words[i] for i in ids]]
        found = peer.translate_batch(source, beam_size=1, **lengths)
        return [int(word) for word in found[0].hypotheses[0]]

    return run


def _torch() -> tuple[Any, Any]:
    torch: Any = importlib.import_module("torch")
    library: Any = importlib.import_module("transformers")
    library.logging.set_verbosity_error()
    torch.set_num_threads(provenance.environment()["cores"])
    return torch, library


PEERS: dict[str, tuple[Callable[..., Generate], list[str]]] = {  # and packages with a version
    "specjax": (specjax, ["jax"]),
    "transformers": (transformers, ["transformers", "torch"]),
    "ctranslate2": (ctranslate2, ["ctranslate2"]),
}


def main(name: str, dtype: str, *files: str) -> None:
    """Serve requests until standard input ends. What libraries print goes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    load, packages = PEERS[name]
    run = load(dtype, *files)
    versions = [f"{package} {importlib.metadata.version(package)}" for package in packages]
    print(json.dumps({"version": ", ".join(versions)}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.perf_counter()
        ids = run(request["ids"], request["tokens"], request["gamma"])
        seconds = time.perf_counter() - begin
        print(json.dumps({"ids": ids, "seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
