"""Decode one family with the specjax that is on the path, and print a JSON line for each cell.

Run by `experiments.versions` as a script, so it uses only what all versions have.
"""

import json
import sys
import time
from typing import Any

import specjax

TREE = "fixed(paths=((0,), (1,), (0, 0), (0, 1), (1, 0)))"
CELLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain": {"gamma": 5},
    "block": {"gamma": 5, "rule": "block"},
    "svip": {"gamma": 5, "policy": "svip"},
    "tree": {"tree": TREE},
}


def main(target_name: str, draft_name: str, inputs: str, repeats: int, new_tokens: int) -> None:
    """Print a row for each cell: tokens of all inputs, and seconds."""
    target, drafter = (specjax.load(name, dtype="float32") for name in (target_name, draft_name))
    with open(inputs, encoding="utf-8") as file:
        texts = json.load(file)
    for temperature in (0.0, 1.0):
        for name, how in CELLS.items():
            model = None if name == "plain" else drafter

            def decode(some, batch_size, key=0, model=model, how=how, temperature=temperature):
                return specjax.generate(
                    target, model, some, temperature=temperature, key=key, batch_size=batch_size,
                    max_new_tokens=new_tokens, **how,
                )  # fmt: skip

            begin = time.perf_counter()
            decode(texts[:8], 1)
            first = time.perf_counter() - begin
            seconds, emitted = [], 0
            for _ in range(repeats):
                begin = time.perf_counter()
                emitted = sum(map(len, decode(texts[:8], 1).tokens))
                seconds.append(time.perf_counter() - begin)
            tokens = decode(texts, 8).tokens
            row = {"cell": name, "temperature": temperature, "first": first}
            row |= {"per_token": min(seconds) / emitted, "tokens": tokens}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))  # type: ignore[arg-type]
